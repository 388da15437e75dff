"""What the row numbers of lookups are made of: columns of the batch, their shifts and remainders.

Nothing here changes a graph.
"""

from dataclasses import dataclass, field

import torch

from .graph import LEAF, ROW, op_name, source_line

COMPARES = ("eq", "ne", "gt", "ge", "lt", "le")
OTHER_NAMES = {  # torch's second names of the comparisons, which Keras calls
    "not_equal": "ne", "greater": "gt", "greater_equal": "ge", "less": "lt", "less_equal": "le",
}


@dataclass
class Column:
    """One sparse feature: columns of a leaf, and what the car makes of their values."""

    name: str
    leaf: int
    columns: tuple
    shift: int = 0
    modulus: int | None = None
    pooling: str = "sum"  # "none" with several columns that the network pools itself
    padding: int | None = None  # value of a column that is no key
    tables: list = field(default_factory=list)
    call: object = None  # the call of a collection, which has bags of its own
    jagged: object = None  # the lookup that takes offsets
    size: int = 0  # number of rows that its values can reach
    spread: bool = False  # whether a vector of constants gives each column its own shift
    skipped: int | None = None  # value that an EmbeddingBag leaves out of its bags

    @property
    def hotness(self):
        return len(self.columns)

    @property
    def keeps_rows(self):
        """Returns whether the network gets the row of each key, and not one vector of a bag."""
        return self.pooling == "none" or self.hotness == 1 and self.skipped is None


@dataclass
class Part:
    """The vectors of one column in one table: those of `count` elements of a lookup."""

    column: Column
    table: str
    count: int


@dataclass
class Element:
    """What one row number of a lookup is made of."""

    leaf: int
    column: int
    shift: int
    modulus: int | None
    spread: bool = False


def samples_axis(code, samples):
    """Returns the axis of an origin's values that is the samples: 0 unless the model has moved
    them, as networks that take steps first do."""
    rows = torch.arange(samples).reshape(-1, 1) * ROW
    for axis, size in enumerate(code.shape):
        moved = code.movedim(axis, 0).reshape(size, -1)
        if size == samples and bool((moved == moved[:1] + rows).all()):
            return axis
    return 0


def elements_of(followed, lookup):
    """Returns the elements of a lookup's row numbers, the same for each sample; None if a row
    number is computed in another way."""
    origin = followed.origin.get(lookup.index)
    if origin is None or isinstance(origin, list):
        return None
    if origin.modulus is not None and origin.narrowed is not None:
        raise ValueError(
            f"{source_line(origin.narrowed)}: this cast changes large numbers, and so a key's "
            f"remainder by {origin.modulus}: take the remainder before the cast"
        )
    code, shift = origin.code, origin.shift.expand(origin.code.shape)
    if lookup.pooling is not None:  # embedding_bag takes flat row numbers and the offsets
        if not followed.is_constant(lookup.bounds):
            return None
        bounds = followed.value[lookup.bounds]
        bags = len(bounds) - 1 if lookup.last_bound else len(bounds)
        if not bags or code.numel() % bags or bool(
                (bounds != torch.arange(len(bounds)) * (code.numel() // bags)).any()):
            return None
        code, shift = code.reshape(bags, -1), shift.reshape(bags, -1)
    elif axis := samples_axis(code, followed.samples):
        code, shift = code.movedim(axis, 0), shift.movedim(axis, 0)
    elif code.numel() and code.numel() % followed.samples == 0:  # also one row of all samples
        code, shift = code.reshape(followed.samples, -1), shift.reshape(followed.samples, -1)
    if code.dim() == 0:
        return None
    code, shift = code.reshape(len(code), -1), shift.reshape(len(code), -1)
    rows = torch.arange(len(code)).reshape(-1, 1) * ROW
    if not bool((code == code[:1] + rows).all()) or not bool((shift == shift[:1]).all()):
        return None
    if bool((shift < 0).any()):
        return None  # no key function subtracts
    return [
        Element(value // LEAF, value % ROW, offset, origin.modulus, origin.spread)
        for value, offset in zip(code[0].tolist(), shift[0].tolist())
    ]


def runs_of(elements, named):
    """Splits elements into runs of columns that one feature may have."""
    alike = lambda a, b: (
        (a.leaf, a.shift, a.modulus) == (b.leaf, b.shift, b.modulus)
        and named(a.leaf, a.column) == named(b.leaf, b.column) is not False
    )
    runs = []
    for element in elements:
        if runs and alike(runs[-1][-1], element):
            runs[-1].append(element)
        else:
            runs.append([element])
    return runs


def overlaps(runs):
    """Returns the leaves of which two runs share some columns and not all."""
    found = set()
    for leaf, columns in runs:
        for other, others in runs:
            if leaf == other and columns != others and set(columns) & set(others):
                found.add(leaf)
    return found


def integer_made(followed, node):
    """Returns whether a row number is made of inputs by whole numbers alone."""
    seen, rest = set(), [node]
    while rest:
        one = rest.pop()
        if one in seen or one.op == "placeholder":
            continue
        seen.add(one)
        value = followed.value.get(one)
        if torch.is_tensor(value) and value.is_floating_point() and one not in followed.origin:
            return False
        rest += one.all_input_nodes
    return True


def compared_with(user, node, followed):
    """Returns the padding with which `user` compares the values of a column; None if it does
    something else with them."""
    if user is None:
        return None
    name = OTHER_NAMES.get(op_name(user), op_name(user))
    if name in ("_to_copy", "to") and user.kwargs.get("dtype") is torch.bool:
        return 0
    if name == "logical_not":
        return 0
    if name not in COMPARES or user.args[0] is not node:
        return None
    value = user.args[1]
    if isinstance(value, torch.fx.Node):
        if not followed.is_constant(value) or followed.value[value].numel() != 1:
            return None
        value = followed.value[value].item()
    if value != int(value):
        return None
    value = int(value)
    if name in ("eq", "ne"):
        return value
    # Keys are 0 or more, so `> 0` and `>= 1` say `!= 0`.
    return 0 if (name, value) in (("gt", 0), ("ge", 1), ("lt", 1), ("le", 0)) else None
