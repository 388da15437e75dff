"""Checks what the exporter writes: the same bytes each time, the safetensors
layout, model.toml, sample lines.

Standard library and torch only; whether the runtime gives the same scores is checked on the Rust
side. Run in tools/trainer: `python3 -m unittest discover tests`.
"""

import ctypes
import hashlib
import json
import os
import struct
import subprocess
import sys
import tempfile
import tomllib
import unittest
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from hatchback_trainer import safetensors  # noqa: E402
from hatchback_trainer.embeddings import Embeddings, default_row, pool  # noqa: E402
from hatchback_trainer.experiments import families  # noqa: E402
from hatchback_trainer.experiments.metrics import auc, logloss  # noqa: E402
from hatchback_trainer.model_files import export_model  # noqa: E402
from hatchback_trainer.models import DotInteraction  # noqa: E402
from hatchback_trainer.samples import Sample, shortest  # noqa: E402
from hatchback_trainer.schema import Feature, Input, Schema, Table  # noqa: E402

ROOT = Path(__file__).resolve().parents[3]
PROGRAM = Path(os.environ.get("HATCHBACK", ROOT / "target/release/hatchback"))
SIZES = {"F32": 4, "I64": 8}


def digests(folder):
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*.*"))
    }


def lines(folder):
    return [json.loads(line) for line in (folder / "probe.jsonl").read_text().splitlines()]


class Package(unittest.TestCase):
    def test_the_library_never_imports_an_experiment(self):
        for path in sorted((ROOT / "tools/trainer/hatchback_trainer").glob("*.py")):
            if path.name != "__main__.py":  # the command line runs the experiments
                self.assertNotIn("experiments", path.read_text(encoding="utf-8"), path.name)


class Exported(unittest.TestCase):
    """The nine families, written once to a temporary folder."""

    @classmethod
    def setUpClass(cls):
        torch.set_num_threads(1)
        cls.temporary = tempfile.TemporaryDirectory()
        cls.out = Path(cls.temporary.name)
        families.export_all(cls.out)
        cls.folders = [cls.out / family for family in families.FAMILIES]

    @classmethod
    def tearDownClass(cls):
        cls.temporary.cleanup()

    def models(self):
        for folder in self.folders:
            yield folder, tomllib.loads((folder / "model.toml").read_text())

    def test_export_is_deterministic(self):
        with tempfile.TemporaryDirectory() as again:
            families.export_all(again)
            self.assertEqual(digests(self.out), digests(Path(again)))
        self.assertEqual(len(digests(self.out)), 4 * len(self.folders))

    def test_tensors_are_contiguous_aligned_and_fill_the_file(self):
        for folder, _ in self.models():
            header, data = safetensors.read_parts(folder / "tables.safetensors")
            at = 0
            for tensor in header.values():
                begin, end = tensor["data_offsets"]
                size = SIZES[tensor["dtype"]]
                self.assertEqual((begin, begin % size), (at, 0))
                self.assertEqual(end - begin, size * torch.Size(tensor["shape"]).numel())
                at = end
            self.assertEqual(at, len(data))

    def test_toml_names_tensors_that_exist(self):
        for folder, model in self.models():
            header, _ = safetensors.read_parts(folder / "tables.safetensors")
            for table in model["table"]:
                source = table["source"]
                rows, dim = header[source["tensor"]]["shape"]
                self.assertEqual(dim, table["dim"])
                self.assertEqual("keys" in source, table["keys"] == "sparse")
                for name in ("keys", "counts"):
                    if name in source:
                        self.assertEqual(
                            header[source[name]],
                            header[source[name]] | {"dtype": "I64", "shape": [rows]}
                        )

    def test_every_vector_feeds_one_input(self):
        for _, model in self.models():
            fed = [name for one in model["network"]["input"] for name in one.get("features", [])]
            vectors, used = [], set()
            for name, table in ((f["name"], f["table"]) for f in model["feature"]):
                several = isinstance(table, list)
                vectors += [f"{name}@{one}" for one in table] if several else [name]
                used.update(table if several else [table])
            self.assertEqual(sorted(fed), sorted(vectors))
            self.assertLessEqual(used, {t["name"] for t in model["table"]})

    def test_samples_fit_the_schema(self):
        for folder, model in self.models():
            hotness = {feature["name"]: feature["hotness_max"] for feature in model["feature"]}
            for sample in lines(folder):
                self.assertEqual(len(sample["dense"]), len(model["dense_features"]))
                for name, bag in sample["sparse"].items():
                    self.assertLessEqual(len(bag), hotness[name])
                scores = (
                    sample["score"] if isinstance(sample["score"], dict)
                    else {"logit": sample["score"]}
                )
                output = model["network"]["output"]
                names = [one["name"] for one in output] if isinstance(output, list) else [output]
                self.assertEqual(list(scores), names)
                self.assertTrue(all(0 < score < 1 for score in scores.values()))

    def test_samples_have_the_hard_cases(self):
        for folder, model in self.models():
            samples = lines(folder)
            bags = [bag for sample in samples for bag in sample["sparse"].values()]
            self.assertEqual(
                samples[0]["score"], samples[1]["score"], "missing and empty bags must be the same"
            )
            self.assertTrue(any(len(set(bag)) < len(bag) for bag in bags), "a key twice in a bag")
            self.assertTrue(any(value < 0 for sample in samples for value in sample["dense"]))
            if any(table["keys"] == "sparse" for table in model["table"]):
                self.assertTrue(
                    any(key >= 1 << 63 for bag in bags for key in bag), "a key above i64"
                )


class WideDeepLike(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.out = torch.nn.Linear(width, 1)

    def forward(self, dense, emb):
        return self.out(torch.cat([dense, emb], dim=1))


class Parts(unittest.TestCase):
    def test_safetensors_bytes(self):
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "t.safetensors"
            safetensors.write(
                path, {"row": torch.tensor([[0.5, -2.0]]), "row.keys": torch.tensor([-1])}
            )
            raw = path.read_bytes()
        (length,) = struct.unpack("<Q", raw[:8])
        self.assertEqual(length % 8, 0)
        self.assertEqual(list(json.loads(raw[8 : 8 + length])), ["row.keys", "row"])
        self.assertEqual(struct.unpack("<Qff", raw[8 + length :]), ((1 << 64) - 1, 0.5, -2.0))

    def test_pooling(self):
        weight = torch.tensor([[1.0, 2.0], [3.0, 6.0]])
        # An empty bag, then [1, 0, 0].
        rows, offsets = torch.tensor([1, 0, 0]), torch.tensor([0, 0, 3])
        expected = {
            "sum": [5.0, 10.0], "mean": [5 / 3, 10 / 3],
            "none": [3.0, 6.0, 1.0, 2.0, 1.0, 2.0, 0.0, 0.0]
        }
        expected |= {"sqrtn": [5 / 3**0.5, 10 / 3**0.5], "max": [3.0, 6.0]}
        for pooling, values in expected.items():
            out = pool(weight, rows, offsets, Feature("f", "t", pooling, 4))
            torch.testing.assert_close(out, torch.tensor([[0.0] * len(values), values]))
        weighted = pool(
            weight, rows, offsets, Feature("f", "t", "sum", 4, True), torch.tensor([2.0, -1.0, 0.5])
        )
        torch.testing.assert_close(weighted, torch.tensor([[0.0, 0.0], [5.5, 11.0]]))
        for pooling, divisor in [("mean", 1.5), ("sqrtn", 5.25**0.5)]:
            divided = pool(
                weight, rows, offsets, Feature("f", "t", pooling, 4, True),
                torch.tensor([2.0, -1.0, 0.5])
            )
            torch.testing.assert_close(divided, torch.tensor([[0.0, 0.0], [5.5, 11.0]]) / divisor)
            none = pool(weight, rows, offsets, Feature("f", "t", pooling, 4, True), torch.zeros(3))
            torch.testing.assert_close(none, torch.zeros(2, 2))

    def test_a_table_may_have_any_name(self):
        """Names of methods, of tensors of other tables, of the format's own
        fields, and beyond ASCII."""
        names = [
            "items", "keys", "values", "training", "x", "x.keys", "x.keys_", "x.counts",
            "__metadata__", "a.b", "größe", "🚗"
        ]
        tables = tuple(
            Table(name, 3, 2, keys=(5, 6, 7), codec="f32", counted=True) for name in names
        )
        features = tuple(Feature(f"of {name}", name) for name in names)
        schema = Schema(
            "names", ("speed",), (Input("dense"), Input("emb", tuple(f.name for f in features))),
            tables, features
        )
        embeddings = Embeddings(schema, std=1.0)
        self.assertEqual(list(embeddings.weights), names)
        self.assertEqual(len(list(embeddings.parameters())), len(names))
        samples = [Sample([0.5], {f.name: [6] for f in features}, score=0.5) for _ in range(2)]
        network = WideDeepLike(1 + 2 * len(names))
        with tempfile.TemporaryDirectory() as folder:
            folder = Path(folder)
            export_model(
                embeddings, network, samples, folder,
                {name: torch.ones(3, dtype=torch.int64) for name in names}
            )
            model = tomllib.loads((folder / "model.toml").read_text(encoding="utf-8"))
            header, _ = safetensors.read_parts(folder / "tables.safetensors")
            sources = [table["source"] for table in model["table"]]
            tensors = [
                source[column] for source in sources for column in ("tensor", "keys", "counts")
            ]
            self.assertEqual(len(set(tensors)), 3 * len(names))
            self.assertEqual(sorted(tensors), sorted(header))
            if PROGRAM.exists():
                subprocess.run(
                    [
                        PROGRAM, "pack", folder / "model.toml", "--out", folder / "m",
                        "--probe-difference-max", "1"
                    ],
                    check=True
                )

    def test_default_row(self):
        weight = torch.tensor([[1.0, 2.0], [3.0, 6.0]])
        for default, row in (("zeros", [0.0, 0.0]), ("mean", [2.0, 4.0]), ((7.0, 8.0), [7.0, 8.0])):
            self.assertEqual(default_row(Table("t", 2, 2, default=default), weight).tolist(), [row])

    def test_interaction_is_the_lower_triangle(self):
        x = torch.tensor([[[1.0, 0.0], [2.0, 1.0], [3.0, 5.0]]])
        self.assertEqual(DotInteraction(3)(x).tolist(), [[2.0, 3.0, 11.0]])  # (1,0) (2,0) (2,1)

    def test_shortest_reads_back_as_the_same_float32(self):
        for value in (0.1, 1 / 3, 0.4375123, 1e-30):
            self.assertEqual(ctypes.c_float(shortest(value)).value, ctypes.c_float(value).value)
        self.assertEqual(repr(shortest(ctypes.c_float(0.1).value)), "0.1")

    def test_metrics(self):
        # One pair of four is a tie.
        self.assertEqual(auc([0, 1, 0, 1], [0.1, 0.4, 0.4, 0.8]), 0.875)
        self.assertAlmostEqual(logloss([0, 1], [0.5, 0.5]), 0.6931471805599453)


if __name__ == "__main__":
    unittest.main()
