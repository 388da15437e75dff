"""Checks that shards of tables are put together, or refused.

Checkpoints of torch.distributed need a newer torch than Debian's: tools/trainer/extras tests them.
Run in tools/trainer: `python3 -m unittest discover tests`.
"""

import sys
import unittest
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from hatchback_trainer.shards import assemble  # noqa: E402


class Shards(unittest.TestCase):
    def test_row_and_column_shards_make_the_table(self):
        table = torch.arange(35.0).reshape(7, 5)
        by_row = [(4, 0, table[4:]), (0, 0, table[:4])]
        by_column = [(0, 0, table[:, :2]), (0, 2, table[:, 2:])]
        grid = [(r, c, table[r : r + 4, c : c + 3]) for r in (0, 4) for c in (0, 3)]
        for shards in (by_row, by_column, grid):
            self.assertTrue(torch.equal(assemble((7, 5), shards), table))

    def test_missing_double_and_outer_shards_are_refused(self):
        table = torch.ones(4, 4)
        for shards, problem in (
            ([(0, 0, table[:3])], r"no shard has the value at \[3, 0\]"),
            ([(0, 0, table), (2, 2, table[:1, :1])], r"at \[2, 2\] overlaps"),
            ([(1, 0, table)], r"at \[1, 0\] is outside \[4, 4\]"),
        ):
            with self.assertRaisesRegex(ValueError, problem):
                assemble((4, 4), shards, "user")


if __name__ == "__main__":
    unittest.main()
