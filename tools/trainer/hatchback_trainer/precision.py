"""A model of another precision as the car computes it: in float32, with the model's own weights.

The model itself is not changed.
"""

import copy
from types import MethodType

import torch

from .graph import MOVES, op_name, source_line

OTHERS = (torch.float16, torch.bfloat16, torch.float64)
APART = 0.05  # largest difference of the scores that rounding in another precision explains


def name_of(dtype):
    return str(dtype).removeprefix("torch.")


def precisions(model):
    """Returns the types, other than float32, of the model's parameters and buffers."""
    owner = model if isinstance(model, torch.nn.Module) else model.__self__
    given = {one.dtype for one in [*owner.parameters(), *owner.buffers()]}
    return [one for one in OTHERS if one in given]


def in_float32(model):
    """Returns a copy of a model, or of a method of one, in float32. It shares what is float32."""
    owner = model if isinstance(model, torch.nn.Module) else model.__self__
    shared = {
        id(one): one for one in [*owner.parameters(), *owner.buffers()] if one.dtype not in OTHERS}
    copied = copy.deepcopy(owner, shared)
    with torch.no_grad():
        copied.float()
    return copied if model is owner else MethodType(model.__func__, copied)


def floats_of(value):
    """Returns a tensor with its floats in float32."""
    return value.float() if torch.is_tensor(value) and value.dtype in OTHERS else value


def of_the_scores(followed):
    """Returns the nodes from which the scores follow, in the graph's order, without constants."""
    seen = set()
    rest = list(next(one for one in followed.graph.nodes if one.op == "output").args[0])
    while rest:
        node = rest.pop()
        constant = followed.is_constant(node) and node not in followed.by_shape
        if node not in seen and not constant:
            seen.add(node)
            rest += node.all_input_nodes
    return [node for node in followed.graph.nodes if node in seen]


def refuse_casts(followed, autocast):
    """Refuses an operation of the car that computes in less than float32. `autocast` is the first
    line of the model under autocast, whose nodes have no line of their own; None without it."""
    for node in of_the_scores(followed):
        value = followed.value[node]
        if op_name(node) in MOVES | {"embedding"}:  # a row of a constant table in half is exact
            continue
        if torch.is_tensor(value) and value.dtype in OTHERS[:2] and node.op == "call_function":
            raise ValueError(
                f"{autocast or source_line(node)}: `{op_name(node)}` computes in "
                f"{name_of(value.dtype)}, and the car in float32: export the model without "
                "autocast and casts, for example under `torch.autocast(..., enabled=False)`"
            )
