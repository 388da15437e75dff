"""A repository as NVIDIA's DLRM and DCNv2 recipe deploys it, packed and scored: fused,
and with padded tables.

The files are written here as the recipe's `deploy.py` documents them; the recipe itself needs
TensorFlow and a GPU. Run in tools/trainer: `python3 -m unittest discover tests`.
"""

import json
import os
import subprocess
import sys
import tempfile
import unittest
import warnings
from pathlib import Path

import numpy
import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from hatchback_trainer.deployed import describe  # noqa: E402

PROGRAM = Path(
    os.environ.get("HATCHBACK", Path(__file__).resolve().parents[3] / "target/release/hatchback")
)
ROWS, DIM, NUMBERS = [130, 7, 400], 8, 3


class Dense(nn.Module):
    """The recipe's network: flat inputs, table-major vectors, pairs of the lower triangle, rows
    padded to a multiple of 8."""

    def __init__(self):
        super().__init__()
        self.bottom, self.top = nn.Linear(8, DIM), nn.Linear(16, 1)
        pairs = [(i, j) for i in range(len(ROWS) + 1) for j in range(i)]
        self.places = [i * (len(ROWS) + 1) + j for i, j in pairs]

    def forward(self, numbers, vectors):
        numbers = nn.functional.pad(numbers.reshape(-1, NUMBERS), (0, 8 - NUMBERS))
        bottom = torch.relu(self.bottom(numbers))
        vectors = vectors.reshape(len(ROWS), -1, DIM).permute(1, 0, 2).reshape(-1, len(ROWS), DIM)
        vectors = torch.cat([bottom.unsqueeze(1), vectors], dim=1)
        products = torch.bmm(vectors, vectors.transpose(1, 2)).reshape(-1, (len(ROWS) + 1) ** 2)
        x = torch.cat([products[:, self.places], bottom], dim=1)
        return self.top(nn.functional.pad(x, (0, 16 - x.shape[1])))


def write_folder(folder, table, first=0):
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "key", "ab") as keys, open(folder / "emb_vector", "ab") as vectors:
        keys.write(numpy.arange(first, first + len(table), dtype="<i8").tobytes())
        vectors.write(table.astype("<f4").tobytes())


def deploy(folder, fused):
    """Writes a checkpoint's configuration and a repository. Returns the tables and the network."""
    generator = numpy.random.default_rng(7)
    tables = [generator.standard_normal((rows, DIM), dtype=numpy.float32) for rows in ROWS]
    sparse = folder / "deployed" / "sparse" / "1"
    for number, table in enumerate(tables):
        padding = numpy.zeros((max(0, 100 - len(table)), DIM), numpy.float32)
        if fused:
            write_folder(sparse / "0", table, sum(ROWS[:number]))
        else:
            write_folder(sparse / str(number), numpy.vstack([table, padding]))
    for part, config in {
        "sparse": {"categorical_cardinalities": ROWS, "embedding_dim": [DIM] * len(ROWS)},
        "dense": {"num_numerical_features": NUMBERS, "interaction": "dot_tensorflow"},
    }.items():
        (folder / "checkpoint" / part).mkdir(parents=True)
        (folder / "checkpoint" / part / "config.json").write_text(json.dumps(config))

    torch.manual_seed(5)
    network = Dense().eval()
    path = folder / "deployed" / "dense" / "1" / "model.onnx"
    path.parent.mkdir(parents=True)
    flat = torch.zeros(2 * NUMBERS), torch.zeros(2 * len(ROWS) * DIM)
    axes = {"args_0": {0: "n"}, "args_1": {0: "m"}, "output_1": {0: "batch"}}
    names = {
        "input_names": ["args_0", "args_1"], "output_names": ["output_1"], "dynamic_axes": axes
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(network, flat, str(path), opset_version=13, **names)
    return tables, network


class Deployed(unittest.TestCase):
    def test_a_repository_scores_as_the_recipe_does(self):
        if not PROGRAM.exists():
            reason = f"a deployed repository is not packed: {PROGRAM} is not built"
            print(f"SKIPPED: {reason}")
            self.skipTest(reason)
        for fused in (True, False):
            with self.subTest(fused=fused), tempfile.TemporaryDirectory() as folder:
                self.check(Path(folder), fused)

    def check(self, folder, fused):
        tables, network = deploy(folder, fused)
        describe(folder / "checkpoint", folder / "deployed", folder / "dlrm")
        generator = numpy.random.default_rng(3)
        keys = numpy.stack([generator.integers(0, rows, 20) for rows in ROWS], axis=1)
        numbers = generator.standard_normal((20, NUMBERS)).astype(numpy.float32)
        lines = [
            json.dumps(
                {
                    "dense": dense.tolist(),
                    "sparse": {f"cat_{t}": [int(key)] for t, key in enumerate(row)}
                }
            )
            for dense, row in zip(numbers, keys)
        ]
        run = lambda *words, **more: subprocess.run(
            [PROGRAM, *words], check=True, capture_output=True, text=True, **more
        ).stdout
        run("pack", folder / "dlrm" / "model.toml", "--out", folder / "m.hatch", "--codec", "f32")
        answers = [
            json.loads(line)
            for line in run("run", folder / "m.hatch", input="\n".join(lines) + "\n").splitlines()
        ]

        vectors = numpy.stack([table[keys[:, t]] for t, table in enumerate(tables)])  # table-major
        with torch.no_grad():
            logits = network(torch.from_numpy(numbers.ravel()), torch.from_numpy(vectors.ravel()))
        expected = torch.sigmoid(logits).squeeze(1)
        torch.testing.assert_close(
            torch.tensor([answer["score"][0] for answer in answers]), expected, atol=1e-5, rtol=0
        )
        self.assertTrue(all(answer["status"]["fresh"] == len(ROWS) for answer in answers))
        told = json.loads(run("inspect", folder / "m.hatch", "--json", "-"))
        self.assertEqual([table["rows"] for table in told["tables"]], ROWS)

    def test_what_does_not_fit_the_checkpoint_is_refused(self):
        with tempfile.TemporaryDirectory() as folder:
            folder = Path(folder)
            deploy(folder, fused=True)
            config = folder / "checkpoint" / "sparse" / "config.json"
            config.write_text(
                json.dumps({"categorical_cardinalities": [130, 7, 401], "embedding_dim": [DIM] * 3})
            )
            with self.assertRaisesRegex(ValueError, "537 keys, but the checkpoint has 538 rows"):
                describe(folder / "checkpoint", folder / "deployed", folder / "dlrm")
            (folder / "deployed" / "dense" / "1" / "model.onnx").rename(folder / "model.plan")
            with self.assertRaisesRegex(ValueError, "deploy with --dense-format onnx"):
                describe(folder / "checkpoint", folder / "deployed", folder / "dlrm")


if __name__ == "__main__":
    unittest.main()
