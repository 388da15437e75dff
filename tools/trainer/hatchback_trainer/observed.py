"""Watches a model on its sample batch: which arguments are bags of keys, which row number no table
has, and where autocast begins. It changes no value.
"""

import traceback

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from .capture import last_own

LOOKUPS = {  # the table, the row numbers and the offsets in the arguments of a function
    functional.embedding: ("weight", "input", None),
    functional.embedding_bag: ("weight", "input", "offsets"),
    torch.embedding: ("weight", "indices", None),
    torch.embedding_bag: ("weight", "indices", "offsets"),
    torch.index_select: ("input", "index", None),
    torch.Tensor.index_select: ("input", "index", None),
    torch.Tensor.__getitem__: ("input", "index", None),
}
PLACES = {
    functional.embedding: ("input", "weight"),
    functional.embedding_bag: ("input", "weight", "offsets"),
    torch.Tensor.__getitem__: ("input", "index"),
    torch.index_select: ("input", "dim", "index"),
    torch.Tensor.index_select: ("input", "dim", "index"),
}
SAME = ("contiguous", "detach", "int", "long", "reshape", "to", "view")


def of_lookup(function, args, kwargs):
    """Returns the table, the row numbers and the offsets of a lookup; None for another call."""
    if function not in LOOKUPS:
        return None, None, None
    given = dict(zip(PLACES.get(function, ("weight", "indices", "offsets")), args)) | kwargs
    table, index, offsets = (given.get(name) for name in LOOKUPS[function])
    is_lookup = torch.is_tensor(index) and given.get("dim", 0) == 0
    return (table, index, offsets) if is_lookup else (None, None, None)


class Lookups(TorchFunctionMode):
    """Keeps the arguments that `embedding_bag` takes as keys and offsets, and refuses a row number
    that is outside of its table by column, sample and value."""

    def __init__(self, flat):
        super().__init__()
        self.flat, self.bagged, self.copies = flat, [], {}
        self.autocast = None  # the first line that runs under autocast

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if self.autocast is None and torch.is_autocast_enabled("cpu"):
            self.autocast = last_own(traceback.extract_stack())
        table, index, offsets = of_lookup(function, args, kwargs)
        # Offsets that the model makes do not say that the keys are no column.
        if torch.is_tensor(offsets) and index.dim() == 1 and self.is_given(offsets):
            self.bagged.append((self.source(index), self.source(offsets)))
        try:
            made = function(*args, **kwargs)
        except (IndexError, RuntimeError) as error:
            self.explain(table, index, error)
            raise
        first = args[0] if args else None
        # `x.long()` of whole numbers is `x` itself, and no copy.
        if getattr(function, "__name__", "") in SAME and torch.is_tensor(made) and (
                torch.is_tensor(first) and made is not first and made.dim() == first.dim() == 1):
            self.copies[id(made)] = made, first  # keeps it, so that its id is no other's
        return made

    def is_given(self, tensor):
        """Returns whether a tensor is one of the batch's, as it is or in another type."""
        source = self.source(tensor)
        return any(source is one for one in self.flat.tensors)

    def source(self, tensor):
        while id(tensor) in self.copies:
            tensor = self.copies[id(tensor)][1]
        return tensor

    def explain(self, table, index, error):
        if table is None or index.is_floating_point() or index.dtype == torch.bool:
            return
        rows, flat = len(table), index.reshape(-1)
        wrong = ((flat < 0) | (flat >= rows)).nonzero().reshape(-1)
        if not len(wrong):
            return
        at = int(wrong[0])
        raise ValueError(
            f"{last_own(traceback.extract_stack())}: {self.column(index, at)}row number "
            f"{int(flat[at])} of a table of {rows} rows, which are 0 to {rows - 1}"
        ) from error

    def column(self, index, at):
        """Returns the column and the sample of one row number, if they are an argument's."""
        given, flat = self.source(index), index.reshape(-1)
        for name, tensor in zip(self.flat.names, self.flat.tensors):
            columns = tensor.unbind(1) if tensor.dim() == 2 else ()
            if tensor is given or shifted(tensor, flat):
                return f"`{name}`, sample {at // max(1, tensor[:1].numel())}: "
            for place, column in enumerate(columns):
                if shifted(column, flat):
                    return f"`{name}`, column {place}, sample {at}: "
        return ""


def shifted(values, numbers):
    """Returns whether the numbers are the values, or the values plus one constant."""
    if values.numel() != numbers.numel():
        return False
    apart = numbers - values.reshape(-1).to(numbers.dtype)
    return bool((apart == apart[:1]).all())
