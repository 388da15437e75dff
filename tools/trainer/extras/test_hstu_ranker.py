"""The ranker in the form of MLPerf's DLRMv3: it learns, and a car scores it as PyTorch does, after
an install and after a delta."""

import json
import os
import shutil
import sys
import tempfile
import unittest
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))

import hstu_ranker  # noqa: E402
from hatchback_trainer.deploy import run  # noqa: E402
from hatchback_trainer.exporter import lines_of  # noqa: E402

HAS_PROGRAM = shutil.which(os.environ.get("HATCHBACK", "hatchback")) is not None
if not HAS_PROGRAM:
    print("SKIPPED: the ranker in a car: set HATCHBACK to the path of `hatchback`")


@unittest.skipUnless(HAS_PROGRAM, "no `hatchback`")
class Ranker(unittest.TestCase):
    def scores_agree(self, model, exported, flash, folder):
        """Compares the car's scores with PyTorch's on 64 new samples."""
        features, _ = hstu_ranker.batch_of(7, samples=64)
        lines_of(exported.exporter, features, folder / "samples.jsonl")
        answers = run("run", flash, "--samples", folder / "samples.jsonl").splitlines()
        found = torch.tensor([list(json.loads(one)["score"].values()) for one in answers])
        with torch.no_grad():
            logits = model(features)
        want = torch.sigmoid(torch.stack([logits["watch"], logits["like"]], dim=1))
        # The trained network is kept in f16 and int8 where its probe set allows it.
        self.assertLess((found - want).abs().max().item(), 0.02)

    def test_it_learns_and_follows_training_by_a_delta(self):
        torch.manual_seed(5)
        model = hstu_ranker.Ranker(layers=2)
        start = hstu_ranker.train(model, 1)
        self.assertLess(hstu_ranker.train(model, 60, first=1), start)
        with tempfile.TemporaryDirectory() as folder:
            folder = Path(folder)
            flash = folder / "flash"
            first = hstu_ranker.export(model, folder / "1")
            first.pack(codec="f32")
            run("install", first.bundle, "--flash", flash)
            self.scores_agree(model, first, flash, folder)

            hstu_ranker.train(model, 5, first=61)
            second = hstu_ranker.export(model, folder / "2", sequence=2)
            second.pack(parent=flash, codec="f32")
            run("install", second.bundle, "--flash", flash)
            self.scores_agree(model, second, flash, folder)


if __name__ == "__main__":
    unittest.main()
