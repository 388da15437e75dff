"""Models with the interfaces of TorchRec's collections and jagged tensors, without TorchRec."""

from types import SimpleNamespace

import torch
from torch import nn

from field_models import KEYS, LONG


class Jagged:
    """The interface of a `KeyedJaggedTensor`."""

    def __init__(self, bags, weight=None):
        self.bags, self.weight = bags, weight  # of every key

    def __getitem__(self, key):
        bags = self.bags[key]
        values = torch.tensor([k for bag in bags for k in bag])
        ends = torch.tensor([0] + [len(bag) for bag in bags]).cumsum(0)
        weights = None if self.weight is None else torch.full(values.shape, self.weight)
        return SimpleNamespace(
            values=lambda: values, offsets=lambda: ends, lengths=lambda: ends.diff(),
            weights_or_none=lambda: weights)

    def keys(self):
        return list(self.bags)

    values = lengths = to_dict = None


class Collection(nn.Module):
    """The interface of an `EmbeddingBagCollection`."""

    def __init__(self):
        super().__init__()
        self.embedding_bags = nn.ModuleDict({"t": nn.EmbeddingBag(KEYS, 4, mode="sum")})

    def is_weighted(self):
        return False

    def embedding_bag_configs(self):
        pooling = SimpleNamespace(name="SUM")
        return [SimpleNamespace(name="t", feature_names=["a", "b"], pooling=pooling)]

    def forward(self, features):
        from hatchback_trainer.torchrec_calls import Pooled

        bag = self.embedding_bags["t"]
        pooled = lambda jagged: bag(jagged.values(), jagged.offsets()[:-1])
        return Pooled({one: pooled(features[one]) for one in "ab"})


class Collected(nn.Module):
    def __init__(self):
        super().__init__()
        self.ebc, self.top = Collection(), nn.Linear(10, 1)

    def forward(self, dense, features):
        return self.top(torch.cat([dense, self.ebc(features).values()], dim=1))


class TwoCollected(nn.Module):
    def __init__(self):
        super().__init__()
        self.users, self.items, self.top = Collection(), Collection(), nn.Linear(16, 1)

    def forward(self, users, items):
        return self.top(
            torch.cat([self.users(users).values(), self.items(items).values()], dim=1))


class SequenceCollection(nn.Module):
    """The interface of an `EmbeddingCollection`."""

    def __init__(self):
        super().__init__()
        self.embeddings = nn.ModuleDict({"t": nn.Embedding(KEYS, 4)})

    def embedding_configs(self):
        return [SimpleNamespace(name="t", feature_names=["a", "b"])]

    def forward(self, features):
        def rows(jagged):
            def padded(length, padding_value=0.0):
                ends = jagged.offsets().tolist()
                made = torch.full((len(ends) - 1, length, 4), padding_value)
                for place, (a, b) in enumerate(zip(ends, ends[1:])):
                    made[place, :b - a] = self.embeddings["t"](jagged.values()[a:b].long())
                return made
            return SimpleNamespace(to_padded_dense=padded, lengths=jagged.lengths)

        return {one: rows(features[one]) for one in "ab"}


class Sequences(nn.Module):
    def __init__(self, length=LONG):
        super().__init__()
        self.length = length
        self.ec, self.top = SequenceCollection(), nn.Linear(9, 1)

    def forward(self, features):
        rows = self.ec(features)
        mean = rows["b"].to_padded_dense(self.length, padding_value=-1.0).mean(1)
        lengths = rows["b"].lengths().unsqueeze(1).float()
        return self.top(torch.cat([rows["a"].to_padded_dense(2).sum(1), mean, lengths], dim=1))
