"""Writes the model.toml of a repository that NVIDIA's DLRM and DCNv2 recipe
(Distributed-Embeddings) deployed.

The repository has the tables in HPS's layout and the dense network as ONNX; the checkpoint has the
numbers of rows. All files stay where they are, and no row is read.
"""

import json
import os
from pathlib import Path

# As the recipe's converter names them.
DENSE_INPUT, VECTORS_INPUT, OUTPUT = "args_0", "args_1", "output_1"
PADDED_ROWS = 100  # a table with fewer rows is padded to as many


def read_json(path):
    with open(path, encoding="utf-8") as file:
        return json.load(file)


def field(config, name, path):
    if name not in config:
        raise ValueError(f"{path}: {name} is missing")
    return config[name]


def key_ranges(folder, rows):
    """Returns the folder and the first key of each table: all in one folder, or each in
    one of its own."""
    fused = not (folder / "1").exists() and len(rows) > 1
    stored = [sum(rows)] if fused else [max(count, PADDED_ROWS) for count in rows]
    for number, expected in enumerate(stored):
        path = folder / str(number) / "key"
        found = path.stat().st_size // 8
        # A fused folder is never padded, and a table of its own may come from another version
        # that does not pad.
        if found != expected and (fused or found != rows[number]):
            raise ValueError(
                f"{path}: {found} keys, but the checkpoint has {stored[number]} rows; "
                "is it another one's?"
            )
    if fused:
        return [(folder / "0", sum(rows[:number])) for number in range(len(rows))]
    return [(folder / str(number), 0) for number in range(len(rows))]


def describe(checkpoint, repository, out, name="dlrm"):
    """Writes `out`/model.toml."""
    out = Path(out)
    sparse_path, dense_path = (
        Path(checkpoint) / part / "config.json" for part in ("sparse", "dense")
    )
    sparse, dense = read_json(sparse_path), read_json(dense_path)
    rows, dims = (
        field(sparse, one, sparse_path) for one in ("categorical_cardinalities", "embedding_dim")
    )
    numbers = field(dense, "num_numerical_features", dense_path)
    if len(rows) != len(dims) or len(set(dims)) != 1 or numbers == 0:
        raise ValueError(
            f"{sparse_path}: tables of one dim and dense features are supported, "
            f"not {dims} and {numbers}"
        )

    network = Path(repository) / "dense" / "1" / "model.onnx"
    if not network.exists():
        raise ValueError(
            f"{network}: is missing; deploy with --dense-format onnx and --model-precision fp32"
        )
    places = key_ranges(Path(repository) / "sparse" / "1", rows)

    out.mkdir(parents=True, exist_ok=True)
    quoted = lambda path: json.dumps(os.path.relpath(path, out))
    features = [f"cat_{number}" for number in range(len(rows))]
    lines = ["format = 1", f"name = {json.dumps(name)}", "sequence = 1"]
    lines += [
        f"dense_features = {json.dumps([f'num_{number}' for number in range(numbers)])}", "",
        "[network]"
    ]
    lines += [
        f"onnx = {quoted(network)}", "table_major = true", f'output = "{OUTPUT}"',
        'activation = "sigmoid"', ""
    ]
    lines += [
        "[[network.input]]", f'name = "{DENSE_INPUT}"', "dense = true", "", "[[network.input]]"
    ]
    lines += [f'name = "{VECTORS_INPUT}"', f"features = {json.dumps(features)}"]
    for feature, count, (folder, first) in zip(features, rows, places):
        source = (
            f'{{ format = "deployed", path = {quoted(folder)}, first = {first}, rows = {count} }}'
        )
        lines += [
            "", "[[table]]", f'name = "{feature}"', f"dim = {dims[0]}", 'keys = "index"',
            f"source = {source}"
        ]
    for feature in features:
        lines += [
            "", "[[feature]]", f'name = "{feature}"', f'table = "{feature}"', 'pooling = "sum"',
            "hotness_max = 1"
        ]
    (out / "model.toml").write_text("\n".join(lines) + "\n", encoding="utf-8")
    print(f"{name}: written to {out}")
