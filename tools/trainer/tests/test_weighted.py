"""Weights with sum, mean and sqrtn pooling: the packed model scores as PyTorch does, cached and
not, in any batch.

Run in tools/trainer: `python3 -m unittest discover tests`.
"""

import json
import os
import random
import subprocess
import sys
import tempfile
import unittest
import warnings
from pathlib import Path

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from hatchback_trainer.embeddings import Embeddings, scores  # noqa: E402
from hatchback_trainer.model_files import export_model  # noqa: E402
from hatchback_trainer.samples import Sample, to_line  # noqa: E402
from hatchback_trainer.schema import Feature, Input, Schema, Table  # noqa: E402

PROGRAM = Path(
    os.environ.get("HATCHBACK", Path(__file__).resolve().parents[3] / "target/release/hatchback")
)
POOLINGS = ("sum", "mean", "sqrtn")


class Network(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.layer = nn.Linear(1 + width, 1)

    def forward(self, dense, emb):
        return self.layer(torch.cat([dense, emb], dim=1))


def sample(rng):
    """Bags of no, one and several keys; weights below zero, and one bag in eight whose
    weights are all zero."""
    bags = {pooling: [rng.randrange(60) for _ in range(rng.randrange(5))] for pooling in POOLINGS}
    weigh = lambda: 0.0 if rng.random() < 0.1 else rng.choice([0.25, 0.5, 1.5, 3.0])
    weights = {name: [weigh() for _ in bag] for name, bag in bags.items()}
    if rng.random() < 0.125:
        weights = {name: [0.0] * len(bag) for name, bag in bags.items()}
    return Sample([rng.random()], bags, 0, None, weights)


class Weighted(unittest.TestCase):
    def test_a_packed_model_scores_weighted_bags_as_torch_does(self):
        if not PROGRAM.exists():
            reason = f"weighted bags are not scored: {PROGRAM} is not built"
            print(f"SKIPPED: {reason}")
            self.skipTest(reason)
        torch.manual_seed(3)
        rng = random.Random(4)
        tables = (Table("t", 50, 7, codec="f32", placement="cached", default=(0.5,) * 7),)
        features = tuple(Feature(pooling, "t", pooling, 4, weighted=True) for pooling in POOLINGS)
        schema = Schema(
            "weighted", ("x",), (Input("dense"), Input("emb", POOLINGS)), tables, features
        )
        embeddings, network = Embeddings(schema, 1.0), Network(3 * 7).eval()
        samples = [sample(rng) for _ in range(64)]
        for one, score in zip(samples, scores(embeddings, network, samples)):
            one.score = score
        with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            folder = Path(folder)
            export_model(embeddings, network, samples, folder / "model")
            run = lambda *words, **more: subprocess.run(
                [PROGRAM, *words], check=True, capture_output=True, text=True, **more
            ).stdout
            run("pack", folder / "model" / "model.toml", "--out", folder / "m.hatch")
            for batch in ("1", "8"):
                lines = "".join(map(to_line, samples))
                answers = run("run", folder / "m.hatch", "--batch", batch, input=lines).splitlines()
                found = torch.tensor([json.loads(line)["score"][0] for line in answers])
                torch.testing.assert_close(
                    found, torch.tensor([one.score for one in samples]), atol=1e-5, rtol=0
                )


if __name__ == "__main__":
    unittest.main()
