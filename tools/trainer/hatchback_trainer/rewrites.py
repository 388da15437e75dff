"""Operations in forms that ONNX and the car's engine have: numbers of complex type as pairs of real
ones, Fourier transforms as products, and writes at computed places as comparisons.

Each function takes and returns tensors, so that PyTorch can trace it. Nothing here reads a file.
"""

import math

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

from .graph import ATEN, op_name, source_line

# --- complex numbers, `[..., 2]`: real and imaginary part ---

# Operations that do the same to both parts; by name, for all overloads.
SAME_FOR_BOTH = {
    "add", "alias", "cat", "clone", "contiguous", "copy", "detach", "div", "expand", "flatten",
    "flip", "index", "index_put", "index_select", "lift_fresh_copy", "mean", "narrow", "neg",
    "new_zeros", "permute", "repeat", "reshape", "roll", "rsub", "select", "select_scatter",
    "slice", "slice_scatter", "squeeze", "stack", "sub", "sum", "t", "transpose", "unsqueeze",
    "view", "zeros", "zeros_like",
}


# Operations that are linear in each of their two factors.
PRODUCTS = {"bmm", "einsum", "matmul", "mm", "mul"}


def is_complex(node):
    value = node.meta.get("val") if isinstance(node, torch.fx.Node) else None
    return torch.is_tensor(value) and value.dtype.is_complex


def operation(name):
    """Returns torch's own operation, such as `aten.view.default`."""
    own, overload = name.split(".")[-2:]
    return getattr(getattr(ATEN, own), overload)


def each_part(name, kinds, *args, **kwargs):
    """Returns what an operation makes of the real parts and of the imaginary ones. `kinds` says of
    each value in the flat list of arguments whether it is a pair, or a summand that is real."""
    target = operation(name)
    if "dtype" in kwargs:
        kwargs["dtype"] = torch.float32
    values, spec = tree_flatten(args)
    part = lambda value, kind, side: (
        value[..., side] if kind == "pair" else value * 0 if kind == "summand" and side else value)
    sides = [
        [part(value, kind, side) for value, kind in zip(values, kinds)] for side in (0, 1)]
    return torch.stack([target(*tree_unflatten(one, spec), **kwargs) for one in sides], -1)


def pair_of(value, *rest, **options):
    return torch.stack([value, torch.zeros_like(value)], -1)


def same_pair(value, *rest, **options):
    return value


def real_part(value):
    return value[..., 0]


def imaginary_part(value):
    return value[..., 1]


def conjugate(value):
    return torch.stack([value[..., 0], -value[..., 1]], -1)


def modulus_of(value):
    return torch.sqrt((value * value).sum(-1))


def pair_product(name, kinds, *args, **kwargs):
    """Returns the product of two pairs by an operation that is linear in each of them."""
    target, (values, spec) = operation(name), tree_flatten(args)
    first, second = (place for place, kind in enumerate(kinds) if kind == "pair")

    def part(a, b):
        chosen = list(values)
        chosen[first], chosen[second] = values[first][..., a], values[second][..., b]
        return target(*tree_unflatten(chosen, spec), **kwargs)

    return torch.stack([part(0, 0) - part(1, 1), part(0, 1) + part(1, 0)], -1)


def waves(values, frequencies, length, scale=1.0):
    """Returns cosines and sines, `[values, frequencies]`."""
    table = lambda wave: torch.tensor([
        [scale * wave(2 * math.pi * (a * b % length) / length) for b in range(frequencies)]
        for a in range(values)
    ], dtype=torch.float32)
    return table(math.cos), table(math.sin)


def normal(mode, length):
    return (1.0, length ** -0.5, 1 / length)[mode]


def real_to_complex(value, axes, mode, onesided):
    """`_fft_r2c`: the last of the axes becomes complex, then the others are transformed."""
    *others, axis = axes
    length, axis = value.shape[axis], axis % value.dim()
    count = length // 2 + 1 if onesided else length
    cosines, sines = waves(length, count, length, normal(mode, length))
    rows = value.movedim(axis, -1)
    pair = torch.stack([rows @ cosines, -(rows @ sines)], -1).movedim(-2, axis)
    return complex_to_complex(pair, others, mode, True) if others else pair


def complex_to_complex(pair, axes, mode, forward):
    """`_fft_c2c` of a pair, whose own last axis is no axis of the transform."""
    for axis in axes:
        axis %= pair.dim() - 1
        length = pair.shape[axis]
        cosines, sines = waves(length, length, length, normal(mode, length))
        sines = sines if forward else -sines
        rows = pair.movedim(axis, -2)
        real, imaginary = rows[..., 0], rows[..., 1]
        pair = torch.stack([
            real @ cosines + imaginary @ sines, imaginary @ cosines - real @ sines
        ], -1).movedim(-2, axis)
    return pair


def complex_to_real(pair, axes, mode, length):
    """`_fft_c2r`: the last of the axes has the frequencies 0 to `length // 2` of real values."""
    *others, axis = axes
    axis %= pair.dim() - 1
    pair = complex_to_complex(pair, others, mode, False) if others else pair
    cosines, sines = waves(length // 2 + 1, length, length, normal(mode, length))
    # All frequencies but the first, and the middle one of an even length, stand for two.
    twice = torch.tensor([
        [1.0 if k == 0 or 2 * k == length else 2.0] for k in range(length // 2 + 1)])
    rows = pair.movedim(axis, -2).narrow(-2, 0, length // 2 + 1)
    made = rows[..., 0] @ (cosines * twice) - rows[..., 1] @ (sines * twice)
    return made.movedim(-1, axis)


COMPLEX = {
    "_conj": conjugate, "_conj_physical": conjugate, "conj": conjugate,
    "conj_physical": conjugate, "resolve_conj": same_pair, "abs": modulus_of,
    "real": real_part, "imag": imaginary_part, "view_as_real": same_pair,
    "view_as_complex": same_pair, "_fft_c2c": complex_to_complex, "_fft_c2r": complex_to_real,
    "_fft_r2c": real_to_complex,
}


def rule_of(node):
    """Returns the function that makes pairs where a node makes complex numbers, and its first
    arguments."""
    name, given = op_name(node), tree_flatten(node.args)[0]
    if name in COMPLEX:
        return COMPLEX[name], ()
    if name in ("_to_copy", "to") and is_complex(node):
        return (same_pair if is_complex(given[0]) else pair_of), ()
    plain = "summand" if name in ("add", "rsub", "sub") else ""
    kinds = ["pair" if is_complex(one) else plain for one in given]
    if name in PRODUCTS and kinds.count("pair") == 2:
        return pair_product, (str(node.target), kinds)
    divides = name == "div" and is_complex(given[1])
    is_known = name in SAME_FOR_BOTH or name in PRODUCTS and kinds.count("pair") == 1
    if not is_known or divides or any(isinstance(one, complex) for one in given):
        raise ValueError(
            f"{source_line(node)}: `{name}` of complex numbers has no counterpart in the car; "
            "compute with their real and imaginary parts, as `view_as_real` gives them"
        )
    return each_part, (str(node.target), kinds)


def with_real_pairs(module):
    """Lets a captured graph compute with pairs of real numbers in place of complex ones."""
    found = [
        node for node in module.graph.nodes
        if is_complex(node) or any(map(is_complex, node.all_input_nodes))
    ]
    for node in found:
        if node.op == "get_attr":
            with module.graph.inserting_after(node):
                pair = module.graph.call_function(torch.view_as_real, (node,))
            node.replace_all_uses_with(pair, lambda user: user is not pair)
            pair.meta = dict(node.meta)
        elif node.op == "call_function":
            node.target, first = rule_of(node)
            node.args = (*first, *node.args)
        else:
            raise ValueError("an input or a score is complex; pass real and imaginary parts")
    if found:
        module.recompile()
    return module


# --- writes and reads at computed places ---


def scattered(values, axis, places, given, how="set"):
    """Returns `values` with `given` written at `places` on an axis; of equal places the last one
    counts. `how` is "set", "sum", "amax" or "amin". Other axes have equal sizes."""
    axis %= values.dim()
    given = given if torch.is_tensor(given) else torch.full_like(places, given, dtype=values.dtype)
    behind = [1] * (values.dim() - axis - 1)
    all_places = torch.arange(values.shape[axis]).reshape(-1, *behind)
    hit = places.unsqueeze(axis + 1) == all_places
    if how == "set":
        count = places.shape[axis]
        numbers = torch.arange(1, count + 1).reshape(-1, 1, *behind)
        last = torch.where(hit, numbers, 0).amax(axis)
        return torch.where(last > 0, given.gather(axis, (last - 1).clamp(min=0)), values)
    spread = given.unsqueeze(axis + 1)
    if how == "sum":
        return values + torch.where(hit, spread, torch.zeros_like(spread)).sum(axis)
    # The largest of what was written, where anything was; the least is that of the negatives.
    sign = 1 if how == "amax" else -1
    least = torch.finfo(torch.float32).min
    most = torch.where(hit, sign * spread, least).amax(axis)
    return torch.where(hit.any(axis), sign * torch.maximum(sign * values, most), values)


def filled_by_mask(values, mask, number):
    """Returns `values` with a number where a mask of their first axes is true."""
    behind = [1] * (values.dim() - mask.dim())
    return torch.where(mask.reshape(*mask.shape, *behind), number, values)


def in_range(places, size):
    """Returns places of which negative ones count from the end, as in Python."""
    return torch.where(places < 0, places + size, places)


def row_of_each(values, places, axis=1):
    """Returns `values[n, places[n, ...]]` for each sample `n`, `[*places, *rest]`; the places may
    be those of a later axis."""
    values = values.movedim(axis, 1)
    rest = values.shape[2:]
    at = in_range(places, values.shape[1]).reshape(values.shape[0], -1, *[1] * len(rest))
    found = values.gather(1, at.expand(-1, -1, *rest))
    return found.reshape(-1, *places.shape[1:], *rest)


def same_of_each(values, places):
    """Returns `values[n, places[0, ...]]` for each sample `n`, with the same places for all."""
    found = values.index_select(1, in_range(places, values.shape[1]).flatten())
    return found.reshape(-1, *places.shape[1:], *values.shape[2:])


def put_in_each(values, places, given, accumulate=False):
    """Returns `values`, `[B, N]`, with `given[n, i]` written at `places[n, i]` of sample `n`."""
    at = in_range(places, values.shape[1])
    given = given.expand_as(at).reshape(values.shape[0], -1)
    at = at.reshape(values.shape[0], -1)
    return scattered(values, 1, at, given, "sum" if accumulate else "set")


def bucket_of(values, boundaries, right=False):
    """Returns how many boundaries are below each value, or not above it if `right`: all for NaN."""
    values = values[..., None]
    behind = (boundaries > values) if right else (boundaries >= values)
    return torch.logical_not(behind).sum(-1)


def subtracted(values, number):
    """Returns `number - values` of whole numbers, for which PyTorch's own form has no ONNX."""
    return number - values.float()
