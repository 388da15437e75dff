"""Compares the cut network of an export with the model, before anything is written.

The network must give the model's scores on the sample batch, on other keys, on short and long bags,
on one sample and on many. Nothing here changes the network.
"""

import copy
import traceback

import torch
from torch.overrides import TorchFunctionMode

from .batch import Leaf
from .capture import Choices, is_mask, last_own
from .graph import op_name, source_line

MANY = 300  # samples of a batch that no sample batch has
TOLERANCE = 1e-4  # largest difference between the model and the cut network
FLAT = 10 * TOLERANCE  # of scores that differ by less, a wrong network may be within the tolerance


def check(exporter, network):
    """Compares the cut network with the model on the batch, on other keys, on one sample and twice
    on the same samples.

    # Errors
    ValueError that names the input which breaks it.
    """
    source, leaves = exporter.source, exporter.leaves
    network = with_ordered_choices(network)
    exporter.left_out, exporter.compared = LeftOut(), {}
    with exporter.left_out:
        again = source.scores(exporter.flat)
    if any(differ(a, b) for a, b in zip(again, exporter.scores)):
        raise ValueError(
            "two calls of the model with the same samples give different scores: it draws random "
            "numbers or keeps a state also in eval(); such a model has no score to reproduce"
        )
    difference(exporter, network, leaves, exporter.calls, exporter.scores, "the sample batch")
    if not exporter.calls:
        for seed in range(3 if exporter.leaves_out else 2):
            changed = [other_rows(exporter, place, seed) for place in range(len(leaves))]
            if seed == 2:
                changed = [without_values(exporter, place, leaf)
                           for place, leaf in enumerate(changed)]
            try:
                compare(exporter, network, changed)
            except ValueError as error:
                raise ValueError(f"{error}{culprits(exporter, network, changed)}") from None
        if exporter.of_two_sizes:
            other_sizes(exporter, network)
    if exporter.leaves_out:
        exporter.left_out.check()
    numbers_of_samples(exporter, network)
    if all(leaf.per_sample for leaf in leaves) and not exporter.calls:
        one_sample(exporter)
    for name, parts in exporter.compared.items():
        flat_scores(exporter, name, torch.cat(parts))


def flat_scores(exporter, name, scores):
    """Says so if the compared scores of an output hardly differ.

    A tolerance as small as their spread would refuse good models, whose scores differ by the
    rounding of float32.
    """
    scores = scores[scores.isfinite()]
    if not len(scores):
        return
    spread = (scores.max() - scores.min()).item()
    if spread <= FLAT * (1 + scores.abs().max().item()):
        exporter.note(
            f"output `{name}`: the scores of all {len(scores)} compared rows are within "
            f"{spread:.1g} of each other, so the check may miss a wrong network: train the model, "
            "or spread its weights"
        )


def with_ordered_choices(network):
    """Returns the network with each `topk` as the car runs it: of equal values the first ones.

    PyTorch leaves the choice among equal values open. A model whose scores depend on that choice
    then differs from its network.
    """
    ordered = torch.fx.GraphModule(network, copy.deepcopy(network.graph))
    for node in ordered.graph.nodes:
        if node.target is torch.ops.aten.topk.default:
            node.target = first_of_equal
    ordered.recompile()
    return ordered


def first_of_equal(values, k, dim=-1, largest=True, sorted=True):
    found = torch.sort(values, dim=dim, descending=largest, stable=True)
    return found.values.narrow(dim, 0, k), found.indices.narrow(dim, 0, k)


def culprits(exporter, network, changed):
    """Returns which inputs, changed alone, break the network."""
    found = []
    for place, leaf in enumerate(changed):
        alone = [*exporter.leaves[:place], leaf, *exporter.leaves[place + 1 :]]
        try:
            compare(exporter, network, alone)
        except ValueError:
            found.append(f"`{leaf.name}`")
    return f"; the values of {', '.join(found)} break it" if found else ""


def compare(exporter, network, leaves):
    try:
        with exporter.left_out:
            scores = exporter.source.scores(exporter.flat, [leaf.tensor for leaf in leaves])
    except (RuntimeError, IndexError, TypeError, ValueError) as error:
        said = str(error).splitlines()[0]
        exporter.note(f"the model fails on other rows ({said}), so they were not compared")
        return
    difference(exporter, network, leaves, [], scores, "other rows")


def answer(network, inputs):
    """Returns the outputs of the network.

    # Errors
    ValueError if the network was captured for one number of samples only.
    """
    try:
        with torch.no_grad():
            return network(*inputs)
    except (RuntimeError, IndexError) as error:
        raise ValueError(
            f"the network does not run with {len(inputs[0])} samples, because the model fixes the "
            f"number of samples of its batch: {str(error).splitlines()[0]}"
        ) from error


def difference(exporter, network, leaves, calls, scores, what):
    followed = exporter.follow(leaves, calls) if leaves is not exporter.leaves else (
        exporter.made.followed)
    inputs = exporter.network_inputs(followed, leaves)
    found = answer(network, inputs)
    for name, a, b in zip(exporter.output_names, found, scores):
        exporter.compared.setdefault(name, []).append(b[:, 0])  # the value that is the score
        if differ(a, b):
            if a.shape != b.shape:
                raise ValueError(
                    f"output `{name}` of the network has the shape {list(a.shape)}, and the "
                    f"model's {list(b.shape)} on {what}"
                )
            most = (a - b).abs().max().item()
            choices = [one for one in network.graph.nodes if one.target is first_of_equal]
            if not choices or not takes_equal_values(exporter, leaves, found):
                raise ValueError(
                    f"{large_number(network, inputs)}output `{name}` of the network behind the "
                    f"lookups differs from the model's by {most:.2g} on {what}"
                )
            said = (
                f"{source_line(choices[0])}: the scores depend on which of equal values `topk` "
                "takes, an order that PyTorch leaves open: make the values differ, or sort with "
                "`stable=True`"
            )
            if leaves is exporter.leaves:
                raise ValueError(f"{said}; output `{name}` differs by {most:.2g} on {what}")
            # The sample batch has no such rows, and in these ones any choice is PyTorch's.
            exporter.note(said)
            return


class Ordered(TorchFunctionMode):
    """Lets a model take the first ones of equal values."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function in (torch.topk, torch.Tensor.topk):
            made = first_of_equal(*args, **(kwargs or {}))
            return torch.return_types.topk(made)
        return function(*args, **(kwargs or {}))


def takes_equal_values(exporter, leaves, found):
    """Returns whether the model gives the scores of the network once both choose alike."""
    if not leaves:
        return False
    with torch.no_grad(), Ordered():
        scores = exporter.source.scores(exporter.flat, [leaf.tensor for leaf in leaves])
    return not any(differ(a, b) for a, b in zip(found, scores))


def differ(a, b):
    if a.shape != b.shape:
        return True
    near = b.isfinite() & ((a - b).abs() <= TOLERANCE * (1 + b.abs()))
    return not bool(((a == b) | (a.isnan() & b.isnan()) | near).all())


class LeftOut(TorchFunctionMode):
    """Records by line whether a mask of samples has ever left one out."""

    CHOICES = (torch.Tensor.__getitem__, torch.Tensor.__setitem__, *Choices.SELECT)

    def __init__(self):
        super().__init__()
        self.found = {}

    def __torch_function__(self, function, types, args=(), kwargs=None):
        mask = args[1] if function in self.CHOICES and len(args) > 1 else None
        if is_mask(mask) and len(mask) == mask.numel() == len(args[0]):
            line = last_own(traceback.extract_stack())
            self.found[line] = self.found.get(line, False) or not bool(mask.all())
        return function(*args, **(kwargs or {}))

    def check(self):
        for line, left_out in self.found.items():
            if not left_out:
                raise ValueError(
                    f"{line}: no compared batch has a sample that this mask leaves out, so its "
                    "effect is not known: pass a batch with such samples"
                )


def other_sizes(exporter, network):
    """Compares batches of other numbers of samples: the graph was made of those for two numbers."""
    for count in (1, 2, 3, 4, 5, 7, MANY):
        at = torch.arange(count)
        leaves = [
            Leaf(leaf.name, leaf.tensor[at % len(leaf.tensor)], True) if leaf.per_sample else leaf
            for leaf in exporter.leaves
        ]
        try:
            compare(exporter, network, leaves)
        except ValueError as error:
            raise ValueError(
                f"the model follows another path for {count} samples: {error}"
            ) from None


def numbers_of_samples(exporter, network):
    """Scores one sample alone, which is what a car often asks for, and more than the batch has."""
    inputs = exporter.network_inputs(exporter.made.followed, exporter.leaves)
    many = torch.arange(MANY) % len(inputs[0])
    alone = answer(network, [one[:1] for one in inputs])
    together = answer(network, [one[many] for one in inputs])
    for name, a, more, b in zip(exporter.output_names, alone, together, exporter.scores):
        if differ(a, b[:1]) or differ(more, b[many]):
            raise ValueError(
                f"{mixing_line(network, inputs)}the model lets the samples of a batch reach each "
                f"other: output `{name}` of a sample differs when the sample is scored alone or in "
                f"a batch of {MANY}"
            )


class Values(torch.fx.Interpreter):
    """Runs a network and keeps the value of each node."""

    def __init__(self, network, inputs):
        super().__init__(network, garbage_collect_values=False)
        self.value = {}
        with torch.no_grad():
            self.run(*inputs)

    def run_node(self, node):
        self.value[node] = super().run_node(node)
        return self.value[node]


def large_number(network, inputs):
    """Returns the user's line of whole numbers that the car's f32 does not hold."""
    for node, value in Values(network, inputs).value.items():
        if not torch.is_tensor(value) or value.is_floating_point() or value.is_complex():
            continue
        inexact = value[value.float().double() != value.double()]
        if "stack_trace" in node.meta and inexact.numel():
            return (
                f"{source_line(node)}: `{op_name(node)}` makes {int(inexact[0])}, and the car "
                f"computes whole numbers up to 2^24 exactly: "
            )
    return ""


def mixing_line(network, inputs):
    """Returns the user's line of the first value of a sample that the other samples change."""
    both = Values(network, inputs), Values(network, [one[:1] for one in inputs])
    for node in network.graph.nodes:
        together, alone = (one.value[node] for one in both)
        if not torch.is_tensor(alone) or not alone.is_floating_point() or not alone.numel():
            continue
        own = together.shape[0] == len(inputs[0]) * len(alone) if alone.dim() else False
        if own and together.shape[1:] == alone.shape[1:] and differ(together[: len(alone)], alone):
            return f"{source_line(node)}: "
    return ""


def one_sample(exporter):
    """Says so if the model itself does not take one sample."""
    try:
        exporter.source.scores(exporter.flat, [leaf.tensor[:1] for leaf in exporter.leaves])
    except (RuntimeError, IndexError, TypeError, ValueError) as error:
        exporter.note(
            f"the model itself fails with one sample ({str(error).splitlines()[0]}); the exported "
            "network does not"
        )


def other_rows(exporter, place, seed):
    """Returns a leaf with other values: rows 0 and n - 1 and random ones for keys, short and long
    bags where there is a padding, and other samples' values for the rest."""
    leaf, draw = exporter.leaves[place], torch.Generator().manual_seed(seed)
    if leaf.bounds:
        return leaf
    tensor = leaf.tensor.clone()
    columns = [one for one in exporter.made.columns if one.leaf == place and one.call is None]
    if not leaf.per_sample:
        for column in columns:
            tensor = torch.randint(0, column.size, tensor.shape, generator=draw)
        return type(leaf)(leaf.name, tensor.to(leaf.tensor.dtype), False)
    order = torch.randperm(len(tensor), generator=draw)
    tensor = tensor[order]
    flat = tensor.reshape(len(tensor), -1)
    for column in columns:
        keys = torch.randint(0, column.size, (len(flat), column.hotness), generator=draw)
        keys[0], keys[1] = 0, column.size - 1
        if column.padding is not None:
            keys = keys.where(keys != column.padding, (column.padding + 1) % column.size)
            lengths = torch.randint(1, column.hotness + 1, (len(flat), 1), generator=draw)
            keys[torch.arange(column.hotness) >= lengths] = column.padding
        flat[:, list(column.columns)] = keys.to(flat.dtype)
    return type(leaf)(leaf.name, flat.reshape(tensor.shape), True)


def without_values(exporter, place, leaf):
    """Returns a leaf whose first samples have no keys and zeros for dense values, so that a mask of
    the model leaves them out."""
    if not leaf.per_sample:
        return leaf
    few = len(leaf.tensor) // 4 + 1
    flat = leaf.tensor.reshape(len(leaf.tensor), -1).clone()
    for column in exporter.made.columns:
        if column.leaf == place and column.padding is not None:
            flat[:few, list(column.columns)] = column.padding
    flat[:few, [at for one, at in exporter.made.dense if one == place]] = 0
    return type(leaf)(leaf.name, flat.reshape(leaf.tensor.shape), True)
