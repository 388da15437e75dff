"""Captures a model as one graph of tensor operations, with the number of samples left open.

PyTorch's own `torch.export` does it. While it captures, three kinds of call have stand-ins, because
their sizes come from data: TorchRec's collections, packed sequences, and a choice of values by a
constant mask. The model itself is not changed.
"""

import contextlib
import io
import operator
import sys
import traceback
from types import SimpleNamespace

import torch
from torch import nn
from torch.nn.utils import rnn
from torch.overrides import TorchFunctionMode

from .graph import ATEN, OWN
from .torchrec_calls import Pooled, Sealed, Sequence, collections, keys_of

OLDEST = (2, 7)


def check_version():
    """Refuses a torch whose capture is not known to work."""
    found = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    if found < OLDEST:
        raise RuntimeError(
            f"export needs torch 2.7 or later, and this is torch {torch.__version__}: "
            "load the weights in an environment with a later torch and export there"
        )


def user_line(error):
    """Returns `FILE:LINE, CODE` of the user's own line that an error passed through."""
    seen = []
    while error is not None:
        seen += traceback.extract_tb(error.__traceback__)
        error = error.__cause__ or error.__context__
    return last_own(seen)


def last_own(seen):
    """Returns `FILE:LINE, CODE` of the last frame that is the user's own; None if there is none."""
    own = [frame for frame in seen if not frame.filename.startswith((*OWN, "<"))]
    inside = [frame for frame in own if frame.name != "<module>"]
    return f"{inside[-1].filename}:{inside[-1].lineno}, `{inside[-1].line}`" if inside else None


# --- packed sequences ---


class Place:
    """Where the rows of a step begin in the data of a packed sequence: a sum of `StepSizes`."""

    def __init__(self, step):
        self.step = step

    def behind(self, size):
        if size.step != self.step:
            raise ValueError("a packed sequence is read at a place that no sum of its sizes gives")
        return Place(self.step + 1)


class OfStep(int):
    """The number of samples in one step of a packed sequence. All samples stay in the step, and a
    write to the first `size` rows leaves the samples alone that have ended."""

    def __add__(self, other):
        if isinstance(other, Place) or self.step == other == 0:
            return (other if isinstance(other, Place) else Place(0)).behind(self)
        return int(self) + other

    __radd__ = __add__


class StepSizes(list):
    """Takes the place of the `batch_sizes` of a packed sequence."""

    def __init__(self, lengths, samples, steps):
        self.lengths = lengths
        for step in range(steps):
            # The loop over the steps fixes the number of samples: see `OfTwoSizes`.
            self.append(OfStep(samples))
            self[-1].step, self[-1].keep = step, lengths > step

    def cpu(self):
        return self

    tolist = cpu


class Padded:
    """Takes the place of a `PackedSequence`: padded rows `[B, L, ...]` and the lengths `[B]`."""

    def __init__(self, data, batch_sizes, sorted_indices=None, unsorted_indices=None):
        written = getattr(data, "of_step", {})
        if len(written) < len(batch_sizes):
            raise ValueError("a packed sequence is made of other values than one for each step")
        self.rows = torch.stack([written[step] for step in range(len(batch_sizes))], 1)
        self.lengths, self.sorted_indices = batch_sizes.lengths, sorted_indices

    @classmethod
    def of(cls, rows, lengths, sorted_indices):
        made = cls.__new__(cls)
        made.rows, made.lengths, made.sorted_indices = rows, lengths, sorted_indices
        return made

    @property
    def unsorted_indices(self):
        return self.sorted_indices

    @property
    def batch_sizes(self):
        return StepSizes(self.lengths, *self.rows.shape[:2])

    @property
    def data(self):
        data = self.rows.transpose(0, 1).flatten(0, 1)
        data.of_step = dict(enumerate(self.rows.unbind(1)))
        return data

    def __iter__(self):
        return iter((self.data, self.batch_sizes, self.sorted_indices, self.sorted_indices))


def every_sample(count):
    """Returns an order of samples that leaves them in their places, as an index or a sort."""
    order = torch.arange(count)
    order.is_every_sample = True
    return order


def is_every_sample(index):
    return getattr(index, "is_every_sample", False)


def pack_padded(input, lengths, batch_first=False, enforce_sorted=True):
    rows = input if batch_first else input.transpose(0, 1)
    order = None if enforce_sorted else every_sample(rows.shape[0])
    return Padded.of(rows, torch.as_tensor(lengths).to(torch.int64), order)


def pad_packed(sequence, batch_first=False, padding_value=0.0, total_length=None):
    keep = torch.arange(sequence.rows.shape[1]) < sequence.lengths[:, None]
    keep = keep.reshape(*keep.shape, *[1] * (sequence.rows.dim() - 2))
    rows = torch.where(keep, sequence.rows, padding_value)
    return rows if batch_first else rows.transpose(0, 1), sequence.lengths


def over_padded(real):
    """Returns a `forward` of GRU, RNN or LSTM that also takes `Padded` rows."""

    def forward(self, input, hx=None):
        if not isinstance(input, Padded):
            return real(self, input, hx)
        if getattr(self, "proj_size", 0):
            raise ValueError("a packed LSTM with proj_size has no counterpart in the car")
        rows, lengths, states = input.rows, input.lengths, []
        for layer in range(self.num_layers):
            made = [one_padded_layer(self, rows, lengths, hx, layer, way)
                    for way in range(1 + self.bidirectional)]
            rows = torch.cat([one for one, *_ in made], 2)
            states += [last for _, *last in made]
        hidden, *cell = (torch.stack(one) for one in zip(*states))
        input = Padded.of(rows, lengths, input.sorted_indices)
        return input, (hidden, *cell) if cell else hidden

    return forward


def one_padded_layer(module, rows, lengths, hx, layer, way):
    """Returns the outputs `[B, L, D]` of one layer in one direction, and its last states."""
    place = layer * (1 + module.bidirectional) + way
    weights, options = module.all_weights[place], (module.bias, 1, 0.0, False, False, True)
    zeros = rows.new_zeros(1, rows.shape[0], module.hidden_size)
    given = hx if isinstance(hx, (list, tuple)) else (hx, hx)
    first = [zeros if one is None else one[place : place + 1] for one in given]
    rows = turned(rows, lengths) if way else rows
    if module.mode == "LSTM":
        made = torch.lstm(rows, first, weights, *options)[0]
        last = [last_of(made, lengths), last_cell(weights, rows, made, *first, lengths)]
    else:
        call = {"GRU": torch.gru, "RNN_TANH": torch.rnn_tanh, "RNN_RELU": torch.rnn_relu}
        made = call[module.mode](rows, first[0], weights, *options)[0]
        last = [last_of(made, lengths)]
    return turned(made, lengths) if way else made, *last


def turned(rows, lengths):
    """Returns the rows of each sequence in the opposite order; rows behind its end are not used."""
    at = (lengths[:, None] - 1 - torch.arange(rows.shape[1])).clamp(min=0)
    return rows.gather(1, at[..., None].expand(-1, -1, rows.shape[2]))


def last_cell(weights, rows, outputs, hidden, cell, lengths):
    """Returns the cells of an LSTM behind the last row of each sequence, which `torch.lstm` gives
    for all rows alone. The graph has its steps only if the scores depend on the cells."""
    (into, over), (of_rows, of_states) = weights[:2], weights[2:] or (None, None)
    before = torch.cat([hidden[0][:, None], outputs[:, :-1]], 1)
    gates = nn.functional.linear(rows, into, of_rows) + nn.functional.linear(
        before, over, of_states)
    add, keep, made, _ = gates.chunk(4, 2)
    keep, made, cell = keep.sigmoid(), add.sigmoid() * made.tanh(), cell[0]
    for step in range(rows.shape[1]):
        after = keep[:, step] * cell + made[:, step]
        cell = torch.where(lengths[:, None] > step, after, cell)
    return cell


def last_of(rows, lengths):
    """Returns the last row of each sequence, `[B, D]`, of `rows` `[B, L, D]`."""
    # A sample without a row is one that the model leaves out, and its row is not used.
    at = (lengths - 1).clamp(min=0).reshape(-1, 1, 1).expand(-1, 1, rows.shape[2])
    return rows.gather(1, at).squeeze(1)


@contextlib.contextmanager
def padded_sequences():
    """Lets packed sequences stay padded: their lengths then are values and no sizes. A Transformer
    does not look at the values of its mask either: those of a causal one are a hint alone."""
    swaps = {
        id(rnn.pack_padded_sequence): pack_padded, id(rnn.pad_packed_sequence): pad_packed,
        id(rnn.PackedSequence): Padded,
        id(nn.modules.transformer._detect_is_causal_mask): (
            lambda mask, is_causal=None, size=None: is_causal is True),
    }
    places = [
        (module, name, value) for module in list(sys.modules.values())
        for name, value in list(getattr(module, "__dict__", {}).items()) if id(value) in swaps
    ]
    real = {kind: kind.forward for kind in (nn.GRU, nn.LSTM, nn.RNN)}
    for module, name, value in places:
        setattr(module, name, swaps[id(value)])
    for kind, forward in real.items():
        kind.forward = over_padded(forward)
    try:
        yield
    finally:
        for module, name, value in places:
            setattr(module, name, value)
        for kind, forward in real.items():
            kind.forward = forward


# --- constant masks ---


def is_mask(value):
    return torch.is_tensor(value) and value.dtype == torch.bool and value.dim() > 0


class Choices(TorchFunctionMode):
    """Records the boolean masks that choose values, or gives the choice a size that is known.

    A constant mask becomes constant positions, and one with one value of each sample a sum. A mask
    that leaves samples out leaves none out: what the model then writes by that mask is kept for
    the others. It also reads `x.data` as `x.detach()`, and steps of packed sequences. The samples
    keep their order where the model sorts them, as packed sequences ask for: the check compares
    the scores.
    """

    SELECT = (torch.masked_select, torch.Tensor.masked_select)
    SORT = (torch.sort, torch.Tensor.sort, torch.topk, torch.Tensor.topk)
    ORDER = (torch.argsort, torch.Tensor.argsort)
    ROWS = (torch.index_select, torch.Tensor.index_select)

    def __init__(self, samples, known=None):
        super().__init__()
        self.samples, self.seen, self.known = samples, [], known
        self.leaves_out = False  # whether a mask of the model leaves samples out

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if function == torch.Tensor.data.__get__:  # torch cannot capture it, but this is the same
            return args[0].detach()
        if function in (*self.SORT, *self.ORDER) and self.sorts_samples(function, *args, **kwargs):
            order = every_sample(self.samples)
            return order if function in self.ORDER else torch.return_types.sort(
                (args[0].clone(), order))
        if function in self.ROWS and is_every_sample((*args, *kwargs.values())[-1]):
            return args[0].clone()
        lookup = {nn.functional.embedding_bag: weighted_bag, nn.functional.embedding: short_rows}
        if function in lookup and self.known is not None:
            made = lookup[function](*args, **kwargs)
            if made is not None:
                return made
        if function in self.SELECT:
            mask = args[1] if len(args) > 1 else kwargs["mask"]
            constant = self.next_of(mask, args[0])
            if constant is not None:
                return select(args[0], mask, constant[-1])
            same = self.known is not None and mask.dim() == args[0].dim()
            if same and self.chooses_samples(mask):
                return args[0].flatten().clone()
        elif function is torch.Tensor.__getitem__:
            made = self.read(*args)
            if made is not None:
                return made
            args = (args[0], self.constant_index(args[1]))
        elif function is torch.Tensor.__setitem__ and self.write(*args):
            return None
        return function(*args, **kwargs)

    def read(self, values, index):
        """Returns `values[index]` if a choice gives its size; None for any other index."""
        # A choice is a copy: what the model then changes in place must not reach the values.
        whole = index if isinstance(index, tuple) else (index,)
        if any(map(is_every_sample, whole)):
            whole = [slice(None) if is_every_sample(one) else one for one in whole]
            return values[tuple(whole)].clone()
        first, *rest = index if isinstance(index, tuple) else (index,)
        if isinstance(first, slice) and isinstance(first.stop, Place):
            return values.of_step[first.stop.step - 1][(slice(None), *rest)]
        if self.known is None or not is_mask(index):
            return None
        constant = self.known[len(self.seen)] if len(self.seen) < len(self.known) else None
        if constant == EACH:
            self.seen.append(None)
            keep = index.reshape(*index.shape, *[1] * (values.dim() - index.dim()))
            return torch.where(keep, values, 0).sum(1).to(values.dtype)
        if constant is None and self.chooses_samples(index):
            self.seen.append(None)
            return values.clone()
        return None

    def write(self, values, index, given):
        """Writes to the samples that a mask or the size of a step names; returns whether it did."""
        if isinstance(index, slice) and isinstance(index.stop, Place):
            vars(values).setdefault("of_step", {})[index.stop.step - 1] = given
            return True
        if isinstance(index, slice) and isinstance(index.stop, OfStep) and not index.start:
            keep = index.stop.keep
        elif self.known is not None and is_mask(index) and self.chooses_samples(index):
            keep = index
        else:
            return False
        values.copy_(torch.where(keep.reshape(-1, *[1] * (values.dim() - 1)), given, values))
        return True

    def sorts_samples(self, function, values, *rest, k=None, **_rest):
        """Returns whether one value of each sample is sorted, and all samples are kept."""
        if self.known is None or values.dim() != 1:
            return False
        count = values.shape[0]
        if function in self.SORT[2:] and (rest[0] if k is None else k) != count:
            return False
        return isinstance(count, torch.SymInt) or count == self.samples

    def chooses_samples(self, mask):
        """Returns whether a mask has one value for each sample, or for each row of each sample."""
        count, *rest = mask.shape
        if isinstance(self.samples, torch.SymInt):
            chooses = isinstance(count, torch.SymInt) and all(
                isinstance(one, int) and one == 1 for one in rest)
        else:
            chooses = mask.numel() == count and count % self.samples == 0
        self.leaves_out = self.leaves_out or chooses
        return chooses

    def constant_index(self, index):
        whole = index if isinstance(index, tuple) else (index,)
        if not any(map(is_mask, whole)):
            return index
        made = []
        for one in whole:
            constant = self.next_of(one) if is_mask(one) else None
            made += [one] if constant is None or constant == EACH else constant[0]
        return tuple(made)

    def next_of(self, mask, values=None):
        """Records a mask; returns its positions if they are constant."""
        place = len(self.seen)
        self.seen.append(None)
        if self.known is not None:
            return self.known[place] if place < len(self.known) else None
        if values is None:
            self.seen[place] = mask.clone()
        elif mask.dim() != values.dim() or not self.chooses_samples(mask):
            # The mask of one sample, if all have the same.
            whole = mask.expand(torch.broadcast_shapes(mask.shape, values.shape))
            same = len(whole) > 0 and bool((whole == whole[:1]).all())
            self.seen[place] = whole[:1].clone() if same else None
        return None


class WholeTables(TorchFunctionMode):
    """Leaves the rows of tables with `max_norm` as they are: an export changes no model."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        made = short_rows(*args, **kwargs) if function is nn.functional.embedding else None
        return function(*args, **kwargs) if made is None else made


def short_rows(keys, table, _padding=None, max_norm=None, norm_type=2.0, *_, **_rest):
    """Returns the rows of keys, with norms of at most `max_norm`; None without it. PyTorch makes
    the rows in the table shorter, which no request may."""
    if max_norm is None:
        return None
    rows = nn.functional.embedding(keys, table)
    norms = torch.linalg.vector_norm(rows, norm_type, -1, keepdim=True)
    return torch.where(norms > max_norm, rows * (max_norm / (norms + 1e-7)), rows)


def weighted_bag(keys, table, *_, per_sample_weights=None, padding_idx=None, max_norm=None,
                 **_rest):
    """Returns the weighted sums of the rows of keys `[B, L]`; None for any other bag."""
    if max_norm is not None:
        raise ValueError("EmbeddingBag changes its table by max_norm: sum the rows of nn.Embedding")
    if per_sample_weights is None or keys.dim() != 2:
        return None
    if padding_idx is not None:
        per_sample_weights = per_sample_weights * (keys != padding_idx % len(table))
    return (nn.functional.embedding(keys, table) * per_sample_weights[..., None]).sum(1)


def select(values, mask, positions):
    """Returns `values.masked_select(mask)` for a mask that is true at `positions` of a sample."""
    whole = values.expand(torch.broadcast_shapes(mask.shape, values.shape))
    return whole.flatten(1)[:, positions].flatten()


EACH = "one value of each sample"


def constant_masks(one, other):
    """Returns the positions of the masks that two runs on different samples have in common, by axis
    and in the flat mask; EACH for masks with one value of each sample; None for other masks."""

    def positions(a, b):
        if a is None or b is None or a.dim() != b.dim():
            return None
        if a.dim() == 2 and len(a) != len(b) and all(bool((m.sum(1) == 1).all()) for m in (a, b)):
            return EACH
        if a.shape != b.shape or bool((a != b).any()):
            return None
        return a.nonzero(as_tuple=True), a.flatten().nonzero()[:, 0]

    return [positions(a, b) for a, b in zip(one, other)] if len(one) == len(other) else []


# --- the capture ---


@contextlib.contextmanager
def fixed_sizes(lines):
    """Adds to `lines` the user's line of each place where a size becomes a number of Python."""
    from torch.fx.experimental.sym_node import SymNode  # from torch 2.1 on

    real = SymNode.guard_int

    def guard_int(node, *rest):
        if node.maybe_as_int() is None:
            lines.append(last_own(traceback.extract_stack()))
        return real(node, *rest)

    SymNode.guard_int = guard_int
    try:
        yield
    finally:
        SymNode.guard_int = real


class Captured(nn.Module):
    """The model as a function of flat tensors: leaves of the batch, then vectors of collections."""

    def __init__(self, source, masks, per_sample):
        super().__init__()
        self.model, call = source.model, source.call
        self.call = lambda *values, **named: call(*values, **named)  # no submodule twice
        self.flat, self.pick, self.masks = source.flat, source.pick, masks
        # An object of its own, because torch restores the module's attributes after a capture.
        self.per_sample = per_sample
        self.found = SimpleNamespace(leaves_out=False, of_two_sizes=False)

    def forward(self, *tensors):
        leaves = len(self.flat.tensors)
        vectors = list(tensors[leaves:])

        def answer(name, module, forward, features):
            if hasattr(module, "embedding_bag_configs"):
                return Pooled({key: vectors.pop(0) for key, *_ in keys_of(module)})
            return {key: Sequence(vectors.pop(0), vectors.pop(0)) for key, *_ in keys_of(module)}

        positional, named = self.flat.rebuild(tensors[:leaves], lambda value: Sealed())
        samples = tensors[self.per_sample.index(True)].shape[0]
        choices = Choices(samples, self.masks)
        with collections(self.model, answer), padded_sequences(), choices:
            result = self.pick(self.call(*positional, **named))
        self.found.leaves_out = choices.leaves_out
        return result


def program_of(module, tensors, shapes):
    """Returns the exported program of `module` for tensors of these dynamic shapes."""
    # torch prints the graph of a failed capture; the error below has what a user needs.
    quiet = io.StringIO()
    with torch.no_grad(), contextlib.redirect_stdout(quiet), contextlib.redirect_stderr(quiet):
        return torch.export.export(module, tuple(tensors), dynamic_shapes=shapes, strict=False)


# Operations that torch makes of others: transforms of three, and `hstack` and its kind, which would
# become sequences of ONNX, of `cat`.
COMPOSED = ("fft_", "hstack", "vstack", "dstack", "column_stack", "row_stack", "atleast_")


def composed():
    """Returns how torch makes these operations of others, for `run_decompositions`."""
    known = torch.export.default_decompositions().items()
    return {operation: made for operation, made in known
            if operation.name().split("::")[1].startswith(COMPOSED)}


def fixes_samples(program, per_sample):
    """Returns whether a program holds for one number of samples only. Its symbol may still stand at
    the input, but then has one value."""
    names = program.graph_signature.user_inputs
    sizes = {node.name: node.meta["val"].shape for node in program.graph.nodes
             if node.name in names}
    fixed = lambda size: isinstance(size, int) or size.node.maybe_as_int() is not None
    return any(whole and fixed(sizes[name][0]) for name, whole in zip(names, per_sample))


SIZES = (61, 53)  # numbers of samples: primes, of which no size of a model is a multiple


class OfTwoSizes:
    """The graph of a model that fixes the number of samples, from its graphs for two numbers: a
    size in which they differ follows from the number of samples."""

    def __init__(self, captured, tensors):
        graphs = []
        for count in SIZES:
            part = [
                tensor[torch.arange(count) % len(tensor)] if whole else tensor
                for tensor, whole in zip(tensors, captured.per_sample)
            ]
            program = program_of(captured, part, None)
            graphs.append(program.run_decompositions(composed()).module())
        self.module, other = graphs
        nodes, twins = (list(one.graph.nodes) for one in graphs)
        if [node.target for node in nodes] != [node.target for node in twins]:
            raise ValueError("the operations follow from the number of samples")
        self.place = {node: at for both in (nodes, twins) for at, node in enumerate(both)}
        inputs = [node for node in nodes if node.op == "placeholder"]
        self.first = nodes[nodes.index(inputs[-1]) + 1]
        with self.module.graph.inserting_before(self.first):
            self.samples = self.module.graph.call_function(
                torch.ops.aten.sym_size.int, (inputs[captured.per_sample.index(True)], 0))
        self.sizes = {}
        for node, twin in zip(nodes, twins):
            if node.op == "get_attr":
                self.same_constant(node, other)
            node.args = self.merged(node.args, twin.args)
            node.kwargs = {name: self.merged(one, twin.kwargs[name])
                           for name, one in node.kwargs.items()}
        self.module.recompile()

    def same_constant(self, node, other):
        """Lets rows that are the same for each sample, as `numpy.tile` makes them, be as many as
        the samples."""
        get = operator.attrgetter(node.target)
        one, two = get(self.module), get(other)
        if not node.users or not torch.is_tensor(one) or torch.equal(one, two):
            return
        is_row_of_each = (*one.shape[:1], *two.shape[:1]) == SIZES
        row = one[:1] if is_row_of_each else None
        if row is None or bool((one != row).any()) or bool((two != row).any()):
            raise ValueError(f"`{node.target}` follows from the number of samples")
        parent, _, name = node.target.rpartition(".")
        setattr(self.module.get_submodule(parent), name, row)
        with self.module.graph.inserting_before(min(node.users, key=self.place.get)):
            rows = self.module.graph.call_function(
                ATEN.expand.default, (node, [self.samples, *row.shape[1:]]))
        self.place[rows] = self.place[node]
        node.replace_all_uses_with(rows, delete_user_cb=lambda user: user is not rows)

    def merged(self, one, twin):
        if isinstance(one, (list, tuple)) and len(one) == len(twin):
            return type(one)(self.merged(*both) for both in zip(one, twin))
        if isinstance(one, torch.fx.Node):
            if self.place[one] != self.place.get(twin):
                raise ValueError("the operands follow from the number of samples")
            return one
        if one == twin:
            return one
        slope, rest = divmod(one - twin, SIZES[0] - SIZES[1]) if isinstance(one, int) else (0, 1)
        if rest:
            raise ValueError(f"{one} follows from the number of samples")
        return self.size(slope, one - slope * SIZES[0])

    def size(self, slope, rest):
        """Returns the node of `slope * samples + rest`."""
        if (slope, rest) not in self.sizes:
            with self.module.graph.inserting_before(self.first):
                made = self.samples
                for function, by, neutral in ((operator.mul, slope, 1), (operator.add, rest, 0)):
                    if by != neutral:
                        made = self.module.graph.call_function(function, (made, by))
            self.sizes[slope, rest] = made
        return self.sizes[slope, rest]


def capture(captured, tensors):
    """Returns the graph of `captured` as a GraphModule.

    # Errors
    ValueError with the user's line if a size or a branch follows from values.
    """
    auto, batch = torch.export.Dim.AUTO, torch.export.Dim("batch", min=2)
    errors, lines = [], []
    # The second try is for models that split a batch into parts of a fixed size: with one name for
    # the number of samples torch demands that every number works in the same way.
    for samples in (batch, auto):
        shapes = tuple(
            {0: samples if whole else auto} if tensor.dim() else {}
            for tensor, whole in zip(tensors, captured.per_sample)
        )
        try:
            with fixed_sizes(lines):
                program = program_of(captured, tensors, {"tensors": shapes})
            module = program.run_decompositions(composed()).module()
        except Exception as error:  # torch.export has no common class of its errors
            errors.append(error)
            continue
        # AUTO may fix the number of samples to that of the sample batch, without a word.
        if not fixes_samples(program, captured.per_sample):
            return module
    try:
        captured.found.of_two_sizes = True
        return OfTwoSizes(captured, tensors).module
    except Exception as error:
        errors.append(error)
    error = errors[0]
    if "specialized it to be a constant" in str(error):
        fixed = next((f" at {line}" for line in lines if line), "")
        raise ValueError(
            f"the model fixes the number of samples of its batch{fixed}: take it from "
            "`x.shape[0]`, which stays open while torch captures, and write no loop over the "
            "samples"
        ) from None
    where, said = user_line(error), str(error).strip().splitlines()
    raise ValueError(
        "the model cannot be captured as one graph"
        + (f" because of {where}" if where else "")
        + ": a Python branch, loop or size must not depend on values of the inputs or on the "
        "number of samples; write it with tensor operations such as torch.where and masks. "
        f"torch says: {type(error).__name__}: {said[0] if said else ''}"
    ) from None  # torch's own pages of frames and graphs do not help a user
