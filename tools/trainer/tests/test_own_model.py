"""Exports models that were not written for Hatchback, and scores them with the `hatchback` program.

Run in tools/trainer: `python3 -m unittest discover tests`. Without target/release/hatchback (or
$HATCHBACK) the scores are not compared, and the test says so.
"""

import json
import os
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path
from types import SimpleNamespace

import torch
from torch import nn

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT / "tools/trainer"))

import hatchback_trainer  # noqa: E402

PROGRAM = Path(os.environ.get("HATCHBACK", ROOT / "target/release/hatchback"))
B = 40


class TwoTowers(nn.Module):
    """Named arguments, one key a feature, a dot product of two towers."""

    def __init__(self):
        super().__init__()
        self.user, self.item = nn.Embedding(500, 16), nn.Embedding(900, 16)
        self.left = nn.Sequential(nn.Linear(16 + 3, 16), nn.ReLU(), nn.Linear(16, 8))
        self.right = nn.Linear(16, 8)

    def forward(self, user_id, item_id, age):
        left = self.left(torch.cat([self.user(user_id), age], dim=1))
        return (left * self.right(self.item(item_id))).sum(dim=1)


class WideAndDeep(nn.Module):
    """Bags with offsets, a scalar dense feature, a probability as output."""

    def __init__(self):
        super().__init__()
        self.wide = nn.EmbeddingBag(1000, 1, mode="sum")
        self.deep = nn.EmbeddingBag(1000, 12, mode="mean", include_last_offset=True, padding_idx=0)
        self.mlp = nn.Sequential(nn.Linear(13, 24), nn.GELU(), nn.Linear(24, 1))

    def forward(self, words, offsets, tags, tag_offsets, price):
        deep = self.mlp(torch.cat([self.deep(tags, tag_offsets), price.unsqueeze(1)], dim=1))
        return torch.sigmoid(self.wide(words, offsets) + deep)


class History(nn.Module):
    """A sequence of items, one table for history and candidate, attention between them."""

    def __init__(self):
        super().__init__()
        self.item = nn.Embedding(300, 8)
        self.out = nn.Linear(16, 1)

    def forward(self, batch_items, candidate):
        history, target = self.item(batch_items), self.item(candidate)  # [B, 6, 8], [B, 8]
        weight = torch.softmax((history * target.unsqueeze(1)).sum(dim=2) / 8**0.5, dim=1)
        return self.out(torch.cat([(history * weight.unsqueeze(2)).sum(dim=1), target], dim=1))


class FactorizationMachine(nn.Module):
    """One table for all fields, keys shifted in the model, no dense feature."""

    def __init__(self):
        super().__init__()
        self.register_buffer("shift", torch.tensor([0, 10, 60, 260]))
        self.first, self.second = nn.Embedding(1260, 1), nn.Embedding(1260, 10)
        self.bias = nn.Parameter(torch.zeros(1))

    def forward(self, x):
        keys = x + self.shift
        second = self.second(keys)  # [B, 4, 10]
        pairs = 0.5 * (second.sum(dim=1).square() - second.square().sum(dim=1)).sum(dim=1)
        return self.bias + self.first(keys).sum(dim=1).squeeze(1) + pairs


def words(count):
    ends = torch.cat([torch.zeros(1, dtype=torch.int64), torch.randint(0, 5, (count,)).cumsum(0)])
    return torch.randint(0, 1000, (int(ends[-1]),)), ends


def batches():
    """Returns each model with a sample batch and the options of its export."""
    torch.manual_seed(5)
    wide, tags = words(B), words(B)
    fields = torch.stack([torch.randint(0, n, (B,)) for n in (10, 50, 200, 1000)], dim=1)
    towers = {
        "user_id": torch.randint(0, 500, (B,)), "item_id": torch.randint(0, 900, (B,)),
        "age": torch.randn(B, 3)
    }
    return {
        "two towers": (TwoTowers(), towers, {}),
        "wide and deep": (
            WideAndDeep(), (wide[0], wide[1][:-1], *tags, torch.randn(B)), {"output": "probability"}
        ),
        "history": (History(), (torch.randint(0, 300, (B, 6)), torch.randint(0, 300, (B,))), {}),
        "factorization machine": (FactorizationMachine(), fields, {}),
    }


def evaluate(folder):
    """Packs an exported model as f32 and returns the report of `hatchback eval`
    on its probe set."""
    run = lambda *words: subprocess.run(
        [PROGRAM, *words], check=True, capture_output=True, text=True
    ).stdout
    bundle = folder / "model.hatch"
    run("pack", folder / "model.toml", "--out", bundle, "--codec", "f32")
    return json.loads(run("eval", bundle, "--json", "-"))


class OwnModels(unittest.TestCase):
    def setUp(self):
        torch.set_num_threads(1)
        temporary = tempfile.TemporaryDirectory()
        self.addCleanup(temporary.cleanup)
        self.folder = Path(temporary.name)

    def test_models_that_were_not_written_for_it_score_the_same(self):
        for name, (model, batch, options) in batches().items():
            with self.subTest(name):
                folder = self.folder / name.replace(" ", "-")
                before = {key: value.clone() for key, value in model.state_dict().items()}
                hatchback_trainer.export(
                    model, batch, folder, labels=torch.arange(B) % 2, **options
                )
                self.assertTrue(
                    all((value == before[key]).all() for key, value in model.state_dict().items())
                )
                self.assertFalse(any("forward" in module.__dict__ for module in model.modules()))
                if not PROGRAM.exists():
                    self.skipTest(f"{PROGRAM} is not built; the scores are not compared")
                found = evaluate(folder)
                self.assertEqual((found["samples"], found["rows"]["absent"]), (B, 0))
                self.assertLess(found["score_difference_max"], 2e-6)

    def test_the_largest_of_each_column_is_a_pooling(self):
        torch.manual_seed(6)
        model = nn.Sequential(nn.EmbeddingBag(10, 4, mode="max"), nn.Linear(4, 1))
        schema = hatchback_trainer.export(model, torch.randint(0, 10, (B, 3)), self.folder).schema
        self.assertEqual(schema.features[0].pooling, "max")
        if not PROGRAM.exists():
            self.skipTest(f"{PROGRAM} is not built; the scores are not compared")
        self.assertLess(evaluate(self.folder)["score_difference_max"], 2e-6)

    def test_a_module_that_is_called_twice_makes_two_features_of_one_table(self):
        model, batch, _ = batches()["history"]
        schema = hatchback_trainer.export(model, batch, self.folder).schema
        self.assertEqual(
            [(f.name, f.table, f.pooling) for f in schema.features],
            [("item", "item", "none"), ("item_2", "item", "sum")]
        )
        self.assertEqual([table.rows for table in schema.tables], [300])

    def test_a_collection_of_torchrec_is_found_by_its_interface(self):
        """TorchRec's own classes are tested by tools/trainer/extras; here stand-ins
        of the recorded interface."""

        class Jagged:
            def __init__(self, bags):
                self.bags = bags

            def __getitem__(self, key):
                bags = self.bags[key]
                values = torch.tensor([k for bag in bags for k in bag])
                ends = torch.tensor([0] + [len(bag) for bag in bags]).cumsum(0)
                return SimpleNamespace(values=lambda: values, offsets=lambda: ends)

        class EmbeddingBagCollection(nn.Module):
            def __init__(self):
                super().__init__()
                self.embedding_bags = nn.ModuleDict({"t": nn.EmbeddingBag(50, 4, mode="sum")})

            def embedding_bag_configs(self):
                return [
                    SimpleNamespace(
                        name="t", feature_names=["a", "b"], pooling=SimpleNamespace(name="SUM")
                    )
                ]

            def forward(self, features):
                from hatchback_trainer.own_model import Pooled

                bag = self.embedding_bags["t"]
                return Pooled(
                    {f: bag(features[f].values(), features[f].offsets()[:-1]) for f in "ab"}
                )

        class Model(nn.Module):
            def __init__(self):
                super().__init__()
                self.ebc, self.top = EmbeddingBagCollection(), nn.Linear(10, 1)

            def forward(self, dense, features):
                return self.top(torch.cat([dense, self.ebc(features).values()], dim=1))

        features = Jagged({"a": [[1, 2], [], [3]], "b": [[4], [4, 4], [49]]})
        found = hatchback_trainer.export(Model(), (torch.randn(3, 2), features), self.folder)
        self.assertEqual(
            [(f.name, f.table) for f in found.schema.features], [("a", "ebc.t"), ("b", "ebc.t")]
        )
        if PROGRAM.exists():
            self.assertLess(evaluate(self.folder)["score_difference_max"], 2e-6)

    def test_what_cannot_run_in_the_car_is_refused_by_name(self):
        class Masked(nn.Module):
            def __init__(self):
                super().__init__()
                self.item = nn.Embedding(10, 4)

            def forward(self, items):
                return (self.item(items) * (items > 4).unsqueeze(2)).sum(dim=(1, 2))

        with self.assertRaisesRegex(ValueError, "uses its sparse inputs"):
            hatchback_trainer.export(Masked(), torch.arange(8).reshape(4, 2), self.folder)
        with self.assertRaisesRegex(ValueError, "has no nn.Embedding"):
            hatchback_trainer.export(nn.Linear(3, 1), torch.zeros(2, 3), self.folder)
        self.assertEqual(list(self.folder.iterdir()), [], "nothing was written")


if __name__ == "__main__":
    unittest.main()
