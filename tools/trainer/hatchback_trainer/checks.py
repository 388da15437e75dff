"""Compares the cut network of an export with the model, before anything is written.

The network must give the model's scores on the sample batch, on other keys, on short and long bags,
on one sample and on many. Nothing here changes the network.
"""

import copy

import torch

MANY = 300  # samples of a batch that no sample batch has
TOLERANCE = 1e-4  # largest difference between the model and the cut network


def check(exporter, network):
    """Compares the cut network with the model on the batch, on other keys, on one sample and twice
    on the same samples.

    # Errors
    ValueError that names the input which breaks it.
    """
    source, leaves = exporter.source, exporter.leaves
    network = with_ordered_choices(network)
    again = source.scores(exporter.flat)
    if any(differ(a, b) for a, b in zip(again, exporter.scores)):
        raise ValueError(
            "two calls of the model with the same samples give different scores: it draws random "
            "numbers or keeps a state also in eval(); such a model has no score to reproduce"
        )
    difference(exporter, network, leaves, exporter.calls, exporter.scores, "the sample batch")
    if not exporter.calls:
        for seed in range(2):
            changed = [other_rows(exporter, place, seed) for place in range(len(leaves))]
            try:
                compare(exporter, network, changed)
            except ValueError as error:
                raise ValueError(f"{error}{culprits(exporter, network, changed)}") from None
    numbers_of_samples(exporter, network)
    if all(leaf.per_sample for leaf in leaves) and not exporter.calls:
        one_sample(exporter)


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
        if differ(a, b):
            most = (a - b).abs().max().item()
            choices = [n for n in network.graph.nodes if n.target is first_of_equal]
            open_choice = (
                "; it takes the `topk` of equal values, an order that PyTorch leaves open: make "
                "them differ, or sort with `stable=True`" if choices else ""
            )
            raise ValueError(
                f"output `{name}` of the network behind the lookups differs from the model's by "
                f"{most:.2g} on {what}{open_choice}"
            )


def differ(a, b):
    return a.shape != b.shape or bool(((a - b).abs() > TOLERANCE * (1 + b.abs())).any())


def numbers_of_samples(exporter, network):
    """Scores one sample alone, which is what a car often asks for, and more than the batch has."""
    inputs = exporter.network_inputs(exporter.made.followed, exporter.leaves)
    many = torch.arange(MANY) % len(inputs[0])
    alone = answer(network, [one[:1] for one in inputs])
    together = answer(network, [one[many] for one in inputs])
    for name, a, more, b in zip(exporter.output_names, alone, together, exporter.scores):
        if differ(a, b[:1]) or differ(more, b[many]):
            raise ValueError(
                f"output `{name}` of a sample differs when the sample is scored alone or in a "
                f"batch of {MANY}: the model lets the samples of a batch reach each other"
            )


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
    tensor = leaf.tensor.clone()
    columns = [one for one in exporter.made.columns if one.leaf == place and one.call is None]
    if not leaf.per_sample:
        for column in columns:
            tensor = torch.randint(0, column_size(exporter, column), tensor.shape, generator=draw)
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


def column_size(exporter, column):
    rows = len(exporter.made.tables[column.tables[0]])
    return column.size or rows - column.shift
