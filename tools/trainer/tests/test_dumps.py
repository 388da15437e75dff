"""Checks the taps of trainers that dump their own changes, against stand-ins
with the recorded interfaces.

Neither SOK nor dynamicemb runs without an NVIDIA GPU, so their own classes are not tested here.
Run in tools/trainer: `python3 -m unittest discover tests`.
"""

import sys
import unittest
from datetime import datetime, timedelta, timezone
from pathlib import Path
from unittest import mock

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from hatchback_trainer.dumps import DynamicEmbTap, SokTap  # noqa: E402


class Sok(unittest.TestCase):
    """`sok.incremental_model_dump(variables, utc_time)` returns lists of keys and of values,
    one entry a variable."""

    def setUp(self):
        self.asked = []

    def dump(self, variables, since):
        self.asked.append((variables, since))
        keys = [np.array([3, -1, 3]), np.zeros(0, np.int64)]
        return keys, [np.array([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]), np.zeros((0, 4))]

    def test_changes_are_asked_for_with_a_margin_and_each_key_comes_once(self):
        start = datetime(2026, 3, 1, tzinfo=timezone.utc)
        second = timedelta(seconds=1)
        with mock.patch("hatchback_trainer.dumps.datetime") as clock:
            clock.now.side_effect = [start + n * second for n in (0, 10, 20, 30)]
            tap = SokTap(self.dump, {"user": "u", "item": "i"}, margin_s=3)
            changes = tap.changes()
            tap.changes()  # the window was not written
            tap.settle()
            tap.changes()
        self.assertEqual(changes["user"].keys.tolist(), [(1 << 64) - 1, 3])
        self.assertEqual(changes["user"].rows.tolist(), [[3.0, 4.0], [5.0, 6.0]])
        self.assertEqual(len(changes["item"].keys), 0)
        self.assertEqual(self.asked[0][0], ["u", "i"])
        times = [since for _, since in self.asked]
        self.assertEqual(times, [start + n * second for n in (-3, -3, 17)])

    def test_a_dump_of_other_tables_is_refused(self):
        with self.assertRaisesRegex(ValueError, "returned 2 tables for 1 variables"):
            SokTap(self.dump, {"user": "u"}).changes()


class DynamicEmb(unittest.TestCase):
    """`incremental_dump(model, threshold)` returns {collection: {table: (keys, rows)}}
    and {collection: {table: score}}."""

    def setUp(self):
        self.step, self.rows = 10, {7: (4, 0.5), 8: (11, 1.5), 9: (12, 2.5)}  # key -> step, value

    def dump(self, model, threshold):
        least = threshold if isinstance(threshold, int) else threshold["ebc"]["t"]
        keys = [key for key, (step, _) in self.rows.items() if step >= least]
        rows = torch.tensor([[self.rows[key][1]] * 2 for key in keys]).reshape(-1, 2)
        return (
            {"ebc": {"t": (torch.tensor(keys, dtype=torch.int64), rows)}}, {"ebc": {"t": self.step}}
        )

    def test_a_window_has_the_rows_of_its_steps(self):
        tap = DynamicEmbTap(self.dump, None)
        self.step = 12
        for _ in range(2):  # the first window was not written
            self.assertEqual(tap.changes()["t"].keys.tolist(), [8, 9])
        tap.settle()
        self.rows[7] = (14, 9.0)
        self.step = 14
        changes = tap.changes()["t"]
        self.assertEqual(
            (changes.keys.tolist(), changes.rows.tolist()), ([7, 9], [[9.0, 9.0], [2.5, 2.5]])
        )

    def test_a_score_that_falls_is_refused(self):
        tap = DynamicEmbTap(self.dump, None, {("ebc", "t"): "item"})
        self.assertEqual(list(tap.changes()), ["item"])
        tap.settle()
        self.step = 1
        with self.assertRaisesRegex(ValueError, "score 1 is below"):
            tap.changes()


if __name__ == "__main__":
    unittest.main()
