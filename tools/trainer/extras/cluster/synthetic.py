"""A model for tests and measurements of the cluster: tables of random rows, as .npy files, and
the demo's network shape."""

import json
from pathlib import Path

import numpy as np

DEMO = Path(__file__).parents[3] / "demo" / "criteo"
TABLES, DIM = 26, 32  # those of the demo's dense network


def write(folder, rows, codec="u8", seed=0):
    """Writes a model whose table `n` has `rows(n)` rows. Every third table has
    scattered keys and counts."""
    folder = Path(folder)
    folder.mkdir(parents=True)
    (folder / "dense.onnx").write_bytes((DEMO / "dense.onnx").read_bytes())
    names = [f"cat_{number}" for number in range(TABLES)]
    lines = ['format = 1', 'name = "synthetic"', 'sequence = 1']
    lines += [
        f"dense_features = {json.dumps([f'int_{n}' for n in range(13)])}", "", "[network]",
        'onnx = "dense.onnx"'
    ]
    lines += [
        'output = "logit"', 'activation = "sigmoid"', "", "[[network.input]]", 'name = "dense"',
        "dense = true", ""
    ]
    lines += ["[[network.input]]", 'name = "emb"', f"features = {json.dumps(names)}"]
    random = np.random.default_rng(seed)
    for number, name in enumerate(names):
        sparse, count = number % 3 == 2, rows(number)
        values = random.standard_normal((count, DIM), dtype=np.float32)
        np.save(folder / f"{name}.npy", values)
        source = f'format = "npy", path = "{name}.npy"'
        if sparse:
            keys = scattered(count, number)
            np.save(folder / f"{name}.keys.npy", keys)
            np.save(folder / f"{name}.counts.npy", random.integers(0, 1000, count, dtype=np.uint64))
            source += f', keys = "{name}.keys.npy", counts = "{name}.counts.npy"'
        lines += [
            "", "[[table]]", f'name = "{name}"', f"dim = {DIM}",
            f'keys = "{"sparse" if sparse else "index"}"'
        ]
        lines += [f'codec = "{codec}"', f"source = {{ {source} }}"]
    for name in names:
        lines += [
            "", "[[feature]]", f'name = "{name}"', f'table = "{name}"', 'pooling = "sum"',
            "hotness_max = 3"
        ]
    (folder / "model.toml").write_text("\n".join(lines) + "\n", encoding="utf-8")


def scattered(count, number):
    """Returns distinct keys all over the u64 numbers: multiplication by an odd
    number is a bijection."""
    return (
        (np.arange(count, dtype=np.uint64) + np.uint64(number << 32))
        * np.uint64(0x9E3779B97F4A7C15)
    )
