"""The arguments of a model as a flat list of tensors with names, and the way back.

A sample batch may be a tensor, a tuple or a dict of arguments, with tensors in nested dicts, lists
and objects. Nothing here runs the model.
"""

import copy
import inspect
from dataclasses import dataclass

import torch


@dataclass
class Leaf:
    """One tensor of the batch. `per_sample` says whether its first axis is the samples, and
    `bounds` whether it has the offsets of bags."""

    name: str
    tensor: torch.Tensor
    per_sample: bool
    bounds: bool = False

    @property
    def width(self):
        """Returns the number of values of one sample."""
        return self.tensor.shape[1:].numel()


def is_jagged(value):
    """Returns whether this is TorchRec's `KeyedJaggedTensor`, or has its interface."""
    return all(hasattr(value, name) for name in ("keys", "values", "lengths", "to_dict"))


def parameters_of(forward):
    """Returns the names of the positional parameters, whether `forward` takes any keyword, and
    whether it takes any number of values."""
    kinds = inspect.Parameter
    found = inspect.signature(forward).parameters.values()
    positional = (kinds.POSITIONAL_ONLY, kinds.POSITIONAL_OR_KEYWORD)
    names = [one.name for one in found if one.kind in positional]
    has = lambda kind: any(one.kind == kind for one in found)
    return names, has(kinds.VAR_KEYWORD), has(kinds.VAR_POSITIONAL)


def arguments(forward, batch):
    """Returns the positional arguments, as (name, value), and the named ones of a batch.

    A dict is the arguments by name if `forward` has parameters of these names. Otherwise it is the
    first argument, as packages with `forward(self, inputs)` take it. So is a tuple or list of
    several values, if `forward` has one parameter.
    """
    names, takes_any, takes_more = parameters_of(forward)
    if isinstance(batch, dict):
        if takes_any or set(batch) <= set(names):
            return [], dict(batch)
        return [("", batch)], {}
    if isinstance(batch, (list, tuple)) and len(batch) > 1 == len(names) and not takes_more:
        return [("", batch)], {}
    values = list(batch) if isinstance(batch, (list, tuple)) else [batch]
    names += [f"input{place}" for place in range(len(names), len(values))]
    alone = len(values) == 1 and not torch.is_tensor(values[0])
    return [("" if alone else name, value) for name, value in zip(names, values)], {}


def has_tensors(value, depth=4):
    """Returns whether a value is a tensor, or has one within `depth` levels."""
    if torch.is_tensor(value) or depth == 0:
        return torch.is_tensor(value)
    if isinstance(value, (dict, list, tuple)):
        parts = value.values() if isinstance(value, dict) else value
    elif isinstance(value, (type, torch.nn.Module)) or not hasattr(value, "__dict__"):
        return False
    else:
        parts = vars(value).values()
    return any(has_tensors(part, depth - 1) for part in parts)


class Flat:
    """The flat form of a batch: `leaves`, and `rebuild`, which puts other tensors in their place.

    A `KeyedJaggedTensor` is no leaf: `rebuild` puts `jagged(value)` in its place.
    """

    def __init__(self, forward, batch, change=lambda tensor: tensor):
        self.positional, self.named = arguments(forward, batch)
        self.found, self.jagged = [], []
        for name, value in [*self.positional, *self.named.items()]:
            self.collect(name, value)
        if not self.found and not self.jagged:
            raise ValueError("the batch has no tensor")
        self.names = unique([name for name, _ in self.found])
        self.tensors = [change(tensor) for _, tensor in self.found]

    def collect(self, path, value):
        if is_jagged(value):
            self.jagged.append(value)
        elif torch.is_tensor(value):
            self.found.append((path or "input", value))
        else:
            for key, part in parts_of(value):
                own = f"input{key}" if isinstance(key, int) else str(key)
                self.collect(f"{path}.{key}" if path else own, part)

    def leaves(self, samples, bagged=()):
        """Returns the leaves of a batch of `samples` samples. `bagged` has the keys and offsets of
        bags: as many keys as samples are still not one for each sample."""
        keys, bounds = ({id(one[place]) for one in bagged} for place in (0, 1))
        return [
            Leaf(name, tensor, tensor.dim() > 0 and len(tensor) == samples and
                 id(tensor) not in keys, id(tensor) in bounds)
            for name, tensor in zip(self.names, self.tensors)
        ]

    def rebuild(self, tensors, jagged=lambda value: value):
        """Returns positional and named arguments with `tensors` in the place of the leaves."""
        rest = iter(tensors)
        build = lambda value: rebuilt(value, rest, jagged)
        positional = [build(value) for _, value in self.positional]
        return positional, {name: build(value) for name, value in self.named.items()}


def parts_of(value):
    """Returns the named parts of a dict, list, tuple or object that may contain tensors."""
    if isinstance(value, dict):
        return list(value.items())
    if isinstance(value, (list, tuple)):
        return list(zip(getattr(value, "_fields", range(len(value))), value))
    if not has_tensors(value):
        return []
    # An object with one dict, such as RecBole's Interaction, lends its keys as names.
    parts = [(name, part) for name, part in vars(value).items() if has_tensors(part)]
    if len(parts) == 1 and isinstance(parts[0][1], dict):
        return list(parts[0][1].items())
    return parts


def rebuilt(value, rest, jagged):
    """Returns a copy of `value` whose tensors are the next ones of `rest`."""
    if is_jagged(value):
        return jagged(value)
    if torch.is_tensor(value):
        return next(rest)
    if isinstance(value, dict):
        made = copy.copy(value)
        made.update({key: rebuilt(part, rest, jagged) for key, part in value.items()})
        return made
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(rebuilt(part, rest, jagged) for part in value))
    if isinstance(value, (list, tuple)):
        return type(value)(rebuilt(part, rest, jagged) for part in value)
    if not has_tensors(value):
        return value
    made = copy.copy(value)
    for name, part in vars(value).items():
        if has_tensors(part):
            vars(made)[name] = rebuilt(part, rest, jagged)
    return made


def unique(names):
    """Returns the shortest endings of dotted paths that differ from each other, and are no place in
    a list."""
    last = [name.rsplit(".", 1)[-1] for name in names]
    return [
        short if last.count(short) == 1 and not short.isdigit() else name
        for short, name in zip(last, names)
    ]
