"""Exports a model that was not written for Hatchback: writes the files that `hatchback pack` reads.

PyTorch captures the model as one graph. The exporter cuts the graph at its lookups: the columns of
the batch that select rows become sparse features, and the rest becomes the ONNX network. It compares
the network with the model on other samples before it writes anything. It never changes the model.
"""

import logging
import sys
from dataclasses import dataclass, field
from pathlib import Path

import torch

from .batch import Flat, Leaf
from .capture import (
    Captured, Masks, capture, check_version, collection_calls, collections, collections_of,
    constant_masks, program_of
)
from .columns import raw_bags
from .cut import Cut, Names
from .deploy import Deployable
from .graph import Followed
from .model_files import export_tables
from .samples import Sample, write_lines
from .schema import Feature, Input, Schema, Table, model_toml

OPSET = 18  # every supported torch writes it, and every version of the engine reads it
MANY = 300  # samples of a batch that no sample batch has
TOLERANCE = 1e-4  # largest difference between the model and the cut network


@dataclass
class Exported(Deployable):
    """The result of `export`: the schema, the model's outputs and what the exporter noticed."""

    schema: Schema
    folder: Path
    scores: torch.Tensor  # [samples, outputs]
    notes: list = field(default_factory=list)
    exporter: object = None


def picked(result, wanted, samples):
    """Returns the outputs of a model as (name, tensor): one tensor, or those of a dict or tuple
    that have one value a sample."""
    if torch.is_tensor(result) and result.dim() == 0:
        raise ValueError("the model returns one number for the whole batch, not one a sample")
    if torch.is_tensor(result):
        return [("logit", result)]
    if isinstance(result, dict):
        parts = [(str(name), part) for name, part in result.items()]
    elif isinstance(result, (list, tuple)):
        parts = [(f"output{place}", part) for place, part in enumerate(result)]
    elif hasattr(result, "__dict__"):
        parts = list(vars(result).items())
    else:
        raise ValueError(f"the model returns a {type(result).__name__}, not tensors")
    tensors = [(name, part) for name, part in parts if torch.is_tensor(part)]
    if wanted:
        lacking = set(wanted) - {name for name, _ in tensors}
        if lacking:
            known = ", ".join(f"`{name}`" for name, _ in tensors)
            raise ValueError(f"outputs: the model returns no `{lacking.pop()}`, only {known}")
        return [(name, part) for name, part in tensors if name in wanted]
    scores = [
        (name, part) for name, part in tensors
        if part.is_floating_point() and part.dim() and samples in (None, len(part))
        and part.numel() == len(part)
    ]
    if not scores:
        raise ValueError(
            "no output has one value a sample; name the scores with outputs=[...]: the model "
            "returns " + ", ".join(f"`{n}` {list(p.shape)}" for n, p in tensors)
        )
    return [("logit", scores[0][1])] if len(scores) == 1 else scores


class Source:
    """A model, how it is called, and what it answers for a batch."""

    def __init__(self, model, batch, outputs):
        self.call = model
        self.model = model if isinstance(model, torch.nn.Module) else model.__self__
        forward = model.forward if isinstance(model, torch.nn.Module) else model
        self.flat, self.wanted, self.samples = Flat(forward, batch), outputs, None
        self.forward = forward

    def run(self, flat, tensors=None):
        positional, named = flat.rebuild(flat.tensors if tensors is None else tensors)
        return self.call(*positional, **named)

    def scores(self, flat, tensors=None):
        """Returns the outputs of the model, `[samples, values]` each."""
        found = picked(self.run(flat, tensors), self.wanted, self.samples)
        return [part.reshape(len(part), -1) for _, part in found]

    def pick(self, result):
        return tuple(part for _, part in picked(result, self.wanted, None))


def recorded(source, flat):
    """Runs the model and returns its result and the calls of its collections."""
    calls = []

    def answer(name, module, forward, features):
        output = forward(features)
        made = collection_calls(name, module, features, output)
        tables = {config.name: config for config in module.embedding_bag_configs()}
        for call in made:
            short = call.table.removeprefix(f"{name}.")
            call.weight = module.embedding_bags[short].weight.detach()
            assert short in tables
        calls.extend(made)
        return output

    with torch.no_grad(), collections(source.model, answer):
        result = source.run(flat)
    return result, calls


def masks_of(source, tensors, leaves):
    """Returns the masks of the model that choose values and are the same for all samples."""
    seen = []
    samples = next(len(leaf.tensor) for leaf in leaves if leaf.per_sample)
    orders = [torch.arange(samples), torch.arange(samples).flip(0)[: max(2, samples // 2)]]
    for order in orders:
        mode = Masks()
        part = [
            tensor[order] if leaf.per_sample else tensor for tensor, leaf in zip(tensors, leaves)
        ]
        try:
            with torch.no_grad(), mode:
                source.run(source.flat, part)
        except (RuntimeError, IndexError, ValueError):
            return []  # offsets of the whole batch do not fit a part of it
        seen.append(mode.seen)
    return constant_masks(*seen)


class Exporter:
    """One export: captures, cuts, checks and writes."""

    def __init__(self, model, batch, columns, outputs):
        self.source, self.notes = Source(model, batch, outputs), []
        columns = columns or {}
        self.columns = {
            name: one for name, one in columns.items() if isinstance(one, (list, tuple))}
        self.functions = {
            name: one for name, one in columns.items() if name not in self.columns}
        if not isinstance(self.source.model, torch.nn.Module):
            raise ValueError("export takes an nn.Module, or a method of one")
        self.flat = self.source.flat
        result, self.calls = recorded(self.source, self.flat)
        sizes = {len(part) for part in self.flat.tensors if part.dim()}
        found = picked(result, outputs, None if outputs or torch.is_tensor(result) else (
            sizes.pop() if len(sizes) == 1 else None))
        self.output_names = [name for name, _ in found]
        self.samples = self.source.samples = len(found[0][1]) if found[0][1].dim() else 0
        self.leaves = self.flat.leaves(self.samples)
        if self.samples < 2 or not (self.calls or any(leaf.per_sample for leaf in self.leaves)):
            raise ValueError(
                "the first axis of the inputs and of the output must be the samples, two or more"
            )
        self.scores = [part.detach().reshape(self.samples, -1) for _, part in found]

    def note(self, text):
        if text not in self.notes:
            self.notes.append(text)
            print(f"hatchback_trainer: {text}", file=sys.stderr)

    def cut(self):
        """Captures and cuts the model."""
        vectors = [call.output.detach() for call in self.calls]
        per_sample = [leaf.per_sample for leaf in self.leaves] + [True] * len(vectors)
        masks = masks_of(self.source, self.flat.tensors, self.leaves) if not self.calls else []
        captured = Captured(
            self.source.model, self.source.call, self.flat, self.source.pick, masks
        )
        self.graph = capture(captured, [*self.flat.tensors, *vectors], per_sample)
        followed = self.follow(self.leaves, self.calls)
        names = Names(self.leaves, self.columns, self.source.model)
        self.made = Cut(followed, self.leaves, self.calls, names, self.note)
        self.check_columns()
        if not self.made.parts:
            raise ValueError(
                "the scores depend on no table: no row of an embedding is chosen by a column of "
                "the batch"
            )

    def check_columns(self):
        """Refuses a column of the caller that is none of the model."""
        known = {column.name: column for column in self.made.columns}
        for name in self.functions:
            if name not in known:
                have = ", ".join(f"`{one}`" for one in known)
                raise ValueError(f"columns[{name!r}]: no sparse feature of this name, only {have}")
            if known[name].modulus is not None or known[name].tables and known[name].call:
                raise ValueError(
                    f"columns[{name!r}]: the model makes row numbers of this column in its own way"
                )
        for name in self.columns:
            if name not in {leaf.name for leaf in self.leaves}:
                raise ValueError(f"columns[{name!r}]: no argument of this name")

    def follow(self, leaves, calls):
        vectors = [Leaf(call.feature, call.output.detach(), False) for call in calls]
        return Followed(self.graph, [*leaves, *vectors])

    def bags(self, leaves, calls):
        """Maps the name of each feature to its bags, a list of keys for each sample, and each
        weighted one to its weights."""
        bags, weights = {}, {}
        for column in self.made.columns:
            if column.call is not None:
                call = next(one for one in calls if one.feature == column.call.feature)
                bags[column.name] = call.bags
                if call.weights is not None:
                    weights[column.name] = call.weights
            elif column.jagged is not None:
                bags[column.name] = self.jagged_bags(column, leaves)
            else:
                values = leaves[column.leaf].tensor
                values = values.reshape(len(values), -1)[:, list(column.columns)].long().tolist()
                bags[column.name] = [trimmed(bag, column.padding) for bag in values]
        return bags, weights

    def jagged_bags(self, column, leaves):
        lookup, values = column.jagged, leaves[column.leaf].tensor
        followed = self.made.followed if leaves is self.leaves else self.follow(leaves, [])
        bounds = followed.value[lookup.bounds].tolist()
        ends = bounds if lookup.last_bound else [*bounds, values.numel()]
        keys = values.reshape(-1).tolist()
        bags = [keys[a:b] for a, b in zip(ends, ends[1:])]
        return [[key for key in bag if key + column.shift != lookup.padding] for bag in bags]

    def network_inputs(self, followed, leaves, trim):
        """Returns the inputs of the network, `[samples, width]`, as a car would make them."""
        made, found = self.made, {}
        flat = [
            leaf.tensor.reshape(len(leaf.tensor), -1) if leaf.per_sample else None
            for leaf in leaves
        ]
        if made.dense:
            found["dense"] = torch.stack([flat[a][:, b].float() for a, b in made.dense], dim=1)
        keeps = {}
        for column in made.columns:
            if column.padding is not None:
                keys = flat[column.leaf][:, list(column.columns)] != column.padding
                found[f"mask_{column.name}"] = keys.float()
                rest = keys.flip(1).cumsum(1).flip(1) > 0
                keeps[id(column)] = rest if trim else torch.ones_like(rest)
        for name, part in made.refs.items():
            column = part.column
            if column.call is None and column.pooling in ("none", "sum") and column.columns:
                keys = flat[column.leaf][:, list(column.columns)].long()
                keys = keys if column.modulus is None else keys % column.modulus
                rows = made.tables[part.table][keys + column.shift].float()
                keep = keeps.get(id(column))
                rows = rows if keep is None else rows * keep[..., None]
            else:
                node = next(node for node, parts in made.parts.items() if part in parts)
                rows = followed.value[node]
                rows = rows[0] if isinstance(rows, (tuple, list)) else rows
            found[name] = rows.reshape(len(rows), -1)
        return [found[name] for name in made.inputs]


def trimmed(bag, padding):
    """Returns a bag without the padding after its last key."""
    end = len(bag)
    while padding is not None and end and bag[end - 1] == padding:
        end -= 1
    return bag[:end]


# --- checks ---


def check(exporter, network):
    """Compares the cut network with the model on the batch, on other keys, on one sample and twice
    on the same samples.

    # Errors
    ValueError that names the input which breaks it.
    """
    source, leaves = exporter.source, exporter.leaves
    again = source.scores(exporter.flat)
    if any(differ(a, b) for a, b in zip(again, exporter.scores)):
        raise ValueError(
            "two calls of the model with the same samples give different scores: it draws random "
            "numbers or keeps a state also in eval(); such a model has no score to reproduce"
        )
    difference(exporter, network, leaves, exporter.calls, exporter.scores, "the sample batch")
    if not exporter.calls:
        for seed in range(2):
            changed = [other_rows(exporter, place, seed) for place in range(len(leaves))]
            try:
                compare(exporter, network, changed)
            except ValueError as error:
                raise ValueError(f"{error}{culprits(exporter, network, changed)}") from None
    if all(leaf.per_sample for leaf in leaves) and not exporter.calls:
        one_sample(exporter, network)


def culprits(exporter, network, changed):
    """Returns which inputs, changed alone, break the network."""
    found = []
    for place, leaf in enumerate(changed):
        alone = [*exporter.leaves[:place], leaf, *exporter.leaves[place + 1 :]]
        try:
            compare(exporter, network, alone)
        except ValueError:
            found.append(f"`{leaf.name}`")
    return f"; the values of {', '.join(found)} break it" if found else ""


def compare(exporter, network, leaves):
    try:
        scores = exporter.source.scores(exporter.flat, [leaf.tensor for leaf in leaves])
    except (RuntimeError, IndexError, ValueError):
        return  # the model itself does not take such rows, so nothing can be compared
    difference(exporter, network, leaves, [], scores, "other rows")


def answer(network, inputs):
    """Returns the outputs of the network.

    # Errors
    ValueError if the network was captured for one number of samples only.
    """
    try:
        with torch.no_grad():
            return network(*inputs)
    except (RuntimeError, IndexError) as error:
        raise ValueError(
            f"the network does not run with {len(inputs[0])} samples, because the model fixes the "
            f"number of samples of its batch: {str(error).splitlines()[0]}"
        ) from error


def difference(exporter, network, leaves, calls, scores, what):
    followed = exporter.follow(leaves, calls) if leaves is not exporter.leaves else (
        exporter.made.followed)
    inputs = exporter.network_inputs(followed, leaves, trim=True)
    found = answer(network, inputs)
    for name, a, b in zip(exporter.output_names, found, scores):
        if differ(a, b):
            most = (a - b).abs().max().item()
            raise ValueError(
                f"output `{name}` of the network behind the lookups differs from the model's by "
                f"{most:.2g} on {what}"
            )


def differ(a, b):
    return a.shape != b.shape or bool(((a - b).abs() > TOLERANCE * (1 + b.abs())).any())


def one_sample(exporter, network):
    """Scores one sample alone, which is what a car often asks for."""
    first = [type(leaf)(leaf.name, leaf.tensor[:1], True) for leaf in exporter.leaves]
    inputs = exporter.network_inputs(exporter.made.followed, exporter.leaves, trim=True)
    many = torch.arange(MANY) % len(inputs[0])
    alone = answer(network, [one[:1] for one in inputs])
    together = answer(network, [one[many] for one in inputs])
    for name, a, more, b in zip(exporter.output_names, alone, together, exporter.scores):
        if differ(a, b[:1]) or differ(more, b[many]):
            raise ValueError(
                f"output `{name}` of a sample differs when the sample is scored alone or in a batch "
                f"of {MANY}: the model lets the samples of a batch reach each other"
            )
    source, exporter.source.samples = exporter.source, None
    try:
        source.scores(exporter.flat, [leaf.tensor for leaf in first])
    except (RuntimeError, IndexError, ValueError) as error:
        exporter.note(
            f"the model itself fails with one sample ({str(error).splitlines()[0]}); the exported "
            "network does not"
        )
    finally:
        source.samples = exporter.samples


def other_rows(exporter, place, seed):
    """Returns a leaf with other values: rows 0 and n - 1 and random ones for keys, short and long
    bags where there is a padding, and other samples' values for the rest."""
    leaf, draw = exporter.leaves[place], torch.Generator().manual_seed(seed)
    tensor = leaf.tensor.clone()
    columns = [one for one in exporter.made.columns if one.leaf == place and one.call is None]
    if not leaf.per_sample:
        for column in columns:
            tensor = torch.randint(0, column_size(exporter, column), tensor.shape, generator=draw)
        return type(leaf)(leaf.name, tensor.to(leaf.tensor.dtype), False)
    order = torch.randperm(len(tensor), generator=draw)
    tensor = tensor[order]
    flat = tensor.reshape(len(tensor), -1)
    for column in columns:
        keys = torch.randint(0, column.size, (len(flat), column.hotness), generator=draw)
        keys[0], keys[1] = 0, column.size - 1
        if column.padding is not None:
            keys = keys.where(keys != column.padding, (column.padding + 1) % column.size)
            lengths = torch.randint(1, column.hotness + 1, (len(flat), 1), generator=draw)
            keys[torch.arange(column.hotness) >= lengths] = column.padding
        flat[:, list(column.columns)] = keys.to(flat.dtype)
    return type(leaf)(leaf.name, flat.reshape(tensor.shape), True)


def column_size(exporter, column):
    rows = len(exporter.made.tables[column.tables[0]])
    return column.size or rows - column.shift


# --- files ---


class Weights:
    """The part of `Embeddings` that `export_tables` reads."""

    def __init__(self, weights):
        self.weights = weights


def key_of(column, functions, folder):
    """Returns the key function of a feature whose values are not the row numbers themselves."""
    if column.name in functions:
        return functions[column.name].fields(column.name, column.shift, folder)
    if column.modulus is not None:
        return {"function": "modulo", "divisor": column.modulus, "first": column.shift}
    if column.ranged:
        return {"function": "range", "size": column.size, "first": column.shift}
    return None


def features_of(exporter, bags, hotness_max, weights, folder):
    made, features = exporter.made, []
    for column in made.columns:
        longest = max(map(len, bags[column.name]), default=0)
        hotness = hotness_max.get(column.name, column.hotness or max(1, longest))
        table = column.tables[0] if len(column.tables) == 1 else tuple(column.tables)
        padding = None if column.padding is None else column.padding + column.shift
        features.append(Feature(
            column.name, table, column.pooling, hotness, column.name in weights,
            key_of(column, exporter.functions, folder), padding
        ))
    return tuple(features)


def counts_of(made, bags):
    """Returns how often the batch looked each row up, by table."""
    counts = {
        name: torch.zeros(len(rows), dtype=torch.int64) for name, rows in made.tables.items()
    }
    for column in made.columns:
        keys = torch.tensor([key for bag in bags[column.name] for key in bag], dtype=torch.int64)
        keys = (keys if column.modulus is None else keys % column.modulus) + column.shift
        for table in column.tables:
            counts[table] += torch.bincount(keys, minlength=len(counts[table]))
    return counts


def network_inputs_of(made):
    inputs = []
    for name in made.inputs:
        if name == "dense":
            inputs.append(Input("dense"))
        elif name in made.refs:
            inputs.append(Input(name, (name.removeprefix("emb_"),)))
        else:
            inputs.append(Input(name, masks=(name.removeprefix("mask_"),)))
    return tuple(inputs)


def is_probability(exporter):
    """Returns whether the model's own last operation is a sigmoid."""
    ends = set()
    for node in exporter.made.outputs:
        while str(node.target).split(".")[0:2] == ["aten", "view"] or any(
                part in str(node.target) for part in ("squeeze", "reshape", "view", "alias")):
            node = node.args[0]
        ends.add("sigmoid" in str(node.target))
    if ends == {True, False}:
        raise ValueError(
            "some outputs end in a sigmoid and some do not; pass output=\"probability\" for outputs "
            "that are scores as they are"
        )
    return ends == {True}


def write_network(network, inputs, made, names, path, opset):
    """Writes the network as ONNX, with the batch left open."""
    batch = torch.export.Dim("batch", min=2)
    program = program_of(network, inputs, tuple({0: batch} for _ in inputs))
    with torch.no_grad():
        write = lambda program: torch.onnx.export(
            program, (), str(path), input_names=list(made.inputs), output_names=list(names),
            opset_version=opset, dynamo=True, external_data=False, verbose=False
        )
        log = logging.getLogger("torch.onnx")
        level = log.level
        log.setLevel(logging.ERROR)  # it warns of every package that is not installed
        try:
            write(program)
        except Exception:  # the exporter has no function for some operations as they are
            write(program.run_decompositions())
        finally:
            log.setLevel(level)


def samples_of(exporter, leaves, calls, scores, labels):
    """Yields the samples of a batch as the car takes them."""
    bags, weights = exporter.bags(leaves, calls)
    bags = {
        name: raw_bags(name, exporter.functions.get(name), bag) for name, bag in bags.items()
    }
    flat = {a: leaves[a].tensor.reshape(len(leaves[a].tensor), -1) for a, _ in exporter.made.dense}
    dense = (
        torch.stack([flat[a][:, b].float() for a, b in exporter.made.dense], dim=1).tolist()
        if flat else None
    )
    count = len(next(iter(bags.values())))
    value = lambda given, name: given.get(name) if isinstance(given, dict) else given
    for number in range(count):
        label = {} if labels is not None else None
        score = {} if scores is not None else None
        for place, name in enumerate(exporter.output_names):
            if labels is not None and value(labels, name) is not None:
                given = value(labels, name).reshape(count, -1)
                label[name] = int(given[number, min(place, given.shape[1] - 1)])
            if scores is not None:
                score[name] = float(scores[number, place])
        if len(exporter.output_names) == 1:
            label, score = (one and next(iter(one.values())) for one in (label, score))
            score = float(scores[number, 0]) if scores is not None else None
            label = label if labels is not None else None
        yield Sample(
            [] if dense is None else dense[number],
            {name: bag[number] for name, bag in bags.items() if bag[number]}, label, score,
            {name: bag[number] for name, bag in weights.items() if bag[number]}
        )


def lines_of(exporter, batch, path):
    """Writes the samples of another batch, without labels and scores."""
    source = exporter.source
    flat = Flat(source.forward, batch)
    _, calls = recorded(source, flat) if exporter.calls else (None, [])
    known = [leaf.per_sample for leaf in exporter.leaves]
    leaves = [Leaf(name, tensor, whole) for name, tensor, whole in zip(
        flat.names, flat.tensors, known)]
    write_lines(path, samples_of(exporter, leaves, calls, None, None))


def export(
    model, sample_batch, out, name="model", sequence=1, output=None, labels=None, counts=None,
    hotness_max=None, columns=None, outputs=None, opset=OPSET
):
    """Writes `model` into the folder `out` as `hatchback pack` reads it.

    `model` is an nn.Module, or a method of one. `sample_batch` is what it is called with: a tensor,
    a tuple, a dict of arguments, or a dict as the only argument. It has two samples or more, and all
    of them become the probe set. `output` is "logit" or "probability"; by default the last operation
    of the model says which. `outputs` names the scores of a model that returns several. `labels` has
    a label for each sample, or maps outputs to labels. `columns` maps an argument to the names of
    its columns, and a feature to what the pipeline did to its raw values (columns.py). `counts` maps tables to the lookups of each row in training. `hotness_max` maps
    features to the most keys of a bag. By default both are those of the sample batch.

    # Errors
    ValueError if the model cannot be captured, cut, or reproduced. Its first sentence names the
    input, or the line of the model.
    """
    check_version()
    owner = model if isinstance(model, torch.nn.Module) else getattr(model, "__self__", None)
    if not isinstance(owner, torch.nn.Module):
        raise ValueError("export takes an nn.Module, or a method of one")
    training = [module for module in owner.modules() if module.training]
    owner.eval()
    try:
        exporter = Exporter(model, sample_batch, columns, outputs)
        exporter.cut()
        check(exporter, exporter.made.network)
        return write(exporter, out, name, sequence, output, labels, counts, hotness_max, opset)
    finally:
        for module in training:
            module.training = True


def write(exporter, out, name, sequence, output, labels, counts, hotness_max, opset):
    """Writes the files of an export that was checked."""
    made, out = exporter.made, Path(out)
    out.mkdir(parents=True, exist_ok=True)
    inputs = exporter.network_inputs(made.followed, exporter.leaves, trim=True)
    write_network(made.network, inputs, made, exporter.output_names, out / "dense.onnx", opset)

    logits = output == "logit" or output is None and not is_probability(exporter)
    scores = torch.cat([part[:, :1] for part in exporter.scores], dim=1)
    scores = torch.sigmoid(scores) if logits else scores
    bags, weights = exporter.bags(exporter.leaves, exporter.calls)
    features = features_of(exporter, bags, hotness_max or {}, weights, out)
    tables = tuple(Table(one, *rows.shape, counted=True) for one, rows in made.tables.items())
    dense = tuple(exporter.made.names.dense(*place) for place in made.dense)
    schema = Schema(
        name, dense, network_inputs_of(made), tables, features, sequence,
        "sigmoid" if logits else "none", tuple(exporter.output_names)
    )
    rows = {one: value.float() for one, value in made.tables.items()}
    export_tables(schema, Weights(rows), counts_of(made, bags) | (counts or {}),
                  out / "tables.safetensors")
    (out / "model.toml").write_text(model_toml(schema), encoding="utf-8", newline="\n")
    write_lines(out / "probe.jsonl",
                samples_of(exporter, exporter.leaves, exporter.calls, scores, labels))
    return Exported(schema, out, scores, exporter.notes, exporter)
