"""The dense networks of five more families: MMoE, DIN, DIEN, BST and one block of HSTU as a ranker.

A history is a feature that is not pooled: `length` vectors side by side, the last ones zero where a
sample has fewer. A network recognises a missing position by its zeros. It returns logits `[B, 1]`.

Letters: B batch, nd dense features, L length of the history, D embedding dim.
"""

import torch
from torch import nn

from .models import mlp


class MMoE(nn.Module):
    """Experts that two tasks share, a gate and a tower for each task."""

    def __init__(self, dense, width, experts, expert, tower):
        super().__init__()
        self.experts = nn.ModuleList(
            mlp([dense + width, *expert], last_relu=True) for _ in range(experts)
        )
        self.gates = nn.ModuleList(nn.Linear(dense + width, experts) for _ in range(2))
        self.towers = nn.ModuleList(mlp([expert[-1], *tower, 1], last_relu=False) for _ in range(2))

    def forward(self, dense, emb):
        """dense `[B, nd]`, emb `[B, sum of widths]` -> the logits of both tasks, `[B, 1]` each."""
        x = torch.cat([dense, emb], dim=1)
        experts = torch.stack([expert(x) for expert in self.experts], dim=1)  # [B, experts, width]
        logits = []
        for gate, tower in zip(self.gates, self.towers):
            weights = torch.softmax(gate(x), dim=1).unsqueeze(1)  # [B, 1, experts]
            logits.append(tower(torch.bmm(weights, experts).squeeze(1)))
        return tuple(logits)


class History(nn.Module):
    """Base of the families with a history: its shape, and the mask of its positions."""

    def __init__(self, length, dim):
        super().__init__()
        self.length, self.dim = length, dim

    def positions(self, history):
        """Returns the history as `[B, L, D]`, and whether each position has a row: `[B, L]`."""
        history = history.view(-1, self.length, self.dim)
        return history, history.abs().sum(dim=2) > 0


class LocalAttention(nn.Module):
    """DIN's activation unit: the weight of each position, from target and position. `[B, L]`."""

    def __init__(self, dim, hidden):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4 * dim, hidden), nn.PReLU(hidden), nn.Linear(hidden, 1))

    def forward(self, target, history):
        target = target.unsqueeze(1).expand_as(history)
        both = torch.cat([target, history, target - history, target * history], dim=2)
        # PReLU takes its channels on axis 1.
        hidden = self.net[1](self.net[0](both).transpose(1, 2)).transpose(1, 2)
        return self.net[2](hidden).squeeze(2)


class DIN(History):
    """A history, weighted by its positions' relation to the target."""

    def __init__(self, dense, length, dim, hidden, top):
        super().__init__(length, dim)
        self.attention = LocalAttention(dim, hidden)
        self.top = mlp([dense + 2 * dim, *top, 1], last_relu=False)

    def forward(self, dense, target, history):
        """dense `[B, nd]`, target `[B, D]`, history `[B, L*D]` -> logit `[B, 1]`."""
        history, mask = self.positions(history)
        weights = self.attention(target, history).masked_fill(~mask, -1e9)
        weights = torch.softmax(weights, dim=1) * mask.float()
        interest = torch.bmm(weights.unsqueeze(1), history).squeeze(1)
        return self.top(torch.cat([dense, target, interest], dim=1))


class DIEN(History):
    """A GRU over the history, then one whose update gate attention scales (AUGRU)."""

    def __init__(self, dense, length, dim, hidden, top):
        super().__init__(length, dim)
        self.extract = nn.GRU(dim, dim, batch_first=True)
        self.attention = LocalAttention(dim, hidden)
        self.gates, self.candidate = nn.Linear(2 * dim, 2 * dim), nn.Linear(2 * dim, dim)
        self.top = mlp([dense + 2 * dim, *top, 1], last_relu=False)

    def forward(self, dense, target, history):
        """dense `[B, nd]`, target `[B, D]`, history `[B, L*D]` -> logit `[B, 1]`."""
        history, mask = self.positions(history)
        states, _ = self.extract(history)
        weights = torch.softmax(self.attention(target, states).masked_fill(~mask, -1e9), dim=1)
        interest = torch.zeros_like(target)
        for at in range(self.length):
            state = states[:, at]
            update, reset = torch.sigmoid(
                self.gates(torch.cat([state, interest], dim=1))
            ).chunk(2, dim=1)
            candidate = torch.tanh(self.candidate(torch.cat([state, reset * interest], dim=1)))
            update = update * weights[:, at : at + 1]
            interest = (1 - update) * interest + update * candidate
        return self.top(torch.cat([dense, target, interest], dim=1))


class BST(History):
    """A transformer layer over the history and the target."""

    def __init__(self, dense, length, dim, heads, hidden, top):
        super().__init__(length, dim)
        self.place = nn.Parameter(torch.randn(1, length + 1, dim) * 0.1)
        self.attention = nn.MultiheadAttention(dim, heads, batch_first=True)
        self.norms = nn.ModuleList(nn.LayerNorm(dim) for _ in range(2))
        self.feed = nn.Sequential(nn.Linear(dim, hidden), nn.LeakyReLU(), nn.Linear(hidden, dim))
        self.top = mlp([dense + (length + 1) * dim, *top, 1], last_relu=False)

    def forward(self, dense, target, history):
        """dense `[B, nd]`, target `[B, D]`, history `[B, L*D]` -> logit `[B, 1]`."""
        history, _ = self.positions(history)
        x = torch.cat([history, target.unsqueeze(1)], dim=1) + self.place
        mixed, _ = self.attention(x, x, x, need_weights=False)
        x = self.norms[0](x + mixed)
        x = self.norms[1](x + self.feed(x))
        return self.top(torch.cat([dense, x.flatten(1)], dim=1))


class HSTU(History):
    """One block of HSTU: attention with SiLU instead of softmax, causal, gated by the input."""

    def __init__(self, dense, length, dim, heads, top):
        super().__init__(length, dim)
        n = length + 1
        self.heads = heads
        self.inward, self.outward = nn.Linear(dim, 4 * dim), nn.Linear(dim, dim)
        self.before, self.after = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.bias = nn.Parameter(torch.randn(1, 1, n, n) * 0.1)
        self.register_buffer("causal", torch.tril(torch.ones(n, n)) / n, persistent=False)
        self.top = mlp([dense + 2 * dim, *top, 1], last_relu=False)

    def split(self, x):
        return x.view(-1, self.length + 1, self.heads, self.dim // self.heads).transpose(1, 2)

    def forward(self, dense, target, history):
        """dense `[B, nd]`, target `[B, D]`, history `[B, L*D]` -> logit `[B, 1]`."""
        history, _ = self.positions(history)
        x = torch.cat([history, target.unsqueeze(1)], dim=1)
        gate, value, query, key = nn.functional.silu(self.inward(self.before(x))).chunk(4, dim=2)
        weights = torch.matmul(self.split(query), self.split(key).transpose(2, 3)) + self.bias
        mixed = torch.matmul(nn.functional.silu(weights) * self.causal, self.split(value))
        mixed = mixed.transpose(1, 2).reshape(-1, self.length + 1, self.dim)
        x = x + self.outward(self.after(mixed) * gate)
        return self.top(torch.cat([dense, target, x[:, -1]], dim=1))
