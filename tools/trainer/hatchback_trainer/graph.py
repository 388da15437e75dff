"""Follows the values of a batch through a captured graph: which lookups there are, and what each
row number is made of.

Every node has its value on the sample batch. A node that only moves values of one input about also
has their origins: the leaf, the sample and the column of each value. Nothing here changes a graph.
"""

import math
import operator
import os
from dataclasses import dataclass, replace
from pathlib import Path

import numpy
import torch

ATEN = torch.ops.aten
# Frames of these folders are not the user's lines. The slash keeps `torch_rechub` out of `torch`.
OWN = tuple(str(Path(one).parent) + os.sep for one in (torch.__file__, numpy.__file__, __file__))

# Operations that move values and do not change them; by name, for all overloads.
MOVES = {
    "alias", "cat", "chunk", "clone", "contiguous", "detach", "expand", "flatten", "flip", "index",
    "index_select", "lift_fresh_copy", "narrow", "permute", "repeat", "reshape", "select", "slice",
    "split", "split_with_sizes", "squeeze", "stack", "t", "transpose", "unbind", "unflatten",
    "unsafe_view", "unsqueeze", "view", "getitem",
}
CASTS = {"_to_copy", "to", "type_as"}
SAME_ORDER = CASTS | {  # operations that keep all values, in their order
    "alias", "clone", "contiguous", "detach", "flatten", "reshape", "squeeze", "unsqueeze", "view",
}
FILLED = {  # operations that read the shape of a value alone, and what they fill
    "new_zeros": 0, "new_ones": 1, "new_full": None, "zeros_like": 0, "ones_like": 1,
    "full_like": None, "new_empty": 0, "empty_like": 0,
}
TABLES = {"embedding", "embedding_bag", "index", "index_select"}
WIDE = (torch.float32, torch.float64, torch.int64, torch.int32)
LEAF, ROW = 1 << 52, 1 << 24  # units of an origin: leaf, then sample, then column


def op_name(node):
    """Returns `embedding` for `aten.embedding.default`."""
    target = node.target
    return getattr(target, "__name__", str(target)).split(".")[0]


def source_line(node):
    """Returns the user's line of a node, `FILE:LINE, CODE`."""
    lines = (node.meta.get("stack_trace") or "").strip().splitlines()
    for place in range(len(lines) - 1, -1, -1):
        parts = lines[place].strip().split('"')
        if parts[0].startswith("File ") and not parts[1].startswith((*OWN, "<")):
            number = parts[2].split("line ")[1].split(",")[0]
            code = lines[place + 1].strip() if place + 1 < len(lines) else ""
            return f"{parts[1]}:{number}, `{code}`"
    return f"operation `{op_name(node)}`"


def bits_of(dtype):
    """Returns how many bits a whole number may have so that a type keeps it."""
    if dtype == torch.bool:
        return 1
    if dtype.is_floating_point:
        return 1 - round(math.log2(torch.finfo(dtype).eps))
    return torch.iinfo(dtype).bits - (torch.iinfo(dtype).min < 0)


def narrows(before, after):
    """Returns whether a type loses large whole numbers of another."""
    wraps = before.is_floating_point and not after.is_floating_point and after != torch.int64
    return wraps or bits_of(after) < bits_of(before)


@dataclass
class Origin:
    """Where each value of a node comes from: `code` plus the constant `shift`, both of the node's
    shape. With a `modulus` the value is the remainder of the original by it. `spread` says that a
    vector of constants made the shifts, and `narrowed` is a cast that loses large numbers."""

    code: torch.Tensor
    shift: torch.Tensor
    modulus: int | None = None
    spread: bool = False
    narrowed: torch.fx.Node | None = None

    @property
    def moved(self):
        """Returns whether the values are those of the leaf, unchanged."""
        return self.modulus is None and not bool(self.shift.any())


@dataclass
class Lookup:
    """A node that looks rows of a constant table up."""

    node: torch.fx.Node
    table: torch.fx.Node
    index: torch.fx.Node
    pooling: str | None = None  # "sum", "mean" or "max" of an embedding_bag
    bounds: torch.fx.Node | None = None  # the offsets of an embedding_bag
    padding: int | None = None  # key that an embedding_bag leaves out
    weights: torch.fx.Node | None = None  # per_sample_weights
    last_bound: bool = False  # whether the offsets include the end


class Followed(torch.fx.Interpreter):
    """Runs a graph on the sample batch. Afterwards `value`, `origin` and `needs` describe it."""

    def __init__(self, module, leaves):
        super().__init__(module, garbage_collect_values=False)
        self.value, self.origin, self.needs, self.by_shape = {}, {}, {}, set()
        self.placeholders = [node for node in module.graph.nodes if node.op == "placeholder"]
        with torch.no_grad():
            self.run(*(leaf.tensor for leaf in leaves))
        outputs = next(node for node in module.graph.nodes if node.op == "output").args[0]
        self.samples = len(self.value[outputs[0]])
        for place, (node, leaf) in enumerate(zip(self.placeholders, leaves)):
            self.needs[node] = {place}
            if leaf.per_sample:
                shape = leaf.tensor.shape
                rows = torch.arange(shape[0]).reshape(-1, *[1] * (len(shape) - 1)) * ROW
                columns = torch.arange(leaf.width).reshape(1, *shape[1:])
                code = rows + columns + place * LEAF
                self.origin[node] = Origin(code, torch.zeros_like(code))
        for node in module.graph.nodes:
            self.follow(node)

    def run_node(self, node):
        if op_name(node).startswith(("_assert", "sym_constrain")) or node.op == "call_module":
            self.value[node] = None
        else:
            self.value[node] = super().run_node(node)
        return self.value[node]

    def follow(self, node):
        if node.op == "placeholder":
            return
        self.needs[node] = set().union(*(self.needs[one] for one in node.all_input_nodes))
        shape_alone = op_name(node).startswith("sym_size") or op_name(node) in FILLED
        if shape_alone or node.op == "get_attr":
            self.needs[node] = set()
        if shape_alone:
            self.by_shape.add(node)
        elif any(one in self.by_shape for one in node.all_input_nodes):
            self.by_shape.add(node)
        if self.needs[node] and node.op == "call_function":
            found = self.origin_of(node)
            if found is not None:
                self.origin[node] = found

    def is_constant(self, node):
        """Returns whether no value of the batch reaches a node. Its number of samples may."""
        return not self.needs[node]

    def origin_of(self, node):
        name = op_name(node)
        if name in CASTS:
            return self.cast(node) if self.keeps_values(node) else None
        if name in MOVES:
            return self.moved(node)
        if name in ("add", "sub") and len(node.args) == 2 and not node.kwargs:
            return self.shifted(node, name)
        if name == "remainder" and isinstance(node.args[1], int) and node.args[1] > 0:
            before = self.origin.get(node.args[0])
            if before is not None and before.moved:
                return replace(before, modulus=node.args[1], spread=False)
        return None

    def cast(self, node):
        """Returns the origin of a cast, which no remainder may follow if it loses large numbers."""
        found = self.origin.get(node.args[0])
        if not isinstance(found, Origin) or found.modulus is not None or not narrows(
                self.value[node.args[0]].dtype, self.value[node].dtype):
            return found
        return replace(found, narrowed=found.narrowed or node)

    def keeps_values(self, node):
        """Returns whether a cast keeps all whole numbers up to 2^24, whatever the batch has. A
        float that becomes a whole number is a key, but no longer the float."""
        before, after = self.value[node.args[0]].dtype, self.value[node].dtype
        if after not in WIDE:
            return before == after
        if after.is_floating_point and not before.is_floating_point:
            return not any(
                self.value[self.placeholders[one]].is_floating_point() for one in self.needs[node])
        return True

    def shift_of(self, node):
        """Returns the placeholder whose values, all and in their order, a node has, and the
        constant whole number that is added to them; (None, 0) if another operation takes part."""
        shift = 0
        while node.op != "placeholder":
            name, first, *rest = op_name(node), *node.args
            if name in ("add", "sub") and not node.kwargs and type(rest[0]) is int:
                shift += rest[0] if name == "add" else -rest[0]
            elif name not in SAME_ORDER or name in CASTS and not self.keeps_values(node):
                return None, 0
            if not isinstance(first, torch.fx.Node):
                return None, 0
            node = first
        return node, shift

    def moved(self, node):
        """Moves origins as the node moves values; None if another value takes part."""
        inputs = [one for one in node.all_input_nodes if self.needs[one]]
        if not inputs or any(one not in self.origin for one in inputs):
            return None
        origins = [self.origin[one] for one in inputs]
        if isinstance(origins[0], (list, tuple)):  # the parts of a split
            return origins[0][node.args[1]] if node.target is operator.getitem else None
        # A table's index that comes from the batch does not only move values.
        if op_name(node) in ("index", "index_select") and not self.needs.get(node.args[0]):
            return None
        if op_name(node) == "index" and any(
            isinstance(one, torch.fx.Node) and self.needs[one] for one in node.args[1]
        ):
            return None
        if any(one.modulus != origins[0].modulus for one in origins):
            return None
        run = lambda part: node.target(
            *torch.fx.map_arg(node.args, lambda one: part(self.origin[one]) if one in self.origin
                              else self.value[one]),
            **torch.fx.map_arg(node.kwargs, lambda one: self.value[one]),
        )
        try:
            codes, shifts = run(lambda one: one.code), run(lambda one: one.shift)
        except (RuntimeError, TypeError):
            return None
        narrowed = next((one.narrowed for one in origins if one.narrowed is not None), None)
        rest = (origins[0].modulus, any(one.spread for one in origins), narrowed)
        if isinstance(codes, (list, tuple)):
            return [Origin(c, s, *rest) for c, s in zip(codes, shifts)]
        return Origin(codes, shifts, *rest)

    def shifted(self, node, name):
        """Returns the origin of a value plus or minus a constant whole number."""
        sides = list(node.args)
        known = [self.origin.get(one) if isinstance(one, torch.fx.Node) else None for one in sides]
        if (known[0] is None) == (known[1] is None) or (name == "sub" and known[0] is None):
            return None
        place = 0 if known[0] is not None else 1
        other = sides[1 - place]
        if isinstance(other, torch.fx.Node):
            if not self.is_constant(other):
                return None
            other = self.value[other]
        amount = torch.as_tensor(other)
        if amount.dtype.is_floating_point or amount.dtype == torch.bool:
            return None
        before, sign = known[place], -1 if name == "sub" else 1
        code, shift = torch.broadcast_tensors(before.code, before.shift + sign * amount)
        spread = before.spread or amount.numel() > 1
        return replace(before, code=code, shift=shift, spread=spread)

    def lookup_of(self, node):
        """Returns the lookup that a node is; None if it is none."""
        if node.op != "call_function" or op_name(node) not in TABLES:
            return None
        table, index = node.args[0], node.args[1]
        options = {}
        if op_name(node) == "index":
            if len(index) != 1:
                return None
            index = index[0]
        elif op_name(node) == "index_select":
            if node.args[1] != 0:
                return None
            index = node.args[2]
        elif op_name(node) == "embedding_bag":
            arguments = dict(zip(
                ("table", "index", "bounds", "scale", "mode", "sparse", "weights", "last_bound",
                 "padding"), node.args
            )) | dict(node.kwargs)
            padding = arguments.get("padding")
            options = {
                "pooling": ("sum", "mean", "max")[arguments.get("mode", 0)],
                "bounds": arguments["bounds"], "weights": arguments.get("weights"),
                "padding": padding, "last_bound": bool(arguments.get("last_bound")),
            }
        if not isinstance(table, torch.fx.Node) or not isinstance(index, torch.fx.Node):
            return None
        rows = self.value[table]
        if not self.is_constant(table) or table in self.by_shape or not self.needs[index]:
            return None
        if not rows.is_floating_point() or self.value[index].dtype == torch.bool:
            return None
        return Lookup(node, table, index, **options)
