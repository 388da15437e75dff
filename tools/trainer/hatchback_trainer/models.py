"""The dense networks of the four model families: DLRM, DCNv2, DeepFM, Wide & Deep.

A network starts where the embedding lookup ends: it takes pooled embedding vectors and dense
features, batch first, and returns logits `[B, 1]`. It never holds an embedding table; those are in
`embeddings.py` here and in the cache in the car.

Letters: B batch, nd dense features, T features, D embedding dim, N vectors that interact (T + 1).
"""

import torch
from torch import nn


def mlp(sizes, last_relu):
    """Linear layers `sizes[0] -> sizes[1] -> ...`, a ReLU after each; after the last
    one only if `last_relu`."""
    layers = []
    for width_in, width_out in zip(sizes, sizes[1:]):
        layers += [nn.Linear(width_in, width_out), nn.ReLU()]
    return nn.Sequential(*(layers if last_relu else layers[:-1]))


def init_xavier(network):
    """Initialises a network that is never trained, so that signals keep their size. The
    caller sets the seed."""
    for module in network.modules():
        if isinstance(module, nn.Linear):
            nn.init.xavier_normal_(module.weight)
            if module.bias is not None:
                nn.init.normal_(module.bias, std=0.1)


class DotInteraction(nn.Module):
    """Dot products of all pairs of N vectors: `[B, N, D] -> [B, N*(N-1)/2]`.

    Pairs are the lower triangle, row by row, as in facebook's DLRM: (1,0) (2,0) (2,1) (3,0) ...
    """

    def __init__(self, vectors):
        super().__init__()
        pairs = [i * vectors + j for i in range(vectors) for j in range(i)]
        self.register_buffer("pairs", torch.tensor(pairs), persistent=False)

    def forward(self, x):
        products = torch.matmul(x, x.transpose(1, 2))  # [B, N, N]
        return products.flatten(1).index_select(1, self.pairs)


class DLRM(nn.Module):
    """Bottom MLP on the dense features, dot interaction with the embeddings, top MLP.
    `bottom[-1]` must be D."""

    def __init__(self, dense, tables, dim, bottom, top):
        super().__init__()
        self.bottom = mlp([dense, *bottom, dim], last_relu=True)
        self.interaction = DotInteraction(tables + 1)
        self.top = mlp([dim + (tables + 1) * tables // 2, *top, 1], last_relu=False)

    def forward(self, dense, emb):
        """dense `[B, nd]`, emb `[B, T, D]` -> logit `[B, 1]`."""
        x = self.bottom(dense)  # [B, D]
        pairs = self.interaction(torch.cat([x.unsqueeze(1), emb], dim=1))  # [B, T*(T+1)/2]
        return self.top(torch.cat([x, pairs], dim=1))


class LowRankCross(nn.Module):
    """One cross layer of DCNv2: `x0 * (V(U x) + b) + x`, all `[B, width]`. U is width -> rank,
    and V is rank -> width."""

    def __init__(self, width, rank):
        super().__init__()
        self.u = nn.Linear(width, rank, bias=False)
        self.v = nn.Linear(rank, width)

    def forward(self, x0, x):
        return x0 * self.v(self.u(x)) + x


class DCNv2(nn.Module):
    """Bottom MLP on the dense features, then cross layers on [dense | embeddings], then the
    top MLP (stacked form)."""

    def __init__(self, dense, tables, dim, bottom, crosses, rank, top):
        super().__init__()
        width = (tables + 1) * dim
        self.bottom = mlp([dense, *bottom, dim], last_relu=True)
        self.crosses = nn.ModuleList(LowRankCross(width, rank) for _ in range(crosses))
        self.top = mlp([width, *top, 1], last_relu=False)

    def forward(self, dense, emb):
        """dense `[B, nd]`, emb `[B, T, D]` -> logit `[B, 1]`."""
        x0 = torch.cat([self.bottom(dense), emb.flatten(1)], dim=1)  # [B, (T+1)*D]
        x = x0
        for cross in self.crosses:
            x = cross(x0, x)
        return self.top(x)


class DeepFM(nn.Module):
    """First-order weights + factorisation machine + MLP, added up. Each feature has a dim-1
    and a dim-D table."""

    def __init__(self, dense, tables, dim, deep):
        super().__init__()
        self.linear = nn.Linear(dense, 1)
        self.deep = mlp([dense + tables * dim, *deep, 1], last_relu=False)

    def forward(self, dense, first, second):
        """dense `[B, nd]`, first `[B, T]`, second `[B, T, D]` -> logit `[B, 1]`."""
        order1 = self.linear(dense) + first.sum(dim=1, keepdim=True)
        total = second.sum(dim=1)  # [B, D]
        squares = (second * second).sum(dim=1)  # [B, D]
        order2 = 0.5 * (total * total - squares).sum(dim=1, keepdim=True)
        return order1 + order2 + self.deep(torch.cat([dense, second.flatten(1)], dim=1))


class WideDeep(nn.Module):
    """A linear model over the wide features (their dim-1 tables hold its weights) + an MLP
    over the deep ones."""

    def __init__(self, dense, deep_width, deep):
        super().__init__()
        self.deep = mlp([dense + deep_width, *deep, 1], last_relu=False)

    def forward(self, dense, wide, deep):
        """dense `[B, nd]`, wide `[B, T]`, deep `[B, sum of the deep features' widths]`
        -> logit `[B, 1]`."""
        return wide.sum(dim=1, keepdim=True) + self.deep(torch.cat([dense, deep], dim=1))
