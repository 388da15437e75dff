"""Exports a model that was not written for Hatchback: writes the files that `hatchback pack` reads.

PyTorch captures the model as one graph. The exporter cuts the graph at its lookups: the columns of
the batch that select rows become sparse features, and the rest becomes the ONNX network. It
compares the network with the model on other samples before it writes anything. It never changes the
model.
"""

import sys
import tempfile
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from .batch import Flat, Leaf
from .capture import (
    EACH, Captured, Choices, WholeTables, capture, check_version, constant_masks
)
from .checks import check
from .columns import Dense
from .cut import Cut
from .deploy import Deployable
from .export_files import (
    check_dense, check_numbers, kind_of_output, labels_of, samples_of, write, write_network
)
from .graph import Followed, source_line
from .names import Names
from .observed import Lookups
from .precision import APART, floats_of, in_float32, name_of, precisions, refuse_casts
from .rewrites import with_real_pairs
from .samples import write_lines
from .schema import Schema
from .torchrec_calls import collection_calls, collections, sequence_calls, tables_of

OPSET = 18  # every supported torch writes it, and every version of the engine reads it


@dataclass
class Exported(Deployable):
    """The result of `export`: the schema, the model's outputs and what the exporter noticed."""

    schema: Schema
    folder: Path
    scores: torch.Tensor  # [samples, outputs]
    notes: list = field(default_factory=list)
    exporter: object = None

    def onnx(self):
        """Returns the ONNX file of the network with the weights that the model has now."""
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "dense.onnx"
            write_network(checked(*self.exporter.given), path, self.exporter.opset)
            return path.read_bytes()


def parts_of(result):
    """Returns the tensors of a model's result, as (name, tensor)."""
    if torch.is_tensor(result):
        return [("logit", result)]
    if isinstance(result, dict):
        parts = [(str(name), part) for name, part in result.items()]
    elif isinstance(result, (list, tuple)):
        names = getattr(result, "_fields", [f"output{place}" for place in range(len(result))])
        parts = list(zip(names, result))
    elif hasattr(result, "__dict__"):
        parts = list(vars(result).items())
    else:
        raise ValueError(f"the model returns a {type(result).__name__}, not tensors")
    return [(name, part) for name, part in parts if torch.is_tensor(part)]


def outputs_of(result, wanted, samples):
    """Returns the places and names of a model's scores: one tensor, or those of a dict or tuple
    that are wanted or have one value a sample. `samples` is None if their number is unknown."""
    if torch.is_tensor(result):
        if result.dim() == 0:
            raise ValueError("the model returns one number for the whole batch, not one a sample")
        return {0: "logit"}
    tensors = dict(enumerate(parts_of(result)))
    if wanted:
        lacking = set(wanted) - {name for name, _ in tensors.values()}
        if lacking:
            known = ", ".join(f"`{name}`" for name, _ in tensors.values())
            raise ValueError(f"outputs: the model returns no `{lacking.pop()}`, only {known}")
        return {place: name for place, (name, _) in tensors.items() if name in wanted}
    scores = {
        place: name for place, (name, part) in tensors.items()
        if part.is_floating_point() and part.dim() and all(size == 1 for size in part.shape[1:])
        and samples in (None, len(part))
    }
    if not scores:
        raise ValueError(
            "no output has one value a sample; name the scores with outputs=[...]: the model "
            "returns " + ", ".join(f"`{n}` {list(p.shape)}" for n, p in tensors.values())
        )
    return {place: "logit" for place in scores} if len(scores) == 1 else scores


class Source:
    """A model, how it is called, and what it answers for a batch."""

    def __init__(self, model, batch):
        self.precisions = precisions(model)
        self.given, self.batch = model, batch
        model = in_float32(model) if self.precisions else model
        self.call = model
        self.model = model if isinstance(model, torch.nn.Module) else model.__self__
        forward = model.forward if isinstance(model, torch.nn.Module) else model
        self.forward, self.flat = forward, self.flat_of(forward, batch)
        self.outputs = {}  # the places of the scores among the tensors of a result, and their names

    def flat_of(self, forward, batch):
        return Flat(forward, batch, floats_of if self.precisions else lambda tensor: tensor)

    def in_own_precision(self):
        """Returns the scores of the model as it is; None if it does not run here."""
        flat = Flat(self.forward, self.batch)
        positional, named = flat.rebuild(flat.tensors)
        try:
            with torch.no_grad():
                return [part.float().reshape(len(part), -1)
                        for part in self.pick(self.given(*positional, **named))]
        except RuntimeError:  # some operations lack half precision on a CPU
            return None

    def run(self, flat, tensors=None):
        positional, named = flat.rebuild(flat.tensors if tensors is None else tensors)
        with WholeTables():
            return self.call(*positional, **named)

    def scores(self, flat, tensors=None):
        """Returns the outputs of the model, `[samples, values]` each."""
        return [part.reshape(len(part), -1) for part in self.pick(self.run(flat, tensors))]

    def pick(self, result):
        parts = parts_of(result)
        return tuple(parts[place][1] for place in self.outputs)


def recorded(source, flat):
    """Runs the model and returns its result and the calls of its collections."""
    calls = []

    def answer(name, module, forward, features):
        output = forward(features)
        if hasattr(module, "embedding_bag_configs"):
            made = collection_calls(name, module, features, output)
        else:
            made, output = sequence_calls(name, module, features, output)
        for call in made:
            call.weight = tables_of(module)[call.table.removeprefix(f"{name}.")].weight.detach()
        calls.extend(made)
        return output

    with torch.no_grad(), collections(source.model, answer):
        result = source.run(flat)
    return result, calls


def masks_of(source, tensors, leaves):
    """Returns the masks of the model that choose values and are the same for all samples."""
    samples = next((len(leaf.tensor) for leaf in leaves if leaf.per_sample), 0)
    few = torch.arange(samples).flip(0)[: max(2, samples // 2)]
    part = [tensor[few] if leaf.per_sample else tensor for tensor, leaf in zip(tensors, leaves)]
    seen, less = masks_seen(source, tensors, samples), masks_seen(source, part, len(few))
    if seen is None or less is None:
        return []  # offsets of the whole batch do not fit a part of it
    found = constant_masks(seen, less)
    # All samples of the batch may have one mask by chance: a constant one no other value changes.
    changed = [
        with_other_values(tensor) if leaf.per_sample else tensor
        for tensor, leaf in zip(tensors, leaves)]
    other = masks_seen(source, changed, samples)
    again = (other is not None and constant_masks(seen, other)) or found
    return [one if one == EACH or same is not None else None for one, same in zip(found, again)]


def masks_seen(source, tensors, samples):
    """Returns the masks that a run of the model chooses by; None if it fails."""
    mode = Choices(samples)
    try:
        with torch.no_grad(), mode:
            source.run(source.flat, tensors)
    except (RuntimeError, IndexError, ValueError):
        return None
    return mode.seen


def with_other_values(tensor):
    """Returns a tensor with key 0, which every table has, and with numbers of the other sign."""
    if tensor.is_floating_point() and bool((tensor != tensor.round()).any()):
        return -tensor
    return tensor.new_zeros(tensor.shape)


class Exporter:
    """One export: captures, cuts, checks and writes."""

    def __init__(self, model, batch, columns, outputs):
        self.given = model, batch, columns, outputs
        self.source, self.notes = Source(model, batch), []
        columns = columns or {}
        self.columns = {
            name: one for name, one in columns.items() if isinstance(one, (list, tuple))}
        self.dense_steps = {name: one for name, one in columns.items() if isinstance(one, Dense)}
        self.functions = {
            name: one for name, one in columns.items()
            if name not in self.columns and name not in self.dense_steps}
        self.flat = self.source.flat
        self.observed = Lookups(self.flat)
        with self.observed:
            result, self.calls = recorded(self.source, self.flat)
        sizes = {len(part) for part in self.flat.tensors if part.dim()}
        self.source.outputs = outputs_of(result, outputs, sizes.pop() if len(sizes) == 1 else None)
        self.output_names, found = list(self.source.outputs.values()), self.source.pick(result)
        self.samples = len(found[0]) if found[0].dim() else 0
        self.leaves = self.flat.leaves(self.samples, self.observed.bagged)
        if self.samples < 2 or not (self.calls or any(leaf.per_sample for leaf in self.leaves)):
            raise ValueError(
                "the first axis of the inputs and of the output must be the samples, two or more"
            )
        self.scores = [part.detach().reshape(self.samples, -1) for part in found]
        if self.source.precisions:
            self.note_precision()

    def note_precision(self):
        """Says by how much the scores in float32 differ from the model's own."""
        names = ", ".join(map(name_of, self.source.precisions))
        own, said = self.source.in_own_precision(), ""
        for name, a, b in zip(self.output_names, own or (), self.scores):
            most = (a - b).abs().max().item()
            if not most <= APART * (1 + b.abs().max().item()):
                raise ValueError(
                    f"the model computes in {names}, and its output `{name}` differs by {most:.2g} "
                    "from the same weights in float32, which the car computes in"
                )
            said += f"; output `{name}` differs by at most {most:.1g}"
        self.note(f"the model has values in {names}, and the car computes in float32{said}")

    def note(self, text):
        if text not in self.notes:
            self.notes.append(text)
            print(f"hatchback_trainer: {text}", file=sys.stderr)

    def cut(self):
        """Captures and cuts the model."""
        vectors = [tensor.detach() for call in self.calls for tensor in call.tensors]
        per_sample = [leaf.per_sample for leaf in self.leaves] + [True] * len(vectors)
        masks = masks_of(self.source, self.flat.tensors, self.leaves) if not self.calls else []
        captured = Captured(self.source, masks, per_sample)
        # torch takes two arguments that are one tensor for one argument.
        given = [tensor.clone() for tensor in (*self.flat.tensors, *vectors)]
        self.graph = with_real_pairs(capture(captured, given))
        self.leaves_out = captured.found.leaves_out
        self.of_two_sizes = captured.found.of_two_sizes
        followed = self.follow(self.leaves, self.calls)
        refuse_casts(followed, self.observed.autocast)
        names = Names(self.leaves, self.columns, self.source.model)
        self.made = Cut(followed, self.leaves, self.calls, names, self.note)
        self.check_columns()
        self.check_keys()
        if self.made.kept and not self.made.parts:
            lines = [source_line(lookup.node) for lookup in self.made.kept.values()]
            raise ValueError(
                f"{lines[0]}: the row numbers of this lookup are computed, and the scores depend "
                "on no other table: give the row numbers as a column of the batch"
            )
        if not self.made.parts:
            raise ValueError(
                "the scores depend on no table: no row of an embedding is chosen by a column of "
                "the batch"
            )

    def check_keys(self):
        """Refuses a key of the batch that the car cannot send, or whose row is no row of its
        column."""
        bags, _ = self.bags(self.leaves, self.calls)
        for column in self.made.columns:
            if column.call is not None or column.modulus is not None:
                continue
            for sample, bag in enumerate(bags[column.name]):
                wrong = next((key for key in bag if not 0 <= key < column.size), None)
                if wrong is not None:
                    raise ValueError(
                        f"`{column.name}`, sample {sample}: the key {wrong}, and its keys are 0 to "
                        f"{column.size - 1}"
                    )

    def check_columns(self):
        """Refuses a column of the caller that is none of the model."""
        known = {column.name: column for column in self.made.columns}
        for name in self.functions:
            if name not in known:
                have = ", ".join(f"`{one}`" for one in known)
                raise ValueError(f"columns[{name!r}]: no sparse feature of this name, only {have}")
            if known[name].modulus is not None:
                raise ValueError(
                    f"columns[{name!r}]: the model makes row numbers of this column in its own way"
                )
        self.functions |= {
            name: one for name, one in self.of_all_features(self.functions).items()
            if known[name].modulus is None}
        dense = [self.made.names.dense(*place) for place in self.made.dense]
        for name, step in self.dense_steps.items():
            step.check(name)
            if name not in dense:
                have = ", ".join(f"`{one}`" for one in dense)
                raise ValueError(f"columns[{name!r}]: no dense feature of this name, only {have}")
        for name in self.columns:
            if name not in {leaf.name for leaf in self.leaves}:
                raise ValueError(f"columns[{name!r}]: no argument of this name")

    def of_all_features(self, given):
        """Returns options by feature, with those of a column for all features of it."""
        return {a: given[b] for a, b in self.made.renamed.items() if b in given} | given

    def follow(self, leaves, calls):
        vectors = [
            Leaf(call.feature, tensor.detach(), False) for call in calls for tensor in call.tensors
        ]
        return Followed(self.graph, [*leaves, *vectors])

    def bags(self, leaves, calls):
        """Maps the name of each feature to its bags, a list of keys for each sample, and each
        weighted one to its weights."""
        bags, weights = {}, {}
        for column in self.made.columns:
            if column.call is not None:
                # Two collections may have a feature of one name, with other bags.
                call = next(
                    one for known, one in zip(self.calls, calls) if known is column.call)
                bags[column.name] = call.bags
                if call.weights is not None:
                    weights[column.name] = call.weights
            elif column.jagged is not None:
                bags[column.name] = self.jagged_bags(column, leaves)
            else:
                values = leaves[column.leaf].tensor
                values = values.reshape(len(values), -1)[:, list(column.columns)].long().tolist()
                key_of = lambda raw, n=column.modulus: raw if n is None else raw % n
                bags[column.name] = [
                    trimmed([one for one in bag if key_of(one) != column.skipped], column.padding)
                    for bag in values
                ]
        return bags, weights

    def jagged_bags(self, column, leaves):
        lookup, values = column.jagged, leaves[column.leaf].tensor
        followed = self.made.followed if leaves is self.leaves else self.follow(leaves, [])
        bounds = followed.value[lookup.bounds].tolist()
        ends = bounds if lookup.last_bound else [*bounds, values.numel()]
        keys = values.reshape(-1).tolist()
        bags = [keys[a:b] for a, b in zip(ends, ends[1:])]
        return [[key for key in bag if key + column.shift != lookup.padding] for bag in bags]

    def network_inputs(self, followed, leaves):
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
                # A request leaves the padding after the last key out.
                keeps[id(column)] = keys.flip(1).cumsum(1).flip(1) > 0
        for name, part in made.refs.items():
            column = part.column
            if column.call is None and column.keeps_rows:
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
        for node, column in made.lengths.items():
            found[f"length_{column.name}"] = followed.value[node].float().reshape(-1, 1)
        return [found[name] for name in made.inputs]


def trimmed(bag, padding):
    """Returns a bag without the padding after its last key."""
    end = len(bag)
    while padding is not None and end and bag[end - 1] == padding:
        end -= 1
    return bag[:end]


def lines_of(exporter, batch, path):
    """Writes the samples of another batch, without labels and scores."""
    source = exporter.source
    flat = source.flat_of(source.forward, batch)
    _, calls = recorded(source, flat) if exporter.calls else (None, [])
    given = dict(zip(flat.names, flat.tensors))
    for leaf in exporter.leaves:
        own, found = leaf.tensor.shape[1:], given.get(leaf.name)
        if found is None or leaf.per_sample and found.shape[1:] != own:
            has = "none" if found is None else list(found.shape[1:])
            raise ValueError(f"`{leaf.name}`: a sample has shape {has}, the export's {list(own)}")
    leaves = [replace(leaf, tensor=given[leaf.name]) for leaf in exporter.leaves]
    check_dense(exporter, leaves)
    write_lines(path, samples_of(exporter, leaves, calls, None, {}))


def checked(model, batch, columns, outputs):
    """Returns the exporter of a model, whose network was compared with the model in `eval()`."""
    owner = getattr(model, "__self__", model)
    if not isinstance(owner, torch.nn.Module):
        raise ValueError("export takes an nn.Module, or a method of one")
    training = [module for module in owner.modules() if module.training]
    owner.eval()
    try:
        exporter = Exporter(model, batch, columns, outputs)
        exporter.cut()
        check_numbers(exporter)
        check(exporter, exporter.made.network)
        return exporter
    finally:
        for module in training:
            module.training = True


def export(
    model, sample_batch, out, name="model", sequence=1, output=None, labels=None, counts=None,
    hotness_max=None, columns=None, outputs=None, opset=OPSET, shared=None
):
    """Writes `model` into the folder `out` as `hatchback pack` reads it.

    `model` is an nn.Module, or a method of one. `sample_batch` is what it is called with: a tensor,
    a tuple or dict of arguments, or a tuple or dict as the only argument. It has two samples or
    more, and all of them become the probe set. `output` is "logit", "probability" or "score": the
    car adds a sigmoid to logits, and leaves the other two as they are. By default a last sigmoid
    or softmax makes it a probability. `outputs` names the scores of several outputs.
    `labels` has a label for each sample, NaN for an unknown one, or maps outputs to labels.
    `columns` maps an argument to the names of its columns, and a feature to what the pipeline did
    to its raw values (columns.py). `counts` maps tables to the lookups of each row in training.
    `hotness_max` maps features to the most keys of a bag. By default both are those of the sample
    batch. `shared` lists the features that all samples of a request share, such as those of a
    driver with many candidates.

    # Errors
    ValueError if the model cannot be captured, cut, or reproduced. Its first sentence names the
    input, or the line of the model.
    """
    check_version()
    if output not in (None, "logit", "probability", "score"):
        raise ValueError(f'output={output!r}: only "logit", "probability" or "score"')
    exporter = checked(model, sample_batch, columns, outputs)
    exporter.opset, labels = opset, labels_of(exporter, labels)
    output = kind_of_output(exporter, output, labels)
    schema, scores = write(
        exporter, Path(out), name, sequence, output, labels, counts, hotness_max, opset, shared)
    return Exported(schema, Path(out), scores, exporter.notes, exporter)
