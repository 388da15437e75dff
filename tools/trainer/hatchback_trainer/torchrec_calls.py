"""What the collections of TorchRec look up, and what a model gets in their place in a capture.

A collection is known by its interface: nothing here imports TorchRec or changes the model.
"""

import contextlib
from dataclasses import dataclass

import torch


class Pooled:
    """Takes the place of TorchRec's `KeyedTensor` while the model is captured."""

    def __init__(self, vectors):
        self.vectors = vectors

    def __getitem__(self, key):
        return self.vectors[key]

    def keys(self):
        return list(self.vectors)

    def values(self):
        return torch.cat(list(self.vectors.values()), dim=1)

    def to_dict(self):
        return self.vectors


class Sealed:
    """Takes the place of a `KeyedJaggedTensor`: only a collection may read its keys."""

    def __getattr__(self, name):
        raise ValueError(
            f"the model reads `{name}` of a KeyedJaggedTensor outside of a collection; pass what "
            "it needs as a tensor of its own"
        )


class Sequence:
    """Takes the place of TorchRec's `JaggedTensor` of one feature, while the model is captured:
    rows `[B, L, D]`, zeros after the last key, and the numbers of keys `[B]`."""

    def __init__(self, rows, lengths):
        self.rows, self.counts = rows, lengths

    def to_padded_dense(self, desired_length=None, padding_value=0.0):
        if padding_value == 0.0:
            return self.rows
        keep = torch.arange(self.rows.shape[1]) < self.counts[:, None]
        return torch.where(keep[..., None], self.rows, padding_value)

    def lengths(self):
        return self.counts

    def __getattr__(self, name):
        raise ValueError(
            f"the model reads `{name}` of a JaggedTensor; read its rows by "
            "`to_padded_dense(LENGTH)` and its lengths by `lengths()`"
        )


class RecordedSequence(Sequence):
    """A `Sequence` of the sample batch, which keeps the rows that the model asks for."""

    def __init__(self, call, jagged):
        self.call, self.jagged = call, jagged
        self.counts = call.lengths = jagged.lengths()

    def to_padded_dense(self, desired_length=None, padding_value=0.0):
        call, longest = self.call, max(map(len, self.call.bags), default=0)
        if desired_length is None or desired_length < longest:
            raise ValueError(
                f"`{call.feature}`: to_padded_dense({desired_length}) and a bag of {longest} keys: "
                "the car needs one length, which no bag of the batch exceeds"
            )
        if call.output is not None and call.output.shape[1] != desired_length:
            raise ValueError(f"`{call.feature}`: to_padded_dense with two lengths")
        self.rows = call.output = self.jagged.to_padded_dense(desired_length)
        return super().to_padded_dense(desired_length, padding_value)


@dataclass
class CollectionCall:
    """What one feature of a collection looked up: bags of keys, and the pooled vectors, or the
    rows and lengths of an `EmbeddingCollection`."""

    feature: str
    table: str
    pooling: str
    bags: list  # a list of keys for each sample
    weights: list | None  # a list of weights for each sample
    output: torch.Tensor | None  # [B, dim], or [B, length, dim]
    lengths: torch.Tensor | None = None  # [B], of rows that are not pooled

    @property
    def tensors(self):
        if self.output is None:
            raise ValueError(f"the model does not read the rows of `{self.feature}`")
        return [self.output] if self.lengths is None else [self.output, self.lengths]


def configs_of(module):
    """Returns the configurations of a collection, or None for any other module."""
    for name in ("embedding_bag_configs", "embedding_configs"):
        if callable(getattr(module, name, None)):
            return getattr(module, name)()
    return None


def collections_of(model):
    return {
        name: module for name, module in model.named_modules() if configs_of(module) is not None
    }


def tables_of(module):
    return getattr(module, "embedding_bags", None) or module.embeddings


def keys_of(module):
    """Returns TorchRec's names of what a collection returns, with their configurations."""
    pairs = [(feature, one) for one in configs_of(module) for feature in one.feature_names]
    names = [feature for feature, _ in pairs]
    return [
        (f"{feature}@{one.name}" if names.count(feature) > 1 else feature, feature, one)
        for feature, one in pairs
    ]


def sequence_calls(name, module, features, output):
    """Returns the calls of one `EmbeddingCollection`, and what the model gets instead of its
    rows."""
    calls, sequences = [], {}
    for key, feature, config in keys_of(module):
        ends = features[feature].offsets().tolist()
        keys = features[feature].values()
        bags = [keys[a:b].tolist() for a, b in zip(ends, ends[1:])]
        calls.append(CollectionCall(feature, f"{name}.{config.name}", "none", bags, None, None))
        sequences[key] = RecordedSequence(calls[-1], output[key])
    return calls, sequences


def collection_calls(name, module, features, output):
    """Returns the calls of one `EmbeddingBagCollection`."""
    pooled, calls = output.to_dict(), []
    for config in module.embedding_bag_configs():
        pooling = config.pooling.name.lower()
        shared = lambda feature: f"{feature}@{config.name}"  # TorchRec's name in several tables
        for feature in config.feature_names:
            jagged = features[feature]
            ends = jagged.offsets().tolist()
            cut = lambda values: [values[a:b].tolist() for a, b in zip(ends, ends[1:])]
            # A collection that is not weighted ignores the weights of its features.
            weights = jagged.weights_or_none() if module.is_weighted() else None
            if weights is not None and pooling != "sum":
                raise ValueError(
                    f"collection `{name}`: weights with pooling `{pooling}` of table "
                    f"`{config.name}`: FBGEMM divides them in its own way; use SUM"
                )
            vector = pooled[feature] if feature in pooled else pooled[shared(feature)]
            calls.append(CollectionCall(
                feature, f"{name}.{config.name}", pooling, cut(jagged.values()),
                None if weights is None else cut(weights), vector
            ))
    return calls


@contextlib.contextmanager
def collections(model, answer):
    """Answers the calls of all collections by `answer(name, module, forward, features)`."""
    found = collections_of(model)
    for name, module in found.items():
        forward = module.forward
        module.forward = (
            lambda features, name=name, module=module, forward=forward:
            answer(name, module, forward, features)
        )
    try:
        yield
    finally:
        for module in found.values():
            del module.__dict__["forward"]
