"""The description of a model (tables, features, network inputs) and its text form, `model.toml`.

This is the contract with `hatchback pack`. It holds no weights and never reads or writes a file.
"""

import json
from dataclasses import dataclass, field

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
    """A bag of at most `hotness_max` keys into one table or several. Two features may share a
    table."""

    name: str
    table: str | tuple  # name of the table, or names; with several, a vector is `feature@table`
    # "sum" | "mean" | "sqrtn" | "max" | "none" (rows side by side, zero-padded)
    pooling: str = "sum"
    hotness_max: int = 1
    # Each key has a weight, which multiplies its row; "max" and "none" take none.
    weighted: bool = False
    key: dict | None = None  # the key function, as in model.toml
    padding: int | None = None  # key that counts as no key, in masks and in pooled bags
    null: int | None = None  # key of a missing value
    shared: bool = False  # all samples of a request share one bag

    @property
    def tables(self):
        return (self.table,) if isinstance(self.table, str) else self.table


@dataclass(frozen=True)
class Input:
    """One input of the ONNX graph: pooled vectors in the order of `features`, the lengths or masks
    of bags, or else the dense features."""

    name: str
    features: tuple = ()  # names of vectors: `feature`, or `feature@table`
    stacked: bool = False  # True: [B, T, D]; False: [B, sum of widths]
    lengths: tuple = ()  # features with the numbers of their keys: [B, T]
    masks: tuple = ()  # features with 1 for a key and 0 after the last: [B, sum of hotness_max]


@dataclass(frozen=True)
class Schema:
    """A model without its weights."""

    name: str
    dense_features: tuple
    inputs: tuple
    tables: tuple
    features: tuple
    sequence: int = 1
    activation: str = "sigmoid"  # what turns the network's outputs into scores: "sigmoid" | "none"
    outputs: tuple = ("logit",)  # the names of the network's outputs
    missing: dict = field(default_factory=dict)  # dense feature -> what replaces a missing value
    shared: frozenset = frozenset()  # features of which a request has one value

    def table(self, name):
        return next(table for table in self.tables if table.name == name)

    def feature(self, name):
        return next(feature for feature in self.features if feature.name == name)

    def vector(self, name):
        """Returns the feature and the table of the vector `name`."""
        return next(
            (feature, self.table(table))
            for feature in self.features
            for table in feature.tables
            if name == f"{feature.name}@{table}"
            or (name == feature.name and len(feature.tables) == 1)
        )

    def width(self, name):
        """Returns the number of floats in the vector `name`."""
        feature, table = self.vector(name)
        return (feature.hotness_max if feature.pooling == "none" else 1) * table.dim


def quoted(value):
    """Writes a string, or a list of strings or numbers, which have the same form
    in JSON and TOML."""
    # In ASCII, JSON writes an emoji as a pair of escapes, which TOML does not accept.
    return json.dumps(list(value) if isinstance(value, tuple) else value, ensure_ascii=False)


def tensor_name(schema, table, column=None):
    """Returns the name of a table's tensor. Two tensors never get the same name, whatever
    the tables are called."""
    name = table.name if column is None else f"{table.name}.{column}"
    taken = (
        {"__metadata__"}
        | {other.name for other in schema.tables if other is not table or column is not None}
    )
    while name in taken:
        name += "_"
    return name


def input_toml(one):
    lists = {"features": one.features, "lengths": one.lengths, "masks": one.masks}
    use = next(
        (f"{key} = {quoted(names)}" for key, names in lists.items() if names), "dense = true"
    )
    return f"\n[[network.input]]\nname = {quoted(one.name)}\n{use}\n"


def source_toml(schema, table):
    fields = {
        "format": "safetensors", "path": "tables.safetensors", "tensor": tensor_name(schema, table)
    }
    if table.keys is not None:
        fields["keys"] = tensor_name(schema, table, "keys")
    if table.counted:
        fields["counts"] = tensor_name(schema, table, "counts")
    return "{ " + ", ".join(f"{key} = {quoted(value)}" for key, value in fields.items()) + " }"


def table_toml(schema, table):
    lines = ["", "[[table]]", f"name = {quoted(table.name)}", f"dim = {table.dim}"]
    lines.append(f"keys = {quoted('index' if table.keys is None else 'sparse')}")
    for option, usual in (
        ("codec", "auto"), ("placement", "auto"), ("miss", "wait"), ("default", "zeros")
    ):
        if getattr(table, option) != usual:
            lines.append(f"{option} = {quoted(getattr(table, option))}")
    lines.append(f"source = {source_toml(schema, table)}")
    return "\n".join(lines) + "\n"


def inline_toml(fields):
    value = lambda one: inline_toml(one) if isinstance(one, dict) else quoted(one)
    return "{ " + ", ".join(f"{key} = {value(one)}" for key, one in fields.items()) + " }"


def feature_toml(feature):
    return (
        f"\n[[feature]]\nname = {quoted(feature.name)}\ntable = {quoted(feature.table)}\n"
        f"pooling = {quoted(feature.pooling)}\nhotness_max = {feature.hotness_max}\n"
        + ("weights = true\n" if feature.weighted else "")
        + (f"padding = {feature.padding}\n" if feature.padding is not None else "")
        + (f"null = {feature.null}\n" if feature.null is not None else "")
        + ("shared = true\n" if feature.shared else "")
        + (f"key = {inline_toml(feature.key)}\n" if feature.key is not None else "")
    )


def dense_toml(schema):
    def entry(name):
        options = {"missing": float(schema.missing[name])} if name in schema.missing else {}
        options |= {"shared": True} if name in schema.shared else {}
        return inline_toml({"name": name} | options) if options else quoted(name)

    return "[" + ", ".join(map(entry, schema.dense_features)) + "]"


def outputs_toml(schema):
    activation = quoted(schema.activation)
    if len(schema.outputs) == 1:
        return f"output = {quoted(schema.outputs[0])}\nactivation = {activation}\n"
    lines = [
        f"    {{ name = {quoted(name)}, activation = {activation} }},\n" for name in schema.outputs
    ]
    return "output = [\n" + "".join(lines) + "]\n"


def model_toml(schema):
    """Returns the text of `model.toml`. Leaves out keys that have their default."""
    head = (
        "# Written by hatchback_trainer.\n"
        '# Defaults of a table: codec = "auto", placement = "auto", miss = "wait", '
        'default = "zeros".\n'
        f"format = {FORMAT}\nname = {quoted(schema.name)}\nsequence = {schema.sequence}\n"
        f"dense_features = {dense_toml(schema)}\n\n"
        '[network]\nonnx = "dense.onnx"\n' + outputs_toml(schema)
    )
    tables = [table_toml(schema, table) for table in schema.tables]
    parts = [head, *map(input_toml, schema.inputs), *tables, *map(feature_toml, schema.features)]
    return "".join(parts) + '\n[probe]\nsamples = "probe.jsonl"\n'
