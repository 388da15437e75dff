"""The description of a model (tables, features, network inputs) and its text form, `model.toml`.

This is the contract with `hatchback pack`. It holds no weights and never reads or writes a file.
"""

import json
from dataclasses import dataclass

FORMAT = 1


@dataclass(frozen=True)
class Table:
    """An embedding table of `rows` rows of `dim` floats."""

    name: str
    rows: int
    dim: int
    keys: tuple | None = None  # None: keys are 0..rows; else the u64 key of each row ("sparse")
    default: str | tuple = "zeros"  # default row: "zeros", "mean", or `dim` floats
    codec: str = "auto"
    placement: str = "auto"
    miss: str = "wait"
    counted: bool = False  # export `<name>.counts`


@dataclass(frozen=True)
class Feature:
    """A bag of at most `hotness_max` keys into one table. Two features may share a table."""

    name: str
    table: str
    pooling: str = "sum"  # "sum" | "mean" | "none" (rows side by side, zero-padded)
    hotness_max: int = 1


@dataclass(frozen=True)
class Input:
    """One input of the ONNX graph: the dense features (no `features`), or pooled vectors in the order of `features`."""

    name: str
    features: tuple = ()
    stacked: bool = False  # True: [B, T, D]; False: [B, sum of widths]


@dataclass(frozen=True)
class Schema:
    """A model without its weights."""

    name: str
    dense_features: tuple
    inputs: tuple
    tables: tuple
    features: tuple
    sequence: int = 1
    activation: str = "sigmoid"  # what turns the network's output into a score: "sigmoid" | "none"

    def table(self, name):
        return next(table for table in self.tables if table.name == name)

    def feature(self, name):
        return next(feature for feature in self.features if feature.name == name)

    def width(self, feature):
        """Returns the number of floats in the pooled vector of this feature."""
        rows = feature.hotness_max if feature.pooling == "none" else 1
        return rows * self.table(feature.table).dim


def quoted(value):
    """Writes a string, or a list of strings or numbers, which have the same form in JSON and TOML."""
    return json.dumps(list(value) if isinstance(value, tuple) else value)


def input_toml(one):
    use = f"features = {quoted(one.features)}" if one.features else "dense = true"
    return f"\n[[network.input]]\nname = {quoted(one.name)}\n{use}\n"


def source_toml(table):
    fields = {"format": "safetensors", "path": "tables.safetensors", "tensor": table.name}
    if table.keys is not None:
        fields["keys"] = f"{table.name}.keys"
    if table.counted:
        fields["counts"] = f"{table.name}.counts"
    return "{ " + ", ".join(f"{key} = {quoted(value)}" for key, value in fields.items()) + " }"


def table_toml(table):
    lines = ["", "[[table]]", f"name = {quoted(table.name)}", f"dim = {table.dim}"]
    lines.append(f"keys = {quoted('index' if table.keys is None else 'sparse')}")
    for option, usual in (("codec", "auto"), ("placement", "auto"), ("miss", "wait"), ("default", "zeros")):
        if getattr(table, option) != usual:
            lines.append(f"{option} = {quoted(getattr(table, option))}")
    lines.append(f"source = {source_toml(table)}")
    return "\n".join(lines) + "\n"


def feature_toml(feature):
    return (
        f"\n[[feature]]\nname = {quoted(feature.name)}\ntable = {quoted(feature.table)}\n"
        f"pooling = {quoted(feature.pooling)}\nhotness_max = {feature.hotness_max}\n"
    )


def model_toml(schema):
    """Returns the text of `model.toml`. Leaves out keys that have their default."""
    head = (
        "# Written by hatchback_trainer.\n"
        '# Defaults of a table: codec = "auto", placement = "auto", miss = "wait", default = "zeros".\n'
        f"format = {FORMAT}\nname = {quoted(schema.name)}\nsequence = {schema.sequence}\n"
        f"dense_features = {quoted(schema.dense_features)}\n\n"
        '[network]\nonnx = "dense.onnx"\noutput = "logit"\n'
        f"activation = {quoted(schema.activation)}\n"
    )
    parts = [head, *map(input_toml, schema.inputs), *map(table_toml, schema.tables), *map(feature_toml, schema.features)]
    return "".join(parts) + '\n[probe]\nsamples = "probe.jsonl"\n'
