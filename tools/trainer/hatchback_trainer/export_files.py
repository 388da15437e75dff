"""Writes an export that was checked: the network, the tables, model.toml and the probe set."""

import logging
import math
import re
from types import SimpleNamespace

import torch

from .capture import program_of
from .columns import Dense, check_crosses, raw_bags, raw_dense
from .graph import op_name, source_line
from .model_files import export_tables, replaced
from .samples import Sample, shortest, write_lines
from .schema import Feature, Input, Schema, Table, model_toml


def key_of(column, functions, folder):
    """Returns the key function of a feature whose values are not the row numbers themselves."""
    if column.name in functions:
        return functions[column.name].fields(column.name, column.shift, folder)
    if column.modulus is not None:
        return {"function": "modulo", "divisor": column.modulus, "first": column.shift}
    if column.spread or column.shift:
        return {"function": "range", "size": column.size, "first": column.shift}
    return None


def null_of(column, functions):
    """Returns the key of a missing value, if the column may have one."""
    null = getattr(functions.get(column.name), "null", None)
    return None if null is None else null + column.shift


def features_of(exporter, bags, hotness_max, weights, folder, shared):
    made, features = exporter.made, []
    names = [*dense_names(made), *(column.name for column in made.columns)]
    for name in shared:
        if name not in names:
            raise ValueError(f"shared: the model has no feature `{name}`, only {', '.join(names)}")
    for column in made.columns:
        longest = max(map(len, bags[column.name]), default=0)
        hotness = hotness_max.get(column.name, column.hotness or max(1, longest))
        table = column.tables[0] if len(column.tables) == 1 else tuple(column.tables)
        padding = column.skipped if column.padding is None else column.padding
        padding = None if padding is None else padding + column.shift
        features.append(Feature(
            column.name, table, column.pooling, hotness, column.name in weights,
            key_of(column, exporter.functions, folder), padding,
            null_of(column, exporter.functions), column.name in shared,
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
        elif name.startswith("length_"):
            inputs.append(Input(name, lengths=(name.removeprefix("length_"),)))
        else:
            inputs.append(Input(name, masks=(name.removeprefix("mask_"),)))
    return tuple(inputs)


SAME_VALUES = ("_to_copy", "alias", "cat", "chunk", "clone", "expand", "flatten", "getitem",
               "index_select", "narrow", "permute", "reshape", "select", "slice", "split",
               "split_with_sizes", "squeeze", "stack", "t", "transpose", "unbind", "unsqueeze",
               "view")


def ends_in_sigmoid(node):
    """Returns whether each value of a node is one of a sigmoid or softmax, or a product of them,
    as that of a click and of a purchase behind it."""
    if not isinstance(node, torch.fx.Node):
        return False
    name = op_name(node)
    if name in SAME_VALUES:
        several = name in ("cat", "stack")
        return all(map(ends_in_sigmoid, node.all_input_nodes if several else node.args[:1]))
    if name == "mul":
        return all(map(ends_in_sigmoid, node.args))
    return name in ("sigmoid", "softmax", "_softmax")


def kind_of_output(exporter, output, labels):
    """Returns what the outputs are, and says so where the model does not: most models of clicks end
    in a logit, and a rating must get no sigmoid.

    # Errors
    ValueError with the first label that is no click, no share of clicks and not unknown, or with
    the first output that may be a probability: the car would add a second sigmoid.
    """
    ends = set(map(ends_in_sigmoid, exporter.made.outputs))
    if output is not None or ends == {True}:
        return output or "probability"
    for given in labels.values():
        known = [one for one in given.tolist() if one != -1 and not math.isnan(one)]
        wrong = next((one for one in known if not 0 <= one <= 1), None)
        if wrong is not None:
            raise ValueError(
                f"a label is {wrong:g}, and the model ends in no sigmoid: pass "
                'output="score" for scores as they are, such as ratings, or output="logit"'
            )
    for name, parts in exporter.compared.items() if labels or True in ends else ():
        scores = torch.cat(parts)
        # Rows that are not of the batch may have scores that are not finite.
        if bool(((scores >= 0) & (scores <= 1) | ~scores.isfinite()).all()):
            raise ValueError(
                f"output `{name}`: not all outputs end in a sigmoid, and all {len(scores)} scores "
                'are in 0..1: pass output="probability" or "score" to keep them, or output="logit"'
            )
    if not labels:
        exporter.note(
            "the model ends in no sigmoid, so its outputs are taken as logits and the car adds "
            'one: pass output="score" for scores as they are, such as ratings, or output="logit"'
        )
    return "logit"


def labels_of(exporter, given):
    """Returns the labels of each output that has some, `[samples]`."""
    found = {}
    for place, name in enumerate(exporter.output_names):
        one = given.get(name) if isinstance(given, dict) else given
        if one is None:
            continue
        one = torch.as_tensor(one).double()
        if one.shape[:1] != (exporter.samples,):
            raise ValueError(
                f"labels: {one.numel()} labels for a batch of {exporter.samples} samples")
        one = one.reshape(exporter.samples, -1)
        found[name] = one[:, min(place, one.shape[1] - 1)]
    return found


def known_labels(exporter, labels):
    """Returns labels of clicks with NaN in the place of -1, data sets' mark of an unknown one."""
    if count := sum(int((one == -1).sum()) for one in labels.values()):
        exporter.note(f"{count} labels of -1 are taken as unknown and left out")
    return {name: one.where(one != -1, torch.nan) for name, one in labels.items()}


def label_of(value):
    """Returns a label as a line has it; None for an unknown one, which is NaN."""
    value = float(value)
    if math.isnan(value):
        return None
    return int(value) if value.is_integer() else shortest(value)


def check_numbers(exporter):
    """Refuses a batch or a score that is not finite: no request and no score can be."""
    check_dense(exporter, exporter.leaves)
    for call in exporter.calls:
        for sample, bag in enumerate(call.weights or ()):
            refuse_first(f"the weights of `{call.feature}`", torch.tensor(bag), sample)
    for name, part in zip(exporter.output_names, exporter.scores):
        refuse_first(f"output `{name}` of the model", part[:, 0])


def check_dense(exporter, leaves):
    for place, column in exporter.made.dense:
        values = leaves[place].tensor.reshape(len(leaves[place].tensor), -1)[:, column].float()
        refuse_first(f"`{exporter.made.names.dense(place, column)}`", values)


def refuse_first(what, values, sample=None):
    wrong = (~values.isfinite()).nonzero().reshape(-1).tolist()
    if wrong:
        sample = wrong[0] if sample is None else sample
        raise ValueError(f"{what}, sample {sample}: {values[wrong[0]].item()} is no finite number")


def no_onnx(made, error):
    """Returns a message about an operation that ONNX, or PyTorch's exporter of it, lacks."""
    found = re.search(r"op='(?:aten\.)?([\w.]+)'", str(error))
    name = found.group(1) if found else "an operation"
    lines = [source_line(node) for node in made.graph.nodes if op_name(node) == name]
    where = f" from {lines[0]}" if lines else ""
    return f"`{name}`{where}: PyTorch cannot write this operation as ONNX; write it in another way"


class RawDense(torch.nn.Module):
    """The network behind the steps that make the model's dense values of raw ones."""

    def __init__(self, network, place, steps):
        super().__init__()
        self.network, self.place = network, place
        row = lambda values: torch.tensor([list(values)], dtype=torch.float32)
        largest = torch.finfo(torch.float32).max
        bound = lambda side: row(
            min(max(step.bounds[side], -largest), largest) for step in steps)
        self.clips = any(step.clip for step in steps)
        self.scales = any((step.mean, step.scale) != (0.0, 1.0) for step in steps)
        self.has_logarithm = any(step.log1p for step in steps)
        for name, value in {
            "low": bound(0), "high": bound(1), "mean": row(step.mean for step in steps),
            "scale": row(step.scale for step in steps),
            "logarithm": row(float(step.log1p) for step in steps),
        }.items():
            self.register_buffer(name, value)

    def forward(self, *inputs):
        dense = inputs[self.place]
        if self.clips:
            dense = torch.maximum(torch.minimum(dense, self.high), self.low)
        if self.has_logarithm:
            # A column without it adds log(1) = 0, whatever its values are.
            linear = dense * (1 - self.logarithm)
            dense = linear + torch.log(1 + dense * self.logarithm)
        if self.scales:
            dense = (dense - self.mean) / self.scale
        return self.network(*inputs[:self.place], dense, *inputs[self.place + 1:])


def dense_names(made):
    return [made.names.dense(*place) for place in made.dense]


def with_raw_dense(exporter, network, inputs):
    """Returns the network that takes raw dense values, and its inputs."""
    names = dense_names(exporter.made)
    steps = [exporter.dense_steps.get(name, Dense()) for name in names]
    if all(step == Dense(missing=step.missing) for step in steps):
        return network, inputs
    place = list(exporter.made.inputs).index("dense")
    raw = dense_values(exporter, inputs[place])
    return RawDense(network, place, steps), [*inputs[:place], raw, *inputs[place + 1:]]


def dense_values(exporter, dense):
    """Returns the dense values of a batch as the application has them."""
    columns = [
        raw_dense(name, exporter.dense_steps[name], column) if name in exporter.dense_steps
        else column
        for name, column in zip(dense_names(exporter.made), dense.double().T.tolist())
    ]
    return torch.tensor(columns, dtype=torch.float64).float().T.contiguous()


def write_network(exporter, path, opset):
    """Writes the network as ONNX, with the batch left open."""
    made = exporter.made
    network, inputs = with_raw_dense(
        exporter, made.network, exporter.network_inputs(made.followed, exporter.leaves))
    batch = torch.export.Dim("batch", min=2)
    shapes = tuple({0: batch} for _ in inputs)
    # torch takes the shapes of `*inputs` by the name of that parameter.
    shapes = {"inputs": shapes} if isinstance(network, RawDense) else shapes
    program = program_of(network, inputs, shapes)
    with torch.no_grad():
        write = lambda program: torch.onnx.export(
            program, (), str(path), input_names=list(made.inputs), opset_version=opset, dynamo=True,
            output_names=exporter.output_names, external_data=False, verbose=False
        )
        log = logging.getLogger("torch.onnx")
        level = log.level
        log.setLevel(logging.ERROR)  # it warns of every package that is not installed
        try:
            write(program)
        except Exception:  # the exporter has no function for some operations as they are
            try:
                write(program.run_decompositions())
            except Exception as error:
                raise ValueError(no_onnx(made, error)) from None
        finally:
            log.setLevel(level)


def samples_of(exporter, leaves, calls, scores, labels):
    """Yields the samples of a batch as the car takes them."""
    bags, weights = exporter.bags(leaves, calls)
    bags = {
        name: raw_bags(name, exporter.functions.get(name), bag) for name, bag in bags.items()
    }
    check_crosses(exporter.functions, bags)
    flat = {a: leaves[a].tensor.reshape(len(leaves[a].tensor), -1) for a, _ in exporter.made.dense}
    dense = (
        dense_values(exporter, torch.stack(
            [flat[a][:, b].float() for a, b in exporter.made.dense], dim=1)).tolist()
        if flat else None
    )
    count = len(next(iter(bags.values())))
    for number in range(count):
        label, score = {}, {}
        for place, name in enumerate(exporter.output_names):
            if name in labels and (found := label_of(labels[name][number])) is not None:
                label[name] = found
            if scores is not None:
                score[name] = float(scores[number, place])
        if len(exporter.output_names) == 1:
            label, score = (next(iter(one.values()), None) for one in (label, score))
        yield Sample(
            [] if dense is None else dense[number],
            {name: bag[number] for name, bag in bags.items() if bag[number]},
            None if label == {} else label, None if score == {} else score,
            {name: bag[number] for name, bag in weights.items() if bag[number]}
        )


def write(exporter, out, name, sequence, output, labels, counts, hotness_max, opset, shared):
    """Writes the files of an export. Returns the schema and the scores, `[samples, outputs]`."""
    made = exporter.made
    hotness_max = exporter.of_all_features(hotness_max or {})
    shared = exporter.of_all_features(dict.fromkeys(shared or ()))
    logits = output == "logit"
    labels = labels if output == "score" else known_labels(exporter, labels)
    scores = torch.cat([part[:, :1] for part in exporter.scores], dim=1)
    scores = torch.sigmoid(scores) if logits else scores
    bags, weights = exporter.bags(exporter.leaves, exporter.calls)
    tables = tuple(Table(one, *rows.shape, counted=True) for one, rows in made.tables.items())
    steps = exporter.dense_steps.items()
    missing = {name: step.missing for name, step in steps if step.missing is not None}
    rows = SimpleNamespace(weights={one: value.float() for one, value in made.tables.items()})
    with replaced(out) as folder:
        schema = Schema(
            name, tuple(dense_names(made)), network_inputs_of(made), tables,
            features_of(exporter, bags, hotness_max, weights, folder, shared), sequence,
            "sigmoid" if logits else "none", tuple(exporter.output_names), missing,
            frozenset(shared)
        )
        write_network(exporter, folder / "dense.onnx", opset)
        export_tables(schema, rows, counts_of(made, bags) | (counts or {}),
                      folder / "tables.safetensors")
        (folder / "model.toml").write_text(model_toml(schema), encoding="utf-8", newline="\n")
        write_lines(folder / "probe.jsonl",
                    samples_of(exporter, exporter.leaves, exporter.calls, scores, labels))
    return schema, scores
