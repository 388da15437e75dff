"""Models of the sizes that this field calls small or large, with random rows,
for measurements of scale.

`criteo-15` is the DLRM on Criteo's log with keys seen 15 times: 26 tables, 33 M rows of 128. The
others are the synthetic models of NVIDIA's Distributed-Embeddings. A network of such a model is
never trained: its scores are meaningless. A table is written block by block. Nothing holds a table,
so a model of any size needs disk and no memory.
"""

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import nn

from ..model_files import export_dense
from .criteo import DENSE, MLPERF, network as dlrm

BLOCK_ROWS = 1 << 16
POWER = 1.05  # exponent of the keys' power law
CRITEO_15 = [
    7_912_889, 33_823, 17_139, 7_339, 20_046, 4, 7_105, 1_382, 63, 5_554_114, 582_469, 245_828,
    11, 2_209, 10_667, 104, 4, 968, 15, 8_165_896, 2_675_940, 7_156_453, 302_516, 12_022, 97, 35
]


@dataclass(frozen=True)
class Tables:
    """`count` tables of `rows` rows of `dim` values. Each feature of `hotness` looks up that many
    keys in each of them."""

    count: int
    rows: int
    dim: int
    hotness: tuple = (1,)


@dataclass(frozen=True)
class Size:
    tables: tuple
    hidden: tuple  # widths of the network's layers
    numbers: int  # dense features
    stride: int = 1  # vectors are averaged over so many neighbours


def shared(count, rows, dim, hotness):
    return Tables(count, rows, dim, (1, hotness))


SIZES = {
    "tiny": Size(
        (
            shared(1, 10_000, 8, 10), shared(1, 1_000_000, 16, 10), shared(1, 25_000_000, 16, 10),
            Tables(1, 25_000_000, 16), Tables(16, 10, 8), Tables(10, 1_000, 8),
            Tables(4, 10_000, 8), Tables(2, 100_000, 16), Tables(19, 1_000_000, 16)
        ),
        (256, 128), 10
    ),
    "small": Size(
        (
            shared(5, 10_000, 16, 30), shared(3, 4_000_000, 32, 30), shared(1, 50_000_000, 32, 30),
            Tables(1, 50_000_000, 32), Tables(30, 10, 16), Tables(30, 1_000, 16),
            Tables(5, 10_000, 16), Tables(5, 100_000, 32), Tables(27, 4_000_000, 32)
        ),
        (512, 256, 128), 10
    ),
    "medium": Size(
        (
            shared(20, 100_000, 64, 50), shared(5, 10_000_000, 64, 50),
            shared(1, 100_000_000, 128, 50), Tables(1, 100_000_000, 128), Tables(80, 10, 32),
            Tables(60, 1_000, 32), Tables(80, 100_000, 64), Tables(24, 200_000, 64),
            Tables(40, 10_000_000, 64)
        ),
        (1024, 512, 256, 128), 25, 7
    ),
    "large": Size(
        (
            shared(40, 100_000, 64, 100), shared(16, 15_000_000, 64, 100),
            shared(1, 200_000_000, 128, 100), Tables(1, 200_000_000, 128), Tables(100, 10, 32),
            Tables(100, 10_000, 32), Tables(160, 100_000, 64), Tables(50, 500_000, 64),
            Tables(144, 15_000_000, 64)
        ),
        (2048, 1024, 512, 256), 100, 8
    ),
    "jumbo": Size(
        (
            shared(50, 100_000, 128, 200), shared(24, 20_000_000, 128, 200),
            shared(1, 400_000_000, 256, 200), Tables(1, 400_000_000, 256), Tables(100, 10, 32),
            Tables(200, 10_000, 64), Tables(350, 100_000, 128), Tables(80, 1_000_000, 128),
            Tables(216, 20_000_000, 128)
        ),
        (2048, 1024, 512, 256), 200, 20
    ),
}
NAMES = ["criteo-15", *SIZES]


class Synthetic(nn.Module):
    """Averages neighbours of all vectors, joins the dense features, and applies layers."""

    def __init__(self, size, width):
        super().__init__()
        self.stride, self.width = size.stride, width - width % size.stride
        widths = [size.numbers + self.width // size.stride, *size.hidden]
        layers = [
            layer for a, b in zip(widths, widths[1:]) for layer in (nn.Linear(a, b), nn.ReLU())
        ]
        self.layers = nn.Sequential(*layers, nn.Linear(widths[-1], 1))

    def forward(self, dense, emb):
        """dense `[B, numbers]`, emb `[B, width]` -> logit `[B, 1]`."""
        pooled = emb[:, : self.width].reshape(
            -1, self.width // self.stride, self.stride
        ).mean(dim=2)
        return self.layers(torch.cat([dense, pooled], dim=1))


def tables_of(name):
    """Returns the tables of a size, each as `Tables` of one."""
    if name == "criteo-15":
        return [Tables(1, rows, MLPERF.dim) for rows in CRITEO_15]
    return [
        Tables(1, one.rows, one.dim, one.hotness) for one in SIZES[name].tables
        for _ in range(one.count)
    ]


def scaled(rows, scale):
    """Returns the rows of a table in a model of `scale` times the size. Tables of up to
    1,000 rows keep theirs."""
    return max(int(rows * scale), min(rows, 1_000))


def write_table(path, rows, dim, seed):
    """Writes a table of random rows as a .npy file."""
    random = np.random.default_rng(seed)
    with open(path, "wb") as file:
        header = {"descr": "<f4", "fortran_order": False, "shape": (rows, dim)}
        np.lib.format.write_array_header_1_0(file, header)
        for first in range(0, rows, BLOCK_ROWS):
            block = random.standard_normal((min(BLOCK_ROWS, rows - first), dim), dtype=np.float32)
            file.write((block / np.float32(dim**0.5)).tobytes())


def write_counts(path, rows):
    """Writes how often training used each row: the power law of the keys, with the
    first key used most."""
    ranks = np.arange(1, rows + 1, dtype=np.float64)
    np.save(path, np.maximum(16 * rows * ranks**-POWER / 10, 1).astype(np.uint64))


def power_law(random, rows, count):
    """Returns keys of a power law, as Distributed-Embeddings draws them."""
    end = 1 - POWER
    return (((rows + 1) ** end - 1) * random.random(count) + 1) ** (1 / end) - 1


def samples(tables, numbers, count, seed):
    """Yields requests with keys of a power law."""
    random = np.random.default_rng(seed)
    for _ in range(count):
        bags = {}
        for name, rows, hotness in tables:
            bags[name] = [min(int(key), rows - 1) for key in power_law(random, rows, hotness)]
        yield {
            "dense": [round(float(value), 4) for value in random.random(numbers)], "sparse": bags
        }


def export_network(name, out, width, tables):
    """Writes dense.onnx. Returns the number of dense features."""
    torch.manual_seed(7)
    if name == "criteo-15":
        export_dense(
            dlrm(MLPERF), {"dense": [DENSE], "emb": [tables, MLPERF.dim]}, out / "dense.onnx"
        )
        return DENSE
    size = SIZES[name]
    export_dense(
        Synthetic(size, width), {"dense": [size.numbers], "emb": [width]}, out / "dense.onnx"
    )
    return size.numbers


def write(name, scale, out, requests=10_000, counted_rows_min=100_000):
    """Writes a model into the folder `out`, and `requests.jsonl` beside it."""
    out = Path(out)
    out.mkdir(parents=True, exist_ok=True)
    tables = tables_of(name)
    features = [
        (f"f{n}_{hotness}", n, hotness) for n, one in enumerate(tables) for hotness in one.hotness
    ]
    numbers = export_network(name, out, sum(tables[n].dim for _, n, _ in features), len(features))

    lines = ["format = 1", f"name = {json.dumps(name)}", "sequence = 1"]
    lines += [
        f"dense_features = {json.dumps([f'n{n}' for n in range(numbers)])}", "", "[network]",
        'onnx = "dense.onnx"'
    ]
    lines += [
        'output = "logit"', 'activation = "sigmoid"', "", "[[network.input]]", 'name = "dense"',
        "dense = true", ""
    ]
    lines += [
        "[[network.input]]", 'name = "emb"',
        f"features = {json.dumps([feature for feature, _, _ in features])}"
    ]
    for number, one in enumerate(tables):
        rows, source = scaled(one.rows, scale), f'format = "npy", path = "t{number}.npy"'
        write_table(out / f"t{number}.npy", rows, one.dim, number)
        if rows >= counted_rows_min:
            write_counts(out / f"t{number}.counts.npy", rows)
            source += f', counts = "t{number}.counts.npy"'
        lines += [
            "", "[[table]]", f'name = "t{number}"', f"dim = {one.dim}", 'keys = "index"',
            f"source = {{ {source} }}"
        ]
    for feature, number, hotness in features:
        lines += [
            "", "[[feature]]", f'name = "{feature}"', f'table = "t{number}"', 'pooling = "sum"',
            f"hotness_max = {hotness}"
        ]
    (out / "model.toml").write_text("\n".join(lines) + "\n", encoding="utf-8")

    named = [
        (feature, scaled(tables[number].rows, scale), hotness)
        for feature, number, hotness in features
    ]
    with open(out / "requests.jsonl", "w", encoding="utf-8") as file:
        file.writelines(
            json.dumps(sample) + "\n" for sample in samples(named, numbers, requests, 1)
        )


def change(folder, one_in):
    """Makes the next generation of a written model: changes one row in `one_in` of
    each table, in place."""
    folder = Path(folder)
    for path in sorted(folder.glob("t*.npy")):
        if "counts" not in path.name:
            rows = np.load(path, mmap_mode="r+")
            rows[:: max(one_in, 1)] *= np.float32(0.5)
            rows.flush()
    path = folder / "model.toml"
    text = path.read_text(encoding="utf-8")
    sequence = int(text.split("sequence = ", 1)[1].split("\n", 1)[0])
    path.write_text(
        text.replace(f"sequence = {sequence}\n", f"sequence = {sequence + 1}\n", 1),
        encoding="utf-8"
    )
