"""Exports a model that was not written for Hatchback: writes the files that `hatchback pack` reads.

The exporter finds the embedding modules of the model and cuts out the dense network behind them.

The model runs once on a sample batch. Each call of an `nn.Embedding`, `nn.EmbeddingBag` or TorchRec
`EmbeddingBagCollection` becomes a sparse feature, whose keys are the row numbers that the module
received. The rest of the model becomes the ONNX network. The exported network is compared with the
model on other samples before anything is written. The model itself is not changed.
"""

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from .model_files import OPSET, export_tables
from .samples import Sample, write_lines
from .schema import Feature, Input, Schema, Table, model_toml

TOLERANCE = 1e-4  # largest difference between the model and the cut network


@dataclass
class Call:
    """One lookup of the model: a feature with the bags that the sample batch gave it."""

    feature: str
    table: str
    pooling: str
    bags: list  # a list of keys for each sample
    output: torch.Tensor  # what the module returned, [B, ...]


def unsupported(name, what):
    return ValueError(f"embedding `{name}`: {what} cannot run in the car")


def embedding_call(name, module, inputs, output):
    """Returns the call of an `nn.Embedding`: one key a sample, or several rows side by side."""
    if module.max_norm is not None:
        raise unsupported(name, "max_norm changes rows during lookups, which")
    bags = inputs[0].reshape(len(inputs[0]), -1).tolist()
    pooling = "sum" if len(bags[0]) == 1 else "none"
    return Call(name, name, pooling, bags, output)


def bag_call(name, module, inputs, kwargs, output):
    """Returns the call of an `nn.EmbeddingBag`."""
    names = ("input", "offsets", "per_sample_weights")
    given = {**dict(zip(names, inputs)), **kwargs}
    if given.get("per_sample_weights") is not None:
        raise unsupported(name, "per_sample_weights, a weight for each key,")
    keys, offsets = given["input"], given.get("offsets")
    if offsets is None:
        bags = keys.tolist()
    else:
        ends = offsets.tolist() if module.include_last_offset else [*offsets.tolist(), len(keys)]
        bags = [keys[begin:end].tolist() for begin, end in zip(ends, ends[1:])]
    padding = getattr(module, "padding_idx", None)
    bags = [[key for key in bag if key != padding] for bag in bags]
    return Call(name, name, module.mode, bags, output)


def collection_calls(name, module, features, output):
    """Returns the calls of a TorchRec `EmbeddingBagCollection`: one for each
    feature of each table."""
    pooled, calls = output.to_dict(), []
    for config in module.embedding_bag_configs():
        pooling = config.pooling.name.lower()
        for feature in config.feature_names:
            jagged = features[feature]
            ends = jagged.offsets().tolist()
            bags = [jagged.values()[begin:end].tolist() for begin, end in zip(ends, ends[1:])]
            calls.append(Call(feature, f"{name}.{config.name}", pooling, bags, pooled[feature]))
    return calls


def is_collection(module):
    return hasattr(module, "embedding_bag_configs")


def embeddings_of(model):
    """Maps the name of each embedding module to the module. Those inside a
    collection are left out."""
    collections = [name for name, module in model.named_modules() if is_collection(module)]
    found = {}
    for name, module in model.named_modules():
        inside = any(name.startswith(f"{outer}.") for outer in collections)
        if (
            is_collection(module)
            or (isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and not inside)
        ):
            found[name] = module
    return found


class Recorder:
    """Replaces the `forward` of each embedding module: records its calls, or
    answers with given vectors."""

    def __init__(self, modules):
        self.modules, self.calls, self.vectors = modules, [], None

    def __enter__(self):
        for name, module in self.modules.items():
            module.forward = self.answer(name, module, module.forward)
        return self

    def __exit__(self, *_):
        for module in self.modules.values():
            del module.__dict__["forward"]

    def answer(self, name, module, forward):
        def record(*inputs, **kwargs):
            output = forward(*inputs, **kwargs)
            if is_collection(module):
                calls = collection_calls(name, module, inputs[0], output)
            elif isinstance(module, nn.EmbeddingBag):
                calls = [bag_call(name, module, inputs, kwargs, output)]
            else:
                calls = [embedding_call(name, module, inputs, output)]
            for call in calls:
                call.feature = self.unused(call.feature)
            self.calls += calls
            return output

        def replay(*inputs, **kwargs):
            if not is_collection(module):
                return self.vectors.pop(0)
            names = [
                feature for config in module.embedding_bag_configs()
                for feature in config.feature_names
            ]
            return Pooled({feature: self.vectors.pop(0) for feature in names})

        return lambda *inputs, **kwargs: (
            record if self.vectors is None else replay
        )(*inputs, **kwargs)

    def unused(self, name):
        """Returns a feature name that no call has yet: a module that is called
        twice makes two features."""
        taken = {call.feature for call in self.calls}
        names = [name, *(f"{name}_{number}" for number in range(2, len(taken) + 3))]
        return next(one for one in names if one not in taken)


class Pooled:
    """Takes the place of TorchRec's `KeyedTensor` while the network is cut."""

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


def arguments(batch):
    """Returns the positional and the named arguments of a sample batch."""
    if isinstance(batch, dict):
        return [], dict(batch)
    return (list(batch) if isinstance(batch, (list, tuple)) else [batch]), {}


class Cut(nn.Module):
    """The model behind its embeddings: dense features and vectors in, output `[B, n]` out."""

    def __init__(self, model, recorder, batch, calls):
        super().__init__()
        self.model, self.recorder = model, recorder
        self.positional, self.named = arguments(batch)
        self.shapes = [call.output.shape[1:] for call in calls]

    def dense_names(self):
        """Returns the name of each dense value, and the parts of the batch that hold them."""
        names, parts = [], []
        for place, value in [*enumerate(self.positional), *self.named.items()]:
            if torch.is_tensor(value) and value.is_floating_point():
                width = value.shape[1:].numel()
                label = place if isinstance(place, str) else f"input{place}"
                names += [label] if width == 1 else [f"{label}{column}" for column in range(width)]
                parts.append((place, value.shape[1:], width))
        return names, parts

    def forward(self, *inputs):
        _, parts = self.dense_names()
        positional, named = list(self.positional), dict(self.named)
        anchor = inputs[0].reshape(inputs[0].shape[0], -1)[:, :1]  # [B, 1]: carries the batch size
        for place, value in [*enumerate(positional), *named.items()]:
            if torch.is_tensor(value) and not value.is_floating_point() and value.dim() > 0:
                held = named if isinstance(place, str) else positional
                held[place] = (
                    (anchor * 0).to(value.dtype).reshape(-1, *[1] * (value.dim() - 1))
                    .expand(-1, *value.shape[1:])
                )
        at = 0
        for place, shape, width in parts:
            held = named if isinstance(place, str) else positional
            held[place] = inputs[0][:, at : at + width].reshape(-1, *shape)
            at += width
        vectors = inputs[1:] if parts else inputs
        self.recorder.vectors = [
            vector.reshape(-1, *shape) for vector, shape in zip(vectors, self.shapes)
        ]
        output = self.model(*positional, **named)
        return output.reshape(anchor.shape[0], -1)


def dense_tensor(cut):
    """Returns the dense features of the sample batch, `[B, nd]`; None if the model has none."""
    parts = [
        value for value in [*cut.positional, *cut.named.values()]
        if torch.is_tensor(value) and value.is_floating_point()
    ]
    return torch.cat([part.reshape(len(part), -1) for part in parts], dim=1) if parts else None


def check_cut(cut, inputs, output):
    """Compares the traced network with the model on the samples in another order and number."""
    order = torch.arange(len(output)).flip(0)[: max(1, len(output) - 1)]
    traced = torch.jit.trace(cut, tuple(inputs), check_trace=False)
    found = traced(*(one[order] for one in inputs))
    expected = output[order]
    if found.shape != expected.shape or (found - expected).abs().max() > TOLERANCE:
        raise ValueError(
            "the network behind the embeddings does not give the model's output on other samples: "
            "the model uses its sparse inputs, or the number of samples, in another way than "
            "through its embeddings"
        )


def tables_of(calls, modules, counts):
    """Returns the schema's tables and their weights and counts."""
    tables, weights, found = {}, {}, {}
    for call in calls:
        module = modules.get(call.table)
        if module is None:
            outer, inner = next(
                (o, call.table[len(o) + 1 :]) for o in modules if call.table.startswith(f"{o}.")
            )
            weight = modules[outer].embedding_bags[inner].weight
        else:
            weight = module.weight
        weights[call.table] = weight.detach().float()
        rows, dim = weight.shape
        tables[call.table] = Table(call.table, rows, dim, counted=True)
        keys = torch.tensor([key for bag in call.bags for key in bag], dtype=torch.int64)
        found[call.table] = found.get(call.table, 0) + torch.bincount(keys, minlength=rows)
    return tables, weights, {**found, **(counts or {})}


@dataclass
class Exported:
    """The result of `export`."""

    schema: Schema
    calls: list
    output: torch.Tensor


class Weights:
    """The part of `Embeddings` that `export_tables` reads."""

    def __init__(self, weights):
        self.weights = weights


def samples_of(calls, dense, scores, labels):
    for number, score in enumerate(scores.tolist()):
        sparse = {call.feature: call.bags[number] for call in calls if call.bags[number]}
        label = None if labels is None else int(labels.reshape(len(labels), -1)[number, 0])
        yield Sample([] if dense is None else dense[number].tolist(), sparse, label, score)


def export(
    model, sample_batch, out, name="model", sequence=1, output="logit", labels=None, counts=None,
    hotness_max=None
):
    """Writes `model` into the folder `out` as `hatchback pack` reads it.

    `sample_batch` is what the model is called with: a tensor, a tuple or a dict of arguments. It
    has two samples or more, and all of them become the probe set. `output` is "logit" or
    "probability". `counts` maps tables to the lookups of each row in training. `hotness_max` maps
    features to the most keys of a bag. By default both are those of the sample batch.
    """
    was_training, modules = model.training, embeddings_of(model)
    if not modules:
        raise ValueError("the model has no nn.Embedding, nn.EmbeddingBag or EmbeddingBagCollection")
    model.eval()
    positional, named = arguments(sample_batch)
    with torch.no_grad(), Recorder(modules) as recorder:
        result = model(*positional, **named)
        if not torch.is_tensor(result):
            raise ValueError(
                f"the model returns a {type(result).__name__}, not one tensor; "
                "wrap it in a module that does"
            )
        calls = recorder.calls
        if len(result) < 2 or any(len(call.bags) != len(result) for call in calls):
            raise ValueError(
                "the first axis of every input and of the output must be the samples, two or more"
            )
        result = result.reshape(len(result), -1)
        cut = Cut(model, recorder, sample_batch, calls)
        dense = dense_tensor(cut)
        inputs = (
            ([] if dense is None else [dense])
            + [call.output.reshape(len(result), -1) for call in calls]
        )
        check_cut(cut, inputs, result)
        names = ([] if dense is None else ["dense"]) + [f"emb_{call.feature}" for call in calls]
        out = Path(out)
        out.mkdir(parents=True, exist_ok=True)
        torch.onnx.export(
            cut,
            tuple(inputs),
            str(out / "dense.onnx"),
            input_names=names,
            output_names=["logit"],
            dynamic_axes={one: {0: "batch"} for one in [*names, "logit"]},
            opset_version=OPSET,
            do_constant_folding=True,
        )
    model.train(was_training)

    tables, weights, counts = tables_of(calls, modules, counts)
    longest = {call.feature: max(map(len, call.bags)) or 1 for call in calls} | (hotness_max or {})
    features = tuple(
        Feature(call.feature, call.table, call.pooling, longest[call.feature]) for call in calls
    )
    network = tuple(Input(f"emb_{call.feature}", (call.feature,)) for call in calls)
    network = network if dense is None else (Input("dense"), *network)
    activation = "sigmoid" if output == "logit" else "none"
    schema = Schema(
        name, tuple(cut.dense_names()[0]), network, tuple(tables.values()), features, sequence,
        activation
    )

    export_tables(schema, Weights(weights), counts, out / "tables.safetensors")
    (out / "model.toml").write_text(model_toml(schema), encoding="utf-8", newline="\n")
    scores = torch.sigmoid(result[:, 0]) if output == "logit" else result[:, 0]
    write_lines(out / "probe.jsonl", samples_of(calls, dense, scores, labels))
    return Exported(schema, calls, result)
