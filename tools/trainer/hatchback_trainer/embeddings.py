"""The embedding part of a model in PyTorch: looks keys up, pools each bag and forms the
inputs of the network.

This is the reference for the runtime's lookups. Training uses it, and it computes the scores in
sample files. It is never exported: in the car the tables are not part of the ONNX graph.
"""

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F


@dataclass
class Batch:
    """B samples as tensors. A bag's rows are `rows[offsets[b]:offsets[b + 1]]`; row number
    `table.rows` = default row."""

    dense: torch.Tensor  # f32 [B, nd]
    rows: dict  # (feature name, table name) -> i64 [keys of all B bags]
    offsets: dict  # feature name -> i64 [B + 1]
    weights: dict  # name of a weighted feature -> f32 [keys of all B bags]


def row_numbers(table):
    """Returns a function from key to row number. A key without a row gets
    `table.rows`, the default row."""
    if table.keys is None:
        return lambda key: min(key, table.rows)
    row_of = {key: row for row, key in enumerate(table.keys)}
    return lambda key: row_of.get(key, table.rows)


def make_batch(schema, samples):
    """Returns the `Batch` of `samples`, with keys mapped to row numbers."""
    rows, offsets, weights = {}, {}, {}
    for feature in schema.features:
        bags = [sample.sparse.get(feature.name, ()) for sample in samples]
        for table in feature.tables:
            row_of = row_numbers(schema.table(table))
            rows[feature.name, table] = torch.tensor(
                [row_of(key) for bag in bags for key in bag], dtype=torch.int64
            )
        offsets[feature.name] = torch.tensor([0] + [len(bag) for bag in bags]).cumsum(0)
        if feature.weighted:
            of_all = [
                weight for sample in samples for weight in sample.weights.get(feature.name, ())
            ]
            weights[feature.name] = torch.tensor(of_all, dtype=torch.float32)
    dense = torch.tensor([sample.dense for sample in samples], dtype=torch.float32)
    return Batch(dense, rows, offsets, weights)


def default_row(table, weight):
    """Returns the default row, `[1, dim]`."""
    if table.default == "zeros":
        return weight.new_zeros(1, table.dim)
    if table.default == "mean":
        return weight.mean(dim=0, keepdim=True)
    return weight.new_tensor([table.default])


def side_by_side(weight, rows, offsets, hotness_max):
    """Pools with "none": the rows of each bag one after the other, then zeros,
    `[B, hotness_max * dim]`."""
    bags = len(offsets) - 1
    bag = torch.repeat_interleave(torch.arange(bags), offsets.diff())  # the bag of each key
    place = torch.arange(len(rows)) - offsets[bag]  # its position in the bag
    out = weight.new_zeros(bags, hotness_max, weight.shape[1])
    return out.index_put((bag, place), weight[rows]).flatten(1)


def pool(weight, rows, offsets, feature, weights=None):
    """Returns `[B, width]`. An empty bag gives zeros with every pooling. A key that
    occurs twice counts twice."""
    if feature.pooling == "none":
        return side_by_side(weight, rows, offsets, feature.hotness_max)
    own_divisor = feature.pooling == "sqrtn" or (feature.pooling == "mean" and weights is not None)
    mode = "sum" if own_divisor else feature.pooling
    out = F.embedding_bag(
        rows, weight, offsets, mode=mode, include_last_offset=True, per_sample_weights=weights
    )
    return out / divisor(offsets, feature, weights).unsqueeze(1) if own_divisor else out


def divisor(offsets, feature, weights):
    """Returns the divisor of each bag's sum, `[B]`, as in TensorFlow: the sum of the weights, or
    the root of the sum of squares."""
    bags = len(offsets) - 1
    bag = torch.repeat_interleave(torch.arange(bags), offsets.diff())
    each = torch.ones(len(bag)) if weights is None else weights
    sums = torch.zeros(bags).index_add(0, bag, each * each if feature.pooling == "sqrtn" else each)
    sums = sums.sqrt() if feature.pooling == "sqrtn" else sums
    return torch.where(sums == 0, torch.full_like(sums, float("inf")), sums)


class Embeddings(nn.Module):
    """All tables of a schema, f32 `[rows, dim]` each, with random initial values."""

    def __init__(self, schema, std):
        super().__init__()
        self.schema = schema
        # A list: the names of a dict's parameters must be those of attributes, and a table
        # may have any name.
        self.rows = nn.ParameterList(
            torch.randn(table.rows, table.dim) * std for table in schema.tables
        )

    @property
    def weights(self):
        """Maps the name of each table to its rows."""
        return {table.name: rows for table, rows in zip(self.schema.tables, self.rows)}

    def pooled(self, batch, name):
        """Returns the vectors `name`, `[B, width]`."""
        feature, table = self.schema.vector(name)
        weight = self.weights[table.name]
        weight = torch.cat([weight, default_row(table, weight)])
        rows, weights = batch.rows[feature.name, table.name], batch.weights.get(feature.name)
        return pool(weight, rows, batch.offsets[feature.name], feature, weights)

    def bag_values(self, one, batch):
        """Returns the lengths or the masks that an input takes; None if it takes neither."""
        if one.lengths:
            return torch.stack([batch.offsets[name].diff() for name in one.lengths], dim=1).float()
        if one.masks:
            places = [torch.arange(self.schema.feature(name).hotness_max) for name in one.masks]
            lengths = [batch.offsets[name].diff().unsqueeze(1) for name in one.masks]
            return torch.cat(
                [place < length for place, length in zip(places, lengths)], dim=1
            ).float()
        return None

    def forward(self, batch):
        """Returns the inputs of the network, in the order of `schema.inputs`. They are `[B, nd]`,
        `[B, T, D]` or `[B, sum of widths]`, and the lengths and masks."""
        inputs = []
        for one in self.schema.inputs:
            vectors = [self.pooled(batch, name) for name in one.features]
            join = torch.stack if one.stacked else torch.cat
            values = self.bag_values(one, batch)
            inputs.append(
                join(vectors, dim=1) if vectors else batch.dense if values is None else values
            )
        return inputs


def scores(embeddings, network, samples):
    """Returns PyTorch's sigmoid scores: B floats, or with several outputs B dicts of
    a float for each."""
    names = embeddings.schema.outputs
    with torch.no_grad():
        # [B, 1], or one of these for each output
        logits = network(*embeddings(make_batch(embeddings.schema, samples)))
    if len(names) == 1:
        return torch.sigmoid(logits).squeeze(1).tolist()
    rows = torch.sigmoid(torch.cat(logits, dim=1)).tolist()
    return [dict(zip(names, row)) for row in rows]
