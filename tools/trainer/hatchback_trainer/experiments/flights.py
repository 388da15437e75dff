"""The flights that left New York in 2013 as a stream of samples in time order, and a DLRM that
trains on streams online.

The label is an arrival more than 15 minutes late; the features are values of the flight schedule
only. Keys are hashes of words, so new tail numbers and routes are new keys. The training touches
only the rows of each batch (row-wise Adagrad by hand). It never writes a file.
"""

import csv
import hashlib
import io
import math
import zipfile
from dataclasses import dataclass
from datetime import date
from functools import lru_cache

import torch
from torch.nn import functional as F

from ..models import DLRM
from ..samples import Sample
from ..schema import Feature, Input, Schema, Table
from ..tap import onnx_bytes
from ..window import Changes

DIM = 16
BATCH = 128
RATE, DENSE_RATE = 0.05, 0.01
LATE_MINUTES = 15
BASE_ENDS = date(2013, 7, 1)
DENSE = ("hour_sin", "hour_cos", "distance", "weekend")
FEATURES = {  # feature and table -> the columns whose words make its keys
    "carrier": ("carrier",),
    "plane": ("tailnum",),
    "flight": ("carrier", "flight"),
    "dest": ("dest",),
    "route": ("origin", "dest", "carrier"),
    "route_hour": ("origin", "dest", "hour"),
    "origin_hour": ("origin", "hour", "weekday"),
    "carrier_hour": ("carrier", "origin", "hour"),
}


@dataclass
class Stream:
    """Samples in time order: those of the base, and those of each later window. Each feature has
    one key and one table."""

    name: str
    features: tuple
    dense: tuple
    base: list
    windows: list


@lru_cache(maxsize=None)
def key_of(*words):
    """Returns a u64 key: the first 8 bytes of SHA-256 over the words
    joined by newlines, little-endian."""
    return int.from_bytes(hashlib.sha256("\n".join(words).encode()).digest()[:8], "little")


def day_of(row):
    return date(int(row["year"]), int(row["month"]), int(row["day"]))


def sample_of(row):
    """Returns the sample of a row of the data set."""
    weekday = day_of(row).weekday()
    words = row | {"weekday": str(weekday)}
    sparse = {
        name: [key_of(name, *(words[column] for column in columns))]
        for name, columns in FEATURES.items()
    }
    angle = 2 * math.pi * int(row["hour"]) / 24
    dense = [
        round(math.sin(angle), 4), round(math.cos(angle), 4),
        round(float(row["distance"]) / 2000, 4), float(weekday > 4)
    ]
    return Sample(dense, sparse, int(float(row["arr_delay"]) > LATE_MINUTES))


def read_flights(path):
    """Yields (day, sample) for every flight that arrived, in the order
    of the scheduled departures."""
    with zipfile.ZipFile(path) as archive, archive.open("flights.csv") as file:
        rows = [
            row for row in csv.DictReader(io.TextIOWrapper(file, "ascii"))
            if row["arr_delay"] not in ("", "NA")
        ]
    rows.sort(key=lambda row: (int(row["month"]), int(row["day"]), int(row["sched_dep_time"])))
    for row in rows:
        yield day_of(row), sample_of(row)


def flight_stream(path):
    """Returns January to June as the base, and a window for each later week."""
    base, weeks = [], {}
    for day, sample in read_flights(path):
        if day < BASE_ENDS:
            base.append(sample)
        else:
            weeks.setdefault((day - BASE_ENDS).days // 7, []).append(sample)
    return Stream("flights", tuple(FEATURES), DENSE, base, [weeks[week] for week in sorted(weeks)])


class GrowingTable:
    """An embedding table that gets a row when a new key occurs, with the
    sums of row-wise Adagrad."""

    def __init__(self):
        self.row_of, self.keys = {}, []
        self.weight, self.sums = torch.zeros(1024, DIM), torch.zeros(1024, 1)
        self.counts = torch.zeros(1024)  # lookups since the last window
        self.total = torch.zeros(1024)

    def rows(self, keys):
        """Returns the row number of each key. A new key gets a row of zeros."""
        for key in keys:
            if key not in self.row_of:
                self.row_of[key] = len(self.keys)
                self.keys.append(key)
        while len(self.keys) > len(self.weight):
            double = lambda tensor: torch.cat([tensor, torch.zeros_like(tensor)])
            self.weight, self.sums = double(self.weight), double(self.sums)
            self.counts, self.total = double(self.counts), double(self.total)
        return torch.tensor([self.row_of[key] for key in keys])

    def step(self, rows, gradient):
        """Applies `gradient`, `[rows, dim]`, to distinct rows."""
        self.sums[rows] += gradient.square().mean(dim=1, keepdim=True)
        self.weight[rows] -= RATE * gradient / (self.sums[rows].sqrt() + 1e-8)


class OnlineDLRM:
    """A DLRM that trains on samples in their order and reports what each window changed."""

    def __init__(self, stream, seed=1):
        torch.manual_seed(seed)
        self.stream = stream
        self.tables = {name: GrowingTable() for name in stream.features}
        self.network = DLRM(len(stream.dense), len(stream.features), DIM, bottom=[16], top=[32])
        self.optimizer = torch.optim.Adagrad(self.network.parameters(), lr=DENSE_RATE)
        self.step = 0

    def train(self, samples):
        for start in range(0, len(samples), BATCH):
            self.train_batch(samples[start : start + BATCH])

    def train_batch(self, batch):
        dense = torch.tensor([sample.dense for sample in batch])
        label = torch.tensor([[float(sample.label)] for sample in batch])
        touched, vectors = [], []
        for name, table in self.tables.items():
            rows = table.rows([sample.sparse[name][0] for sample in batch])
            unique, inverse, counts = torch.unique(rows, return_inverse=True, return_counts=True)
            weight = table.weight[unique].requires_grad_()
            table.counts[unique] += counts
            table.total[unique] += counts
            touched.append((table, unique, weight))
            vectors.append(weight[inverse])
        loss = F.binary_cross_entropy_with_logits(
            self.network(dense, torch.stack(vectors, dim=1)), label
        )
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        for table, unique, weight in touched:
            table.step(unique, weight.grad)
        self.step += 1

    def changes(self):
        """Returns the `Changes` of each table since the last call."""
        changes = {}
        for name, table in self.tables.items():
            rows = torch.nonzero(table.counts).squeeze(1)
            keys = torch.tensor([signed(table.keys[row]) for row in rows.tolist()])
            changes[name] = Changes(keys, table.weight[rows], table.counts[rows].clone())
            table.counts.zero_()
        return changes

    def schema(self):
        tables = tuple(
            Table(name, len(t.keys), DIM, tuple(t.keys), placement="cached", counted=True)
            for name, t in self.tables.items()
        )
        features = tuple(Feature(name, name) for name in self.stream.features)
        inputs = (Input("dense"), Input("emb", self.stream.features, stacked=True))
        return Schema(self.stream.name, self.stream.dense, inputs, tables, features)

    def onnx(self):
        """Returns the dense network as the bytes of an ONNX file."""
        example = (
            torch.zeros(2, len(self.stream.dense)), torch.zeros(2, len(self.stream.features), DIM)
        )
        return onnx_bytes(self.network, example, ["dense", "emb"])


def signed(key):
    return key - (1 << 64) if key >= 1 << 63 else key
