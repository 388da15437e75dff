"""Runs the experiment and the live loop on a few generated flights, with the `hatchback` program.

Without target/release/hatchback (or $HATCHBACK) the loops are skipped, and the test says so.
Run in tools/trainer: `python3 -m unittest discover tests`.
"""

import contextlib
import io
import os
import random
import sys
import tempfile
import unittest
import zipfile
from datetime import date, timedelta
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT / "tools/trainer"))

from hatchback_trainer.experiments import criteo_stream, experiment, live  # noqa: E402
from hatchback_trainer.experiments.flights import (  # noqa: E402
    FEATURES, OnlineDLRM, flight_stream, read_flights
)

PROGRAM = Path(os.environ.get("HATCHBACK", ROOT / "target/release/hatchback"))
COLUMNS = (
    "year month day sched_dep_time arr_delay carrier flight tailnum origin dest distance hour"
    .split()
)


def write_flights(path, first=date(2013, 6, 10), days=42, a_day=500):
    """Writes flights from `first` on: some planes are always late, and from July on
    there are new ones."""
    rng, lines = random.Random(4), [",".join(COLUMNS)]
    for day in (first + timedelta(days=number) for number in range(days)):
        for _ in range(a_day):
            hour, plane = rng.randrange(5, 23), rng.randrange(60 if day.month < 7 else 90)
            late = rng.random() < (0.7 if plane % 3 == 0 else 0.1)
            delay = (
                "NA" if rng.random() < 0.02 else rng.randrange(16, 90) if late
                else rng.randrange(-30, 15)
            )
            dest, carrier = rng.choice("IAH MIA ATL LAX".split()), rng.choice("UA B6 DL".split())
            row = [
                day.year, day.month, day.day, hour * 100, delay, carrier, plane * 7, f"N{plane}",
                "JFK", dest, 900, hour
            ]
            lines.append(",".join(map(str, row)))
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("flights.csv", "\n".join(lines) + "\n")


class Loops(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        torch.set_num_threads(1)
        cls.temporary = tempfile.TemporaryDirectory()
        cls.folder = Path(cls.temporary.name)
        cls.data = cls.folder / "flights.zip"
        write_flights(cls.data)

    @classmethod
    def tearDownClass(cls):
        cls.temporary.cleanup()

    def quiet(self, run, *words, **options):
        if not PROGRAM.exists():
            self.skipTest(f"{PROGRAM} is not built")
        said = io.StringIO()
        with contextlib.redirect_stdout(said):
            return run(*words, **options), said.getvalue()

    def test_flights_come_in_time_order_without_cancelled_ones(self):
        days = [day for day, _ in read_flights(self.data)]
        self.assertEqual(days, sorted(days))
        self.assertLess(len(days), 42 * 500)

    def test_the_trainer_reports_the_rows_of_its_batches(self):
        stream = flight_stream(self.data)
        model, samples = OnlineDLRM(stream), stream.base[:256]
        model.train(samples)
        changes = model.changes()
        for name in FEATURES:
            keys = {sample.sparse[name][0] for sample in samples}
            self.assertEqual(set(changes[name].keys.numpy().view("uint64").tolist()), keys)
            self.assertEqual(changes[name].traffic.sum(), len(samples))
        self.assertEqual([len(one.keys) for one in model.changes().values()], [0] * len(FEATURES))

    def test_the_criteo_shaped_stream_drifts_and_brings_new_keys(self):
        stream = criteo_stream.criteo_stream()
        keys = lambda samples: {
            key for sample in samples for bag in sample.sparse.values() for key in bag
        }
        first, last = stream.windows[0], stream.windows[-1]
        self.assertEqual(
            (len(first), len(first[0].sparse), len(first[0].dense)), (criteo_stream.WINDOW, 26, 13)
        )
        self.assertTrue(keys(last) - keys(stream.base))
        shares = [
            sum(sample.label for sample in samples) / len(samples) for samples in stream.windows
        ]
        self.assertTrue(all(0.1 < share < 0.6 for share in shares), shares)

    def test_every_policy_of_the_experiment_is_measured(self):
        report, _ = self.quiet(
            experiment.run, flight_stream(self.data), self.folder / "experiment", str(PROGRAM), 3
        )
        points = {point["policy"]: point for point in report["points"]}
        self.assertEqual(list(points), list(experiment.POLICIES))
        sizes = [
            points[name]["kib_a_window"]
            for name in ("stale", "dense only", "top 20 %", "all rows u8", "all rows f32")
        ]
        self.assertEqual(sizes, sorted(sizes))
        self.assertGreater(points["all rows f32"]["auc"], points["stale"]["auc"])
        self.assertLess(abs(points["all rows u8"]["auc_below_f32"]), 0.01)
        self.assertIn("<svg", (self.folder / "experiment/flights.svg").read_text())

    def test_the_live_loop_updates_a_car_every_week(self):
        report, said = self.quiet(
            live.run, self.data, self.folder / "live", str(PROGRAM), weeks_max=3
        )
        self.assertEqual([week["week"] for week in report["weeks"]], [1, 2, 3])
        self.assertEqual(report["weeks"][0]["stale_auc"], report["weeks"][0]["fresh_auc"])
        published = [week for week in report["weeks"] if not week["refused"]]
        self.assertTrue(published, said)
        self.assertNotEqual(report["weeks"][2]["stale_auc"], report["weeks"][2]["fresh_auc"])
        self.assertTrue(
            all(week["delay_s"] > 0 and week["bytes"] <= 64 * 1024 for week in report["weeks"])
        )
        self.assertIn("<svg", (self.folder / "live/live.svg").read_text())


if __name__ == "__main__":
    unittest.main()
