"""Small models, each of a kind that the field uses, and random batches of them."""

from types import MethodType

import numpy
import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils import rnn

B, KEYS, LONG = 40, 50, 6


def net(width):
    return nn.Sequential(nn.Linear(width, 8), nn.ReLU(), nn.Linear(8, 1))


def ids(*shape, low=0, high=KEYS):
    return torch.randint(low, high, shape)


def history():
    """Returns keys 1 to 49, `[B, 6]`, padded with 0 at the end, and their lengths."""
    lengths = torch.randint(1, LONG + 1, (B,))
    return ids(B, LONG, low=1) * (torch.arange(LONG) < lengths[:, None]), lengths


def padded_by_last():
    rows = history()[0]
    return rows.where(rows > 0, KEYS - 1)


class Model(nn.Module):
    """A model with one table, a network and a `forward` of the test."""

    def __init__(self, forward, width, **modules):
        super().__init__()
        self.e, self.n = nn.Embedding(KEYS, 4), net(width)
        for name, module in modules.items():
            setattr(self, name, module)
        self.forward = MethodType(forward, self)  # with the parameters' own names


def last_of(m, history, length):
    rows = m.g(m.e(history))[0]
    return m.n(rows.gather(1, (length - 1).view(-1, 1, 1).expand(-1, 1, 4)).squeeze(1))


def packed(m, history, length):
    rows = nn.utils.rnn.pack_padded_sequence(
        m.e(history), length, batch_first=True, enforce_sorted=False)
    rows, _ = nn.utils.rnn.pad_packed_sequence(m.g(rows)[0], batch_first=True)
    return m.n(rows.sum(1))


def mean_of_keys(m, history, padding=0):
    keep = (history != padding).float()[..., None]
    return m.n((m.e(history) * keep).sum(1) / keep.sum(1).clamp(min=1))


def attention(m, history):
    rows = m.e(history) + m.p(torch.arange(LONG))
    return m.n(functional.scaled_dot_product_attention(rows, rows, rows).mean(1))


def tiled(m, history):
    places = numpy.tile(numpy.arange(LONG), [history.shape[0], 1])
    return m.n((m.e(history) * m.p(torch.LongTensor(places))).sum(1))


def pairs(m, fields):
    rows = m.e(fields)
    return m.n(torch.masked_select(rows @ rows.transpose(1, 2), m.upper).view(-1, 15))


def target_attention(m, history, item):
    rows, item = m.e(history), m.e(item)
    scores = (rows * item[:, None]).sum(2).masked_fill(history == 0, -1e9)
    return m.n(torch.cat([(torch.softmax(scores, 1)[..., None] * rows).sum(1), item], 1))


def shifted(m, x):
    keys = x + m.shift
    return m.first(keys).sum(1) + m.n(m.second(keys).flatten(1))


def wide_and_deep(m, user):
    return m.wide(user) + m.n(m.e(user))


def wide_and_other(m, user, other):
    return m.wide(user) + m.n(m.e(other))


def scaled_bags(m, words, offsets):
    return m.n(m.bag(words * 2, offsets))


def bags(m, words, offsets, price):
    return torch.sigmoid(m.n(torch.cat([m.bag(words, offsets), price[:, None]], 1)))


def fourier_filter(m, history):
    rows = torch.fft.rfft(m.e(history), dim=1, norm="ortho") * torch.view_as_complex(m.w)
    return m.n(torch.fft.irfft(rows, n=LONG, dim=1, norm="ortho").sum(1))


def correlations(m, history):
    rows = m.e(history)
    product = torch.einsum("bld,de->ble", torch.fft.fft(rows), torch.fft.fft(m.e.weight[:4]))
    product = product * torch.conj(torch.fft.fft(rows.flip(1)))
    product = (product + torch.fft.fft2(rows) / 3 - rows).transpose(1, 2)
    parts = torch.fft.ifft(product).real.sum(2) + product.abs().mean(2) + product.imag[:, :, 0]
    return m.n(parts)


def rows_by_number(m, history, length):
    samples, rows = torch.arange(history.shape[0]), m.e(history)
    several = rows[samples[:, None], torch.stack([length - 1, length * 0 - 1], 1)]
    return m.n(torch.cat([
        rows[samples, length - 1], several.sum(1), m.e(history[samples, length - 1])], 1))


def copied(m, history, item):
    weights = torch.softmax(m.e(history).sum(2), 1)
    copies = torch.zeros(history.shape[0], KEYS).scatter_add_(1, history, weights)
    return m.n(torch.cat([copies.gather(1, item[:, None]), m.e(item)], 1))


def written(m, history, item):
    samples, rows = torch.arange(history.shape[0]), m.e(history).sum(2)
    seen = torch.zeros(history.shape[0], KEYS)
    added = seen.index_put((samples[:, None], history), rows, accumulate=True)
    seen[samples.repeat_interleave(LONG), history.flatten()] = rows.flatten()
    seen[samples, item] = 2.0
    return m.n((seen + added) @ m.e.weight)


def scattered(m, history):
    rows, places = m.e(history).sum(2), history % 7
    made = m.e(history).flatten(1)[:, :7]
    reduced = [made.scatter_reduce(1, places, rows, how) for how in ("amax", "amin", "sum")]
    return m.n(torch.cat([*reduced, made.scatter(1, places, rows), made.scatter(1, places, 2)], 1))


def without_axes(m, item):
    return m.n(m.e(item)).squeeze()  # one number for a batch of one sample


def filled(m, history):
    rows = m.e(history.flatten()).view(-1, LONG, 4)
    scores = rows.sum(2)
    scores[history.data == 0] = -1e9
    rows[rows[:, :, 0] > 0.5] = 3.0
    return m.n((torch.softmax(scores, 1)[..., None] * rows).sum(1))


def stacked(m, item):
    row = m.e(item)
    rows = torch.hstack((row, torch.dstack((row, row)).sum(2), torch.column_stack((row, row))))
    return m.n(rows)


def stacked_below(m, item):
    rows = m.e(item).t()
    both = torch.vstack((torch.atleast_2d(rows), torch.atleast_3d(rows)[:, :, 0] * 2))
    below = getattr(torch, "row_stack", torch.vstack)  # a second name, which torch may drop
    return m.n((both + below((torch.atleast_1d(rows[0]) + rows, rows))).t())


def ghost_batches(m, item):
    parts = m.e(item).chunk(-(-item.shape[0] // 64), 0)
    return m.n(torch.cat([m.norm(part) for part in parts])), m.e.weight.mean()[None]


class AttentionGate(nn.Module):
    """A loop over the steps of packed rows, whose gate a packed score of each row scales."""

    def __init__(self):
        super().__init__()
        self.cell = nn.Linear(8, 4)

    def forward(self, packed_rows, packed_scores):
        assert isinstance(packed_rows, rnn.PackedSequence)
        rows, sizes, order, back = packed_rows
        scores, *_ = packed_scores
        state, last = (torch.zeros(sizes[0], 4) for _ in range(2))
        states, begin = torch.zeros(rows.shape[0], 4), 0
        for size in sizes:
            gate = scores[begin:begin + size, None]
            made = torch.tanh(self.cell(torch.cat([rows[begin:begin + size], state[:size]], 1)))
            state = state[:size] * (1 - gate) + gate * made
            states[begin:begin + size] = last[:size] = state
            begin += size
        return rnn.PackedSequence(states, sizes, order, back), last[back]


def evolved(m, history, item, choose=lambda rows, keep: rows[keep], number=lambda n: n):
    """DIEN: packed rows of the samples with a history alone, then zeros for the other ones."""
    has_rows = (history > 0).sum(1) > 0
    rows, keep = choose(m.e(history), has_rows), choose(history > 0, has_rows)
    pack = lambda one: rnn.pack_padded_sequence(
        one, keep.sum(1).cpu(), batch_first=True, enforce_sorted=False)
    packed_rows, _ = m.g(pack(rows))
    rows, _ = rnn.pad_packed_sequence(packed_rows, batch_first=True, total_length=LONG)
    target = choose(m.e(item), has_rows)
    scores = torch.softmax((rows * target[:, None]).sum(2) - 1e9 * ~keep, 1)
    states, last = m.loop(packed_rows, pack(scores))
    states, lengths = rnn.pad_packed_sequence(states, batch_first=True, total_length=LONG)
    chosen = states[torch.arange(LONG).expand(len(keep), -1) == keep.sum(1)[:, None] - 1]
    made = torch.zeros(number(history.shape[0]), 8)
    made[has_rows] = torch.cat([last, chosen], 1)
    return m.n(torch.cat([made, m.e(item)], 1))


def evolved_by_select(m, history, item):
    whole = lambda keep, rows: keep.view(-1, *[1] * (rows.dim() - 1))
    choose = lambda rows, keep: torch.masked_select(rows, whole(keep, rows)).view(
        -1, *rows.shape[1:])
    return evolved(m, history, item, choose, int)


def fixed_number(m, history):
    return m.n(m.e(history).view(len(history) * 2, -1).view(int(history.shape[0]), -1))


def in_one_row(m, history):
    count, long = history.shape
    rows = m.e(history.reshape(1, count * long)).reshape(count, long, 4)
    keep = history.reshape(1, -1).ne(0).reshape(count, 1, long).repeat(1, 3, 1)
    return m.n((keep[:, 1, :, None] * rows).sum(1))


def steps_first(m, history, item):
    steps = history.t()
    keep = (steps != 0).float()
    rows = m.g(m.e(steps) * keep[..., None])[0] + steps[..., None] / KEYS
    return m.n(torch.cat([rows.sum(0) / keep.sum(0)[:, None], m.e(item)], 1))


def put_rows(m, history, mask, item):
    keys = history + 1
    keys[~mask] = 0
    rows = m.e(keys) + m.e(history.masked_fill(~mask, 9)) + m.e(torch.where(mask, history, 4))
    return m.n(rows.sum(1) + m.e(torch.where(item > 9, torch.zeros_like(item) + 7, item)))


def masked_in_copies(m, history, mask):
    copies, last = mask[:, None].repeat(1, 3, 1), mask.sum(1) - 1
    scores = m.e(history).sum(2)[:, None] * copies + (1.0 - mask[:, None]) * -1e4
    rows = torch.softmax(scores, 2) @ m.e(history)  # [B, 3, 4]
    samples = torch.arange(len(mask))
    late = m.e(history).transpose(1, 2)[samples, :, last]
    again = mask.bool()[samples[:, None, None], torch.arange(LONG)[None, None]]  # [B, 1, L]
    return m.n(rows.mean(1) + late + (again.float() @ m.e(history))[:, 0])


def some_without():
    """Returns histories of which some have no key, and an item."""
    rows = history()[0]
    rows[::5] = 0
    return {"history": rows, "item": ids(B)}


def words():
    ends = torch.cat([torch.zeros(1, dtype=torch.int64), torch.randint(0, 5, (B,)).cumsum(0)])
    return torch.randint(0, KEYS, (int(ends[-1]),)), ends


def unlike_zeros(bag):
    """Gives the padding a row, which the bag must leave out all the same."""
    with torch.no_grad():
        bag.weight.fill_(0.5).add_(torch.randn_like(bag.weight))
    return bag


def cases():
    """Maps each kind of model to the model, its batches, and names of features and dense values."""
    lists = lambda: {"history": history()[0]}
    timed = lambda: dict(zip(("history", "length"), history()))
    fields = lambda: ids(B, LONG)
    triangle = Model(lambda m, x: pairs(m, x), 15)
    triangle.register_buffer("upper", torch.ones(LONG, LONG).triu(1).bool())
    fm = Model(shifted, 12, first=nn.Embedding(90, 1), second=nn.Embedding(90, 4))
    fm.register_buffer("shift", torch.tensor([0, 10, 40]))
    columns = Model(lambda m, x: m.n(torch.cat(
        [m.e(x[:, 0].long()), m.i(x[:, 1].long()), x[:, 2:]], 1)), 9, i=nn.Embedding(KEYS, 4))
    columns.feature_index = {"user": (0, 1), "item": (1, 2), "age": (2, 3)}
    matrix = lambda: torch.stack([ids(B).float(), ids(B).float(), torch.randn(B)], 1)
    last = Model(lambda m, history: mean_of_keys(m, history, KEYS - 1), 4)
    parameter = Model(lambda m, user, item: m.n(torch.cat(
        [functional.embedding(user, m.w), m.w[item], m.e(item)], 1)), 12)
    parameter.w = nn.Parameter(torch.randn(KEYS, 4))
    two = {"user": lambda: ids(B), "item": lambda: ids(B)}
    waves = Model(fourier_filter, 4)
    waves.w = nn.Parameter(torch.randn(LONG // 2 + 1, 4, 2))
    item_too = lambda: lists() | {"item": ids(B)}
    one_twice = lambda: dict.fromkeys(("user", "other"), ids(B))
    numbers = [f"history{place}" for place in range(LONG)]
    each = lambda makers: lambda: {name: make() for name, make in makers.items()}
    gru = lambda: nn.GRU(4, 4, batch_first=True)
    return {
        "a dict as the only argument": (
            Model(lambda m, x: m.n(torch.cat([m.e(x["item"]), x["user"]["age"][:, None]], 1)), 5),
            lambda: {"item": ids(B), "user": {"age": torch.randn(B)}}, ["item"], ["age"]),
        "a tuple as the only argument": (
            Model(lambda m, x: m.n(torch.cat([m.e(x[0]["item"]), x[1][:, None]], 1)), 5),
            lambda: ({"item": ids(B)}, torch.randn(B)), ["item"], ["input1"]),
        "a mean of the keys that are no padding": (
            Model(lambda m, history: mean_of_keys(m, history), 4), lists, ["history"], []),
        "padding in the last row": (
            last, lambda: {"history": padded_by_last()}, ["history"], []),
        "attention of a target over a history": (
            Model(target_attention, 8), lambda: lists() | {"item": ids(B)},
            ["history", "item"], []),
        "the last state of a GRU": (Model(last_of, 4, g=gru()), timed, ["history"], ["length"]),
        "a GRU over packed rows": (Model(packed, 4, g=gru()), timed, ["history"], ["length"]),
        "a loop over the steps of packed rows": (
            Model(lambda m, history, item: evolved(m, history, item), 12, g=gru(),
                  loop=AttentionGate()), some_without, ["history", "item"], []),
        "samples that a mask leaves out": (
            Model(evolved_by_select, 12, g=gru(), loop=AttentionGate()), item_too,
            ["history", "item"], []),
        "a number of samples that is fixed": (Model(fixed_number, 24), lists, ["history"], []),
        "attention with positions": (
            Model(attention, 4, p=nn.Embedding(LONG, 4)), lists, ["history"], []),
        "positions that NumPy repeats": (
            Model(tiled, 4, p=nn.Embedding(LONG, 4)), lists, ["history"], []),
        "a lookup that no score uses": (
            Model(lambda m, user, item: (m.u(user), m.n(m.e(item)))[1], 4, u=nn.Embedding(50, 4)),
            each(two), ["item"], []),
        "squeeze of a sum": (
            Model(lambda m, x: (m.one(x).sum(1) + m.n(m.e(x).flatten(1))).squeeze(1), 24,
                  one=nn.Embedding(KEYS, 1)), fields, ["x"], []),
        "squeeze of all axes": (
            Model(lambda m, item, age: m.n(torch.cat([age, m.e(item)[:, :, None].squeeze()], 1)),
                  5), lambda: {"item": ids(B), "age": torch.randn(B, 1)}, ["item"], ["age"]),
        "pairs by a constant mask": (triangle, fields, ["x"], []),
        "one matrix of all columns": (columns, matrix, ["item", "user"], ["age"]),
        "functional lookups": (parameter, each(two), ["item", "user"], []),
        "one column for two tables": (
            Model(wide_and_deep, 4, wide=nn.Embedding(KEYS, 1)),
            lambda: {"user": ids(B)}, ["user"], []),
        "one table of all columns": (
            fm, lambda: torch.stack([ids(B, high=n) for n in (10, 30, 50)], 1),
            ["x0", "x1", "x2"], []),
        "floats that no score uses": (
            Model(lambda m, item, stamps: m.n(m.e(item)), 4),
            lambda: {"item": ids(B), "stamps": torch.randn(B, 20)}, ["item"], []),
        "a repeated mask": (
            Model(lambda m, item, mask: m.n((m.e(item) * torch.repeat_interleave(
                mask[..., None], 4, dim=2)).sum(1)), 4),
            lambda: {"item": fields(), "mask": torch.rand(B, LONG)}, ["item"],
            [f"mask{n}" for n in range(LONG)]),
        "the sum of a bag without its padding": (
            Model(lambda m, item: m.n(m.bag(item)), 4, bag=unlike_zeros(
                nn.EmbeddingBag(KEYS, 4, mode="sum", padding_idx=0))),
            lambda: {"item": ids(B, LONG, high=4)}, ["item"], []),
        "the largest of each column of a bag": (
            Model(lambda m, item: m.n(m.bag(item)), 4, bag=nn.EmbeddingBag(KEYS, 4, mode="max")),
            lambda: {"item": fields()}, ["item"], []),
        "a bag of one key that may be padding": (
            Model(lambda m, item: m.n(m.bag(item[:, None])), 4, bag=unlike_zeros(
                nn.EmbeddingBag(KEYS, 4, mode="mean", padding_idx=3))),
            lambda: {"item": ids(B, high=6)}, ["item"], []),
        "a filter of frequencies": (waves, lists, ["history"], []),
        "correlations of complex numbers": (Model(correlations, 4), lists, ["history"], []),
        "rows by the number of the sample": (
            Model(rows_by_number, 12), timed, ["history"], ["length"]),
        "probabilities of a copy": (
            Model(copied, 5), item_too, ["history", "item"], [*numbers, "item"]),
        "writes by the number of the sample": (
            Model(written, 4), item_too, ["history"], [*numbers, "item"]),
        "writes at computed places": (Model(scattered, 35), lists, ["history"], numbers),
        "steps on the first axis": (
            Model(steps_first, 8, g=nn.GRU(4, 4)), item_too, ["history", "item"], numbers),
        "a row that a mask puts for keys": (
            Model(put_rows, 4), lambda: {"history": ids(B, LONG, high=KEYS - 1),
                                         "mask": torch.rand(B, LONG) > 0.5, "item": ids(B)},
            ["history", "history_2", "item"],
            [*(f"mask{place}" for place in range(LONG)), "item"]),
        "the keys of all samples in one row": (
            Model(in_one_row, 4), lists, ["history"], []),
        "a mask of whole numbers in copies, and rows of a later axis": (
            Model(masked_in_copies, 4),
            lambda: {"history": (rows := history()[0]), "mask": (rows > 0).long()}, ["history"],
            [f"mask{place}" for place in range(LONG)]),
        "numbers where a mask is true": (Model(filled, 4), lists, ["history"], []),
        "one number for one sample": (
            Model(without_axes, 4), lambda: {"item": ids(B)}, ["item"], []),
        "rows beside each other": (
            Model(stacked, 16), lambda: {"item": ids(B)}, ["item"], []),
        "rows below each other": (
            Model(stacked_below, 8), lambda: {"item": ids(B)}, ["item"], []),
        "parts of a batch, and a loss": (
            Model(ghost_batches, 4, norm=nn.BatchNorm1d(4)), lambda: {"item": ids(B)},
            ["item"], []),
        "one tensor for two arguments": (
            Model(wide_and_other, 4, wide=nn.Embedding(KEYS, 1)), one_twice, ["other", "user"],
            []),
        "bags with offsets": (
            Model(bags, 5, bag=nn.EmbeddingBag(
                KEYS, 4, mode="mean", include_last_offset=True, padding_idx=0)),
            lambda: dict(zip(("words", "offsets"), words())) | {"price": torch.randn(B)},
            ["words"], ["price"]),
        "remainders of hashes": (
            Model(lambda m, item: m.n(m.e(item % 7 + 3)), 4),
            lambda: {"item": ids(B, low=-1 << 62, high=1 << 62)}, ["item"], []),
        "a column and its neighbour in one table": (
            Model(lambda m, user: m.n(m.e(user) + m.e(user + 1)), 4),
            lambda: {"user": ids(B, high=KEYS - 1)}, ["user", "user_2"], []),
        "ids that begin with 1": (
            Model(lambda m, user: m.n(m.e(user) + m.e(user - 1)), 4),
            lambda: {"user": ids(B, low=1)}, ["user"], ["user"]),
        "a column behind another one that is shifted": (
            Model(lambda m, x: m.n(m.e(torch.cat([x[:, :1], x[:, 1:] + 1], 1)).sum(1)), 4),
            lambda: ids(B, 2, high=KEYS - 1), ["x0", "x1"], []),
        "a few columns of a table": (
            Model(lambda m, user: m.n(torch.cat(
                [m.e(user), functional.embedding(user, m.e.weight[:, :2])], 1)), 6),
            lambda: {"user": ids(B)}, ["user"], []),
        "whole numbers of a float column": (
            Model(lambda m, item, x: m.n(torch.cat([m.e(item), x.long().float()], 1)), 5),
            lambda: {"item": ids(B), "x": 9 * torch.rand(B, 1)}, ["item"], ["x"]),
        "lists of offsets and keys, as DLRM takes them": (
            Model(lambda m, x, offsets, keys: m.n(torch.cat([x] + [
                m.bag(one + place, at) for place, (one, at) in enumerate(zip(keys, offsets))], 1)),
                13, bag=nn.EmbeddingBag(KEYS + 3, 4, mode="sum")),
            lambda: {"x": torch.randn(B, 1), "offsets": [torch.arange(B)] * 3,
                     "keys": [ids(B), torch.cat([ids(B), ids(3)]), ids(B)]},
            ["keys.0", "keys.1", "keys.2"], ["x"]),
    }
