"""A ranker in the form of MLPerf's DLRMv3, at the size of a car: HSTU layers over what a user did,
with the tables in TorchRec's collections. Trains on synthetic users and exports the model.

usage: extras/hstu_ranker.py FOLDER [STEPS]    then `hatchback pack FOLDER/model.toml`

Letters: B batch, L length of the history, T tokens (user, history, candidate), D embedding dim.
"""

import sys
from pathlib import Path

import torch
import torchrec
from torch import nn

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import hatchback_trainer  # noqa: E402

LENGTH, DIM = 64, 32
TABLES = {  # rows, features
    "item": (20_000, ["history", "candidate"]),
    "action": (8, ["actions"]),
    "age": (32, ["ages"]),
}
USERS, KINDS = 5_000, 16


class Layer(nn.Module):
    """HSTU: attention with SiLU instead of softmax, and a gate instead of a feed-forward part."""

    def __init__(self, dim, heads, tokens):
        super().__init__()
        self.heads = heads
        self.inward, self.outward = nn.Linear(dim, 4 * dim), nn.Linear(dim, dim)
        self.before, self.after = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.bias = nn.Parameter(torch.zeros(heads, tokens, tokens))

    def forward(self, x, visible):
        """x `[B, T, D]`, visible `[B, 1, T, T]` -> `[B, T, D]`."""
        split = lambda one: one.unflatten(2, (self.heads, -1)).transpose(1, 2)
        gate, value, query, key = nn.functional.silu(self.inward(self.before(x))).chunk(4, dim=2)
        weights = torch.matmul(split(query), split(key).transpose(2, 3)) + self.bias
        weights = nn.functional.silu(weights) * visible / x.shape[1]
        mixed = torch.matmul(weights, split(value)).transpose(1, 2).flatten(2)
        return x + self.outward(self.after(mixed) * gate)


class Ranker(nn.Module):
    """Scores whether a user watches a candidate, and whether the user likes it."""

    def __init__(self, layers=3, heads=2):
        super().__init__()
        self.rows = torchrec.EmbeddingCollection(tables=[
            torchrec.EmbeddingConfig(
                name=name, embedding_dim=DIM, num_embeddings=rows, feature_names=features)
            for name, (rows, features) in TABLES.items()
        ])
        self.user = torchrec.EmbeddingBagCollection(tables=[torchrec.EmbeddingBagConfig(
            name="user", embedding_dim=DIM, num_embeddings=USERS, feature_names=["user"])])
        tokens = LENGTH + 2
        self.layers = nn.ModuleList(Layer(DIM, heads, tokens) for _ in range(layers))
        self.register_buffer("causal", torch.tril(torch.ones(tokens, tokens)), persistent=False)
        self.top = nn.Sequential(nn.LayerNorm(DIM), nn.Linear(DIM, 32), nn.ReLU(), nn.Linear(32, 2))

    def forward(self, features):
        """features: a KeyedJaggedTensor -> the logits `watch` and `like`, `[B]` each."""
        rows, user = self.rows(features), self.user(features).values()
        padded = lambda name: rows[name].to_padded_dense(LENGTH)
        history = padded("history") + padded("actions") + padded("ages")
        candidate = rows["candidate"].to_padded_dense(1)
        x = torch.cat([user.unsqueeze(1), history, candidate], dim=1)

        known = torch.arange(LENGTH) < rows["history"].lengths().unsqueeze(1)
        known = torch.cat([torch.ones_like(known[:, :1]), known, torch.ones_like(known[:, :1])], 1)
        visible = self.causal * known[:, None, None, :].float()
        for layer in self.layers:
            x = layer(x, visible)
        watch, like = self.top(x[:, -1]).unbind(dim=1)
        return {"watch": watch, "like": like}


def batch_of(seed, samples=256):
    """Returns features and labels: a user watches items of one kind, and likes them if it is even.
    """
    draw = torch.Generator().manual_seed(seed)
    random = lambda high, *shape: torch.randint(0, high, shape, generator=draw)
    items = TABLES["item"][0]
    kind = random(KINDS, samples)
    lengths = random(LENGTH + 1, samples)
    of_kind = lambda kinds: random(items // KINDS, *kinds.shape) * KINDS + kinds
    noise = random(KINDS, samples, LENGTH)
    history = of_kind(torch.where(random(10, samples, LENGTH) < 8, kind[:, None], noise))
    candidate_kind = torch.where(random(2, samples) == 0, kind, noise[:, 0])
    watch = (candidate_kind == kind).float()
    like = watch * (kind % 2 == 0)

    keep = torch.arange(LENGTH) < lengths[:, None]
    ages = torch.arange(LENGTH).flip(0).expand(samples, -1) // 2
    values = {
        "history": history[keep], "actions": random(8, samples, LENGTH)[keep], "ages": ages[keep],
        "candidate": of_kind(candidate_kind),
        "user": random(USERS // KINDS, samples) * KINDS + kind,
    }
    ones = torch.ones(samples, dtype=torch.int64)
    counts = [lengths, lengths, lengths, ones, ones]
    features = torchrec.KeyedJaggedTensor.from_lengths_sync(
        list(values), torch.cat(list(values.values())), torch.cat(counts))
    return features, {"watch": watch, "like": like}


def train(model, steps, first=0):
    """Trains for some steps, and returns the loss of the last one."""
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)
    for step in range(first, first + steps):
        features, labels = batch_of(step)
        scores = model(features)
        loss = sum(
            nn.functional.binary_cross_entropy_with_logits(scores[name], labels[name])
            for name in labels
        )
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return loss.item()


def export(model, out, sequence=1):
    """Exports the model with a probe set of 64 samples."""
    features, labels = batch_of(1_000_000, samples=64)
    return hatchback_trainer.export(
        model, features, out, name="ranker", sequence=sequence, labels=labels)


if __name__ == "__main__":
    ranker = Ranker()
    print(f"loss {train(ranker, int(sys.argv[2]) if len(sys.argv) > 2 else 300):.3f}")
    export(ranker, sys.argv[1])
