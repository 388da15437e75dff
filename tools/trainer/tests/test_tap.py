"""Checks the tap of plain PyTorch models: every changed row is in a window, whatever the optimizer.

Run in tools/trainer: `python3 -m unittest discover tests`.
"""

import shutil
import sys
import tempfile
import unittest
import warnings
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import numpy as np
import torch
from torch import nn
from torch.nn import functional

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT / "tools/trainer"))

from hatchback_trainer import window  # noqa: E402
from hatchback_trainer.tap import RowSums, Tap, onnx_bytes  # noqa: E402


class Model(nn.Module):
    def __init__(self, sparse):
        super().__init__()
        self.user = nn.Embedding(400, 4, sparse=sparse)
        self.item = nn.EmbeddingBag(300, 8, mode="sum", sparse=sparse)
        self.top = nn.Linear(12, 1)

    def forward(self, user, items):
        return self.top(torch.cat([self.user(user), self.item(items)], dim=1))


def train(model, optimizers, steps, seed):
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        user = torch.randint(0, 60, (16,), generator=generator)
        items = torch.randint(100, 160, (16, 3), generator=generator)
        loss = (
            model(user, items).squeeze(1) - torch.randn(16, generator=generator)
        ).square().mean()
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()


# Name -> (sparse gradients, optimizers of a model, tables that the tap must compare whole).
OPTIMIZERS = {
    "sgd dense": (False, lambda m: [torch.optim.SGD(m.parameters(), lr=0.1)], 0),
    "sgd sparse": (True, lambda m: [torch.optim.SGD(m.parameters(), lr=0.1)], 0),
    "adagrad dense": (False, lambda m: [torch.optim.Adagrad(m.parameters(), lr=0.1)], 0),
    "adagrad sparse": (True, lambda m: [torch.optim.Adagrad(m.parameters(), lr=0.1)], 0),
    "sparse adam": (
        True,
        lambda m: [
            torch.optim.SparseAdam([m.user.weight, m.item.weight]),
            torch.optim.Adam(m.top.parameters())
        ],
        0
    ),
    "adam dense": (False, lambda m: [torch.optim.Adam(m.parameters(), lr=0.01)], 2),
    "momentum": (False, lambda m: [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9)], 2),
    "weight decay": (
        False, lambda m: [torch.optim.Adagrad(m.parameters(), lr=0.1, weight_decay=0.01)], 2
    ),
}


class Drifting(torch.optim.SGD):
    """An optimizer with the name of a harmless one that moves every row."""

    def step(self):
        super().step()
        with torch.no_grad():
            for group in self.param_groups:
                for parameter in group["params"]:
                    parameter.mul_(0.999)


Drifting.__name__ = "SGD"


class Taps(unittest.TestCase):
    def setUp(self):
        torch.manual_seed(3)
        torch.set_num_threads(1)
        temporary = tempfile.TemporaryDirectory()
        self.addCleanup(temporary.cleanup)
        self.folder = Path(temporary.name)

    def follow(self, sparse, make, windows=4):
        """Trains with a tap and applies its windows to a copy of the tables. Returns warnings
        and rows a window."""
        model = Model(sparse)
        optimizers = make(model)
        fleet = {
            "user": model.user.weight.detach().clone(), "item": model.item.weight.detach().clone()
        }
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            tap = Tap(model, self.folder, "m", optimizers)
            sizes = []
            for number in range(windows):
                train(model, optimizers, 5, number)
                found = window.read(tap.close(step=5 * (number + 1)))
                for name, changes in found.tables.items():
                    fleet[name][
                        torch.from_numpy(changes.keys.view("int64"))
                    ] = torch.from_numpy(changes.rows)
                sizes.append(sum(len(one.keys) for one in found.tables.values()))
        torch.testing.assert_close(fleet["user"], model.user.weight.detach(), rtol=0, atol=0)
        torch.testing.assert_close(fleet["item"], model.item.weight.detach(), rtol=0, atol=0)
        return [str(one.message) for one in said if "table `" in str(one.message)], sizes

    def test_no_changed_row_is_missed_with_any_optimizer(self):
        for name, (sparse, make, whole) in OPTIMIZERS.items():
            with self.subTest(name), tempfile.TemporaryDirectory() as folder:
                self.folder = Path(folder)
                said, sizes = self.follow(sparse, make)
                self.assertEqual(len(said), whole, said)
                if not whole:
                    self.assertLess(max(sizes), 125, "only touched rows")

    def test_an_optimizer_that_changes_all_rows_unannounced_is_detected_and_said(self):
        said, sizes = self.follow(False, lambda m: [Drifting(m.parameters(), lr=0.1)])
        self.assertEqual(len(said), 2)
        self.assertRegex(said[0], "the optimizer changed [0-9]+ of 400 rows that no sample touched")
        self.assertEqual(sizes, [700] * 4)

    def test_traffic_counts_lookups_of_training_only(self):
        model = Model(False)
        tap = Tap(model, self.folder, "m", torch.optim.SGD(model.parameters(), lr=0.1))
        items = torch.tensor([[5, 5, 6]])
        model(torch.tensor([7]), items)
        model.eval()
        model(torch.tensor([8]), items)
        found = window.read(tap.close(step=1)).tables
        self.assertEqual(
            (found["user"].keys.tolist(), found["user"].traffic.tolist()), ([7], [1.0])
        )
        self.assertEqual(
            (found["item"].keys.tolist(), found["item"].traffic.tolist()), ([5, 6], [2.0, 1.0])
        )

    def test_keys_grown_tables_and_deletes(self):
        model = Model(False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        keys = torch.arange(400) * 7 - 5
        tap = Tap(model, self.folder, "m", optimizer, keys={"user": keys})
        train(model, [optimizer], 1, 0)
        tap.delete("user", [keys[0], 99])
        wider = torch.cat([model.item.weight.detach(), torch.ones(3, 8)])
        model.item.weight = nn.Parameter(wider)
        found = window.read(tap.close(step=1)).tables
        self.assertEqual(sorted(found["user"].deleted.view("int64").tolist()), [-5, 99])
        self.assertTrue(set(found["user"].keys.view("int64").tolist()) <= set(keys[1:60].tolist()))
        self.assertEqual(found["item"].keys.tolist()[-3:], [300, 301, 302])

    def test_keys_of_64_bits_are_deleted_and_no_others(self):
        table = nn.Embedding(4, 2)
        model = nn.ModuleDict({"user": table})
        keys = np.array([(1 << 63) + 5, (1 << 53) + 1, 1 << 31, 7], np.uint64)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        tap = Tap(model, self.folder, "m", optimizer, keys={"user": keys})
        table(torch.arange(4))
        # The second call names two of them again, one by its other sign.
        tap.delete("user", [(1 << 63) + 5, -2, 1 << 31])
        tap.delete("user", [(1 << 64) - 2, 1 << 31])
        found = window.read(tap.close(step=1)).tables["user"]
        self.assertEqual(sorted(found.keys.tolist()), [7, (1 << 53) + 1])
        self.assertEqual(
            sorted(found.deleted.tolist()), [1 << 31, (1 << 63) + 5, (1 << 64) - 2]
        )

    def test_rows_of_16_bits_are_read_and_each_change_is_seen(self):
        for dtype in (torch.float16, torch.bfloat16):
            with self.subTest(dtype), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                table = nn.Embedding(40, 5, dtype=dtype)
                model = nn.ModuleDict({"user": table})
                folder = self.folder / str(dtype)
                tap = Tap(model, folder, "m", torch.optim.Adam(model.parameters()))
                with torch.no_grad():
                    table.weight[[3, 17], 4] += 1
                found = window.read(tap.close(step=1)).tables["user"]
                self.assertEqual(found.keys.tolist(), [3, 17])
                rows = table.weight.detach()[[3, 17]].float()
                self.assertEqual(found.rows.tolist(), rows.tolist())

    def test_a_window_that_is_not_written_loses_no_change(self):
        for name, (sparse, make, _) in OPTIMIZERS.items():
            with self.subTest(name), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                model = Model(sparse)
                optimizers = make(model)
                tap = Tap(model, self.folder / name, "m", optimizers)
                train(model, optimizers, 1, 0)
                tap.delete("user", [399])
                row = int(torch.nonzero(tap.tables[0].counts)[0])
                good = model.user.weight.detach()[row].clone()
                with torch.no_grad():
                    model.user.weight[row] = torch.nan
                with self.assertRaisesRegex(ValueError, "not finite"):
                    tap.close(step=1)
                with torch.no_grad():
                    model.user.weight[row] = good
                found = window.read(tap.close(step=1)).tables["user"]
                self.assertIn(row, found.keys.tolist())
                self.assertEqual(found.deleted.tolist(), [399])

    def test_a_restored_trainer_sends_again_what_it_takes_back(self):
        for momentum in (0, 0.9):
            with self.subTest(momentum), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                folder, model = self.folder / str(momentum), Model(False)
                optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=momentum)
                tap = Tap(model, folder, "m", optimizer)
                train(model, [optimizer], 3, 0)
                tap.close(step=3)
                checkpoint = {name: value.clone() for name, value in model.state_dict().items()}
                later = []
                for step in (6, 9):
                    train(model, [optimizer], 3, step)
                    later.append(window.read(tap.close(step=step)).tables)

                model.load_state_dict(checkpoint)
                tap = Tap(model, folder, "m", optimizer)
                tap.touch_since(step=3)
                found = window.read(tap.close(step=3)).tables
                for name, module in (("user", model.user), ("item", model.item)):
                    keys = set(found[name].keys.tolist())
                    self.assertEqual(keys, set().union(*(one[name].keys.tolist() for one in later)))
                    rows = module.weight.detach()[torch.from_numpy(found[name].keys.view("int64"))]
                    self.assertEqual(torch.from_numpy(found[name].rows).tolist(), rows.tolist())
                again = window.read(tap.close(step=3)).tables
                self.assertEqual(sum(len(one.keys) for one in again.values()), 0)

    def test_a_restore_sends_every_row_if_windows_are_missing(self):
        model = Model(False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        tap = Tap(model, self.folder, "m", optimizer)
        train(model, [optimizer], 1, 0)
        tap.close(step=1)
        removed = tap.close(step=2)
        tap.close(step=3)

        def keys_after(step):
            with warnings.catch_warnings(record=True) as said:
                warnings.simplefilter("always")
                tap = Tap(model, self.folder, "m", optimizer)
                tap.touch_since(step)
            found = window.read(tap.close(step=step)).tables.get("user", window.Changes())
            return len(found.keys), [str(one.message) for one in said]

        self.assertEqual(keys_after(3), (0, []))
        size, said = keys_after(4)  # of the changes between the window and the checkpoint
        self.assertEqual(size, 400)
        self.assertIn("no window has the changes up to step 4", said[0])
        for folder in (self.folder / "000000000001", removed):
            shutil.rmtree(folder)
        size, said = keys_after(2)
        self.assertEqual(size, 400)
        self.assertIn("windows before 3 are removed, some perhaps after step 2", said[0])

    def test_a_restore_takes_back_deletions_and_new_keys(self):
        table = nn.Embedding(3, 2)
        model = nn.ModuleDict({"user": table})
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        later = Tap(model, self.folder, "m", optimizer, keys={"user": [5, 6, -7]})
        later.close(step=1)
        later.delete("user", [5])
        table(torch.tensor([2]))
        later.close(step=2)

        tap = Tap(model, self.folder, "m", optimizer, keys={"user": [4, 5, 6]})
        tap.touch_since(step=1)
        found = window.read(tap.close(step=1)).tables["user"]
        self.assertEqual((found.keys.tolist(), found.deleted.view("int64").tolist()), ([5], [-7]))

    def test_a_table_with_two_modules_has_the_changes_of_both(self):
        model = nn.ModuleDict({name: nn.Embedding(5000, 2) for name in ("item", "target")})
        model["target"].weight = model["item"].weight
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        tap = Tap(model, self.folder, "m", optimizer, tables={"item": "item"})
        model["item"](torch.tensor([7]))
        # A hook of torch before 2.0 does not see this key, and its row has a gradient.
        model["target"](input=torch.tensor([9])).sum().backward()
        self.assertEqual(window.read(tap.close(step=1)).tables["item"].keys.tolist(), [7, 9])

    def test_a_row_with_a_gradient_is_sent_whatever_looked_it_up(self):
        # The sentinels are too few to find these rows.
        for sparse in (False, True):
            model = nn.Module()
            model.item = nn.Embedding(200_000, 2, sparse=sparse)
            model.user = nn.Parameter(torch.randn(200_000, 2))
            model.bias = nn.Parameter(torch.randn(200_000))
            model.eval()  # fine-tuning, with frozen statistics
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            names = {"item": "items", "user": "users", "bias": "biases"}
            tap = Tap(model, self.folder / str(sparse), "m", optimizer, names)
            for rows in ([[7, 9], [3], [4], [5]], [[199_999], [8], [6], [2]]):
                module, call, user, bias = map(torch.tensor, rows)
                optimizer.zero_grad()
                (model.item(module).sum() + model.user[user].sum() + model.bias[bias].sum()
                 + functional.embedding(call, model.item.weight, sparse=sparse).sum()).backward()
                optimizer.step()
                found = window.read(tap.close(step=1)).tables
                self.assertEqual(found["items"].keys.tolist(), sorted(rows[0] + rows[1]))
                self.assertEqual(found["users"].keys.tolist(), rows[2])
                self.assertEqual(found["biases"].keys.tolist(), rows[3])
                self.assertEqual(found["biases"].rows.tolist(), model.bias.detach()[bias][
                    :, None].tolist())

    def test_a_parameter_that_was_replaced_or_unfrozen_is_sent_if_no_module_looked_it_up(self):
        model = nn.ModuleDict({"user": nn.Embedding(5000, 2)})
        model["user"].weight.requires_grad_(False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        tap = Tap(model, self.folder, "m", optimizer)
        count = lambda: len(window.read(tap.close(step=1)).tables["user"].keys)
        model["user"].weight.requires_grad_(True)
        self.assertEqual(count(), 5000)
        model["user"].weight = nn.Parameter(model["user"].weight.detach().clone())
        self.assertEqual(count(), 5000)
        model["user"].weight[[3, 4]].sum().backward()
        self.assertEqual(count(), 2)

    def test_the_tables_of_an_export_are_those_of_the_windows(self):
        model = Model(False)
        model.position = nn.Embedding(9, 4)
        model.twin = nn.Embedding(400, 4)
        model.twin.weight = model.user.weight
        tables = [SimpleNamespace(name=name) for name in ("twin", "item", "mul_1")]
        done = SimpleNamespace(
            schema=SimpleNamespace(tables=tables), onnx=lambda: b"network")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with self.assertWarnsRegex(UserWarning, "table `mul_1`: the model has no parameter"):
            tap = Tap(model, self.folder, "m", optimizer, exported=done)
        train(model, [optimizer], 1, 0)
        found = window.read(tap.close(step=1))
        self.assertEqual(sorted(found.tables), ["item", "twin"])
        self.assertTrue(found.tables["twin"].traffic.sum() >= 16)
        self.assertEqual(found.dense, b"network")

    def test_every_row_is_compared_if_several_ranks_train(self):
        model = Model(False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with mock.patch.multiple(
                torch.distributed, is_initialized=lambda: True, get_world_size=lambda: 2):
            with self.assertWarnsRegex(UserWarning, "the other ranks look up rows too"):
                tap = Tap(model, self.folder, "m", optimizer)
        with torch.no_grad():
            model.user.weight[3] += 1
        self.assertEqual(window.read(tap.close(step=1)).tables["user"].keys.tolist(), [3])

    def test_a_restore_after_an_unannounced_optimizer_was_seen_hides_no_row(self):
        model = Model(False)
        plain, drifting = (kind(model.parameters(), lr=0.1) for kind in (torch.optim.SGD, Drifting))
        tap = Tap(model, self.folder, "m", [plain, drifting])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            train(model, [plain], 1, 0)
            tap.close(step=1)
            train(model, [drifting], 1, 1)
            with torch.no_grad():
                model.item.weight[0] = torch.nan
            with self.assertRaisesRegex(ValueError, "not finite"):
                tap.close(step=2)
            tap.touch_since(step=0)
            with torch.no_grad():
                model.item.weight[0] = 0
            self.assertEqual(len(window.read(tap.close(step=2)).tables["user"].keys), 400)

    def test_checksums_see_every_changed_bit(self):
        weight = torch.randn(50, 6)
        sums = RowSums(weight)

        def changed():
            rows = sums.changed(weight).tolist()
            sums.settle()
            return rows

        for row, column in ((0, 0), (17, 5), (49, 3)):
            weight[row, column] = torch.nextafter(weight[row, column], torch.tensor(9.0))
            self.assertEqual(changed(), [row])
        weight[[3, 4]] = weight[[4, 3]]
        self.assertEqual(changed(), [3, 4])
        weight[8, 0], weight[8, 1] = weight[8, 1].clone(), weight[8, 0].clone()
        self.assertEqual(changed(), [8])

    def test_the_example_of_the_page_runs(self):
        page = (ROOT / "docs/trainer.md").read_text()
        example = page.split("<!-- tap -->\n```python\n")[1].split("```")[0]
        self.assertLessEqual(len([line for line in example.splitlines() if line.strip()]), 10)
        model = Model(False)
        optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
        batches = [
            (torch.randint(0, 400, (16,)), torch.randint(0, 300, (16, 3)), torch.rand(16, 1))
            for _ in range(20)
        ]
        names = {
            "model": model, "optimizer": optimizer, "batches": batches, "folder": self.folder,
            "torch": torch
        }
        exec(example, names)
        found = [window.read(path) for path in window.closed(self.folder)]
        self.assertEqual([one.head["step"] for one in found], [10, 20])
        self.assertTrue(all(one.dense and len(one.tables["user"].keys) for one in found))

    def test_onnx_bytes_are_a_network(self):
        content = onnx_bytes(nn.Linear(3, 1), torch.zeros(2, 3), ["x"])
        self.assertIn(b"logit", content)


if __name__ == "__main__":
    unittest.main()
