"""Checks the windows that this package writes, against the golden one that the Rust side
reads and writes too.

Needs numpy only. Run in tools/trainer: `python3 -m unittest discover tests`.
"""

import json
import sys
import tempfile
import unittest
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT / "tools/trainer"))

from hatchback_trainer import window  # noqa: E402

GOLDEN = ROOT / "tests/data/window"
FILES = [window.HEAD, window.ROWS, window.DENSE, window.PROBE]


def golden_changes():
    rows = np.arange(12, dtype=np.float32).reshape(3, 4) / 8 - 0.5
    user = window.Changes([7, -1, 1 << 40], rows, [3, 1, 0.5], [11, -2])
    return {
        "user": user, "ünïcode.item": window.Changes(np.arange(5), np.full((5, 2), -0.25)),
        "gone": window.Changes(deleted=[4])
    }


def write_golden(folder):
    writer = window.WindowWriter(folder, "golden")
    writer.write({}, step=10, closed_ms=1)
    return writer.write(
        golden_changes(), step=20, dense=b"not a network", probe='{"dense":[]}\n',
        closed_ms=1_790_000_000_123
    )


class Windows(unittest.TestCase):
    def setUp(self):
        temporary = tempfile.TemporaryDirectory()
        self.addCleanup(temporary.cleanup)
        self.folder = Path(temporary.name)

    def test_bytes_are_those_of_the_golden_window(self):
        written = write_golden(self.folder)
        for name in FILES:
            self.assertEqual(
                (written / name).read_bytes(), (GOLDEN / "000000000002" / name).read_bytes(), name
            )
        self.assertEqual(sorted(path.name for path in written.iterdir()), sorted(FILES))

    def test_arrays_of_any_layout_give_the_same_bytes(self):
        plain = {"t": window.Changes(np.array([7, 1 << 40]), np.ones((2, 3), np.float32), [1, 2])}
        other = {
            "t": window.Changes(
                np.array([7, 1 << 40], ">i8"), np.ones((2, 3), ">f4", order="F"),
                np.array([1, 2], ">f4")
            )
        }
        first, second = (
            b"".join(window.safetensors.blocks(window.columns(one))) for one in (plain, other)
        )
        self.assertEqual(first, second)
        tensors = {"x": np.arange(6, dtype=">f4").reshape(2, 3).T}
        path = self.folder / "x.safetensors"
        window.safetensors.write(path, tensors)
        np.testing.assert_array_equal(window.safetensors.read(path)["x"], tensors["x"])

    def test_values_that_have_no_place_are_refused(self):
        for keys in ([0.5], [-1, 1 << 63], [True], np.array([1], object)):
            with self.assertRaisesRegex(ValueError, "keys: are of type"):
                window.columns({"t": window.Changes(keys, np.ones((len(keys), 2), np.float32))})
        with self.assertRaisesRegex(ValueError, "tensor `x`: float64 is not one of"):
            window.safetensors.write(self.folder / "x", {"x": np.ones(2)})

    def test_a_window_reads_back(self):
        found = window.read(write_golden(self.folder))
        user = found.tables["user"]
        self.assertEqual(user.keys.tolist(), [7, (1 << 64) - 1, 1 << 40])
        self.assertEqual(user.rows.tolist(), golden_changes()["user"].rows.tolist())
        self.assertEqual(
            (user.traffic.tolist(), user.deleted.tolist()), ([3.0, 1.0, 0.5], [11, (1 << 64) - 2])
        )
        self.assertEqual(
            (found.dense, found.probe, found.head["step"]), (b"not a network", '{"dense":[]}\n', 20)
        )

    def test_an_unclosed_window_is_written_again_under_its_number(self):
        writer = window.WindowWriter(self.folder, "m")
        writer.write({}, step=1)
        torn = self.folder / "000000000002"
        torn.mkdir()
        (torn / window.ROWS).write_bytes(b"torn")
        again = window.WindowWriter(self.folder, "m")
        self.assertEqual(again.next, 2)
        self.assertEqual(again.write({}, step=2), torn)
        self.assertEqual([int(path.name) for path in window.closed(self.folder)], [1, 2])

    def test_wrong_changes_are_refused_and_close_nothing(self):
        writer = window.WindowWriter(self.folder, "m")
        rows = np.zeros((2, 3), np.float32)
        for changes, problem in (
            (window.Changes([1, 1], rows), "a key occurs twice"),
            (window.Changes([1, 2], rows, deleted=[2]), "both written and deleted"),
            (window.Changes([1], rows), r"not \[1, dim\]"),
            (window.Changes([1, 2], rows + np.nan), "key 1 is not finite"),
        ):
            with self.assertRaisesRegex(ValueError, problem):
                writer.write({"t": changes}, step=1)
        self.assertEqual(window.closed(self.folder), [])

    def test_a_lineage_that_the_publisher_would_refuse_is_refused(self):
        for lineage in ("", ".m", "a/b", "m\n", "\u00e4", "m" * 121):
            with self.assertRaisesRegex(ValueError, "(?s)lineage: .* begins with a dot"):
                window.WindowWriter(self.folder / "w", lineage)
        self.assertFalse((self.folder / "w").exists())
        self.assertEqual(window.WindowWriter(self.folder / "w", "-m.1_" + "m" * 115).next, 1)

    def test_a_changed_file_is_refused(self):
        written = write_golden(self.folder)
        (written / window.DENSE).write_bytes(b"not a netw0rk")
        with self.assertRaisesRegex(ValueError, "does not match the hash"):
            window.read(written)

    def test_the_head_is_one_line(self):
        text = (write_golden(self.folder) / window.HEAD).read_text()
        self.assertEqual(text.count("\n"), 1)
        self.assertEqual(
            list(json.loads(text)), ["format", "lineage", "window", "step", "closed_ms", "files"]
        )


if __name__ == "__main__":
    if sys.argv[1:] == ["--write-golden"]:
        write_golden(GOLDEN)
    else:
        unittest.main()
