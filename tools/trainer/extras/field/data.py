"""Random rows of the kind that the packages' own examples use, and the list of their models.

Columns: `user`, `item`, `city` (one key each), `genres` (5 keys at most) and `history` (items, 8 at
most), both padded with zeros at the end, and the dense `age` and `price`.
"""

from dataclasses import dataclass, field
from typing import Callable

import torch

ROWS = {"user": 50, "item": 80, "city": 10, "genres": 12, "history": 80}
LENGTH = {"genres": 5, "history": 8}
DIM = 8


@dataclass
class Case:
    """One model class: `build` returns the model, or a method of one; `batch` its arguments."""

    package: str
    name: str
    build: Callable
    batch: Callable  # (rows) -> what the model is called with
    options: dict = field(default_factory=dict)
    sequence: bool = False
    export: Callable | None = None  # in place of `export`


def rows(count, seed):
    """Returns `count` random rows: a tensor for each column, `[count]` or `[count, length]`."""
    draw = torch.Generator().manual_seed(seed)
    pick = lambda name, *shape: 1 + torch.randint(ROWS[name] - 1, shape, generator=draw)
    found = {name: pick(name, count) for name in ("user", "item", "city")}
    for name, length in LENGTH.items():
        lengths = torch.randint(1, length + 1, (count,), generator=draw)
        keep = torch.arange(length) < lengths[:, None]
        found[name] = pick(name, count, length) * keep
        found[f"{name}_length"] = lengths
    for name in ("age", "price"):
        found[name] = torch.randn(count, generator=draw)
    return found
