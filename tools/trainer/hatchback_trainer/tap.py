"""The tap of a plain PyTorch model: records which rows of its tables a window changed, and writes
windows.

Put a `Tap` around the training loop and call `close` where a window ends, after `optimizer.step()`.
It reads rows only then: those with a gradient, and those that a module looked up in training. An
optimizer that also changes other rows (momentum, Adam with dense gradients, weight decay) is
detected and reported with a warning. All rows of such a table are then compared through checksums
of 8 bytes a row, so no change is lost. The tap never changes the model.
"""

import functools
import io
import operator
import warnings

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from .model_files import as_i64, write_onnx
from .window import Changes, WindowWriter, as_u64, closed, head, read

EMBEDDINGS = (nn.Embedding, nn.EmbeddingBag)
CHUNK_VALUES = 1 << 22  # values of a table that one step of a checksum reads
SENTINELS = 1024  # untouched rows a table that every window checks, whatever the optimizer


def reason(group, optimizer):
    """Returns why `optimizer` may change rows that no sample touched; None if it does not."""
    kind = type(optimizer).__name__
    if group.get("weight_decay", 0):
        return f"{kind} has weight_decay {group['weight_decay']}"
    if group.get("momentum", 0):
        return f"{kind} has momentum {group['momentum']}"
    if kind in ("SGD", "Adagrad") or kind == "SparseAdam":
        return None
    return f"{kind} keeps moments that move rows without a gradient"


class RowSums:
    """Checksums of 64 bits of every row of a table: finds changed rows without a
    copy of the table."""

    def __init__(self, weight):
        generator = torch.Generator().manual_seed(weight.shape[1])
        # A row of 16-bit values may end within a word of 32 bits.
        self.word = torch.int16 if weight.element_size() == 2 else torch.int32
        words = weight.shape[1] * max(1, weight.element_size() // 4)
        self.factors = torch.randint(-(1 << 62), 1 << 62, (words,), generator=generator) | 1
        self.found = self.of(weight)
        self.settle()

    def of(self, weight):
        """Returns the checksum of each row, i64 `[rows]`."""
        parts = weight.detach().cpu().split(max(1, CHUNK_VALUES // weight.shape[1]))
        words = (part.contiguous().view(self.word).to(torch.int64) for part in parts)
        return torch.cat([(one * self.factors).sum(dim=1) for one in words])

    def changed(self, weight):
        """Returns the numbers of the rows that changed or are stale since the last
        `settle`, and of rows added since."""
        sums = self.of(weight)
        known = min(len(sums), len(self.sums))
        changed = self.stale[:known] | (sums[:known] != self.sums[:known])
        self.found = sums
        return torch.cat([torch.nonzero(changed).squeeze(1), torch.arange(known, len(sums))])

    def settle(self):
        self.sums = self.found
        # Rows of which the fleet may hold other values, whatever their checksums say.
        self.stale = torch.zeros(len(self.sums), dtype=torch.bool)


def signed(keys):
    """Returns keys as i64 `[n]` with the bits of their u64: torch compares no u64."""
    return torch.from_numpy(as_u64(keys).view(np.int64))


class TableTap:
    """What changed of one table since the last window. `find` returns the table's parameter, and
    `sharing` are the embedding modules with it."""

    def __init__(self, name, find, keys, sharing):
        self.name, self.find = name, find
        self.keys = None if keys is None else signed(keys)
        self.rows = len(find())
        self.counts = torch.zeros(self.rows)  # lookups; at least 1 for a row with a gradient
        self.watched = None  # the parameter whose gradients are recorded
        self.deleted = {}  # keys in order, each once
        self.sums = None  # RowSums, if the optimizer may change untouched rows
        self.sentinels = None
        for one in sharing:
            try:
                one.register_forward_pre_hook(self.record, with_kwargs=True)
            except TypeError:  # torch before 2.0 hides named arguments from hooks
                one.register_forward_pre_hook(self.record)
        self.grow()

    @property
    def weight(self):
        """Returns the rows, `[rows, dim]`."""
        return self.find().detach().reshape(self.rows, -1)

    def record(self, module, inputs, named=None):
        keys = inputs[0] if inputs else (named or {}).get("input")
        if keys is not None and module.training and torch.is_grad_enabled():
            self.grow()
            self.counts += torch.bincount(keys.detach().reshape(-1).cpu(), minlength=self.rows)

    def record_gradient(self, gradient):
        # Not every lookup is seen: `F.embedding` and `weight[keys]` call no module.
        self.grow()
        if self.sums is None:
            rows = gradient._indices()[0] if gradient.is_sparse else torch.nonzero(
                gradient.reshape(len(gradient), -1).any(dim=1)).squeeze(1)
            self.counts[rows.cpu()] = self.counts[rows.cpu()].clamp(min=1)

    def grow(self):
        """Follows a parameter that was replaced or made larger. Returns whether it was replaced."""
        parameter = self.find()
        is_new = parameter is not self.watched and parameter.requires_grad
        if is_new:
            self.watched = parameter
            parameter.register_hook(self.record_gradient)
        rows = len(parameter)
        if rows > self.rows:
            # A table that was made larger: every added row is new to the fleet.
            self.counts = torch.cat([self.counts, torch.ones(rows - self.rows)])
            self.rows = rows
        return is_new

    def touch(self, keys):
        """Marks the rows of keys, i64 `[n]`, as changed. Keys without a row are deleted."""
        if self.keys is None:
            rows = keys[(keys >= 0) & (keys < self.rows)]
            lacking = keys[keys >= self.rows]
        else:
            rows = torch.nonzero(torch.isin(self.keys, keys)).squeeze(1)
            lacking = keys[~torch.isin(keys, self.keys)]
        self.deleted.update(dict.fromkeys(lacking.tolist()))
        self.touch_rows(rows)

    def touch_rows(self, rows):
        self.counts[rows] += 1
        if self.sums is not None:
            # Rows added since the last window are sent anyway.
            self.sums.stale[rows[rows < len(self.sums.stale)]] = True

    def watch_all(self, why):
        if self.sums is None:
            warnings.warn(
                f"table `{self.name}`: {why}; every window compares all its {self.rows} rows"
            )
            self.sums = RowSums(self.weight)

    def choose_sentinels(self):
        """Remembers some rows, which must not change in the next window unless
        a sample touches them."""
        picked = torch.randperm(self.rows)[:SENTINELS]
        self.sentinels = picked, self.weight[picked].clone()

    def check_sentinels(self):
        rows, before = self.sentinels
        moved = (self.weight[rows] != before).any(dim=1) & (self.counts[rows] == 0)
        return int(moved.sum())

    def changes(self):
        """Returns the changes since the last `settle`."""
        if self.grow():  # no gradient of the new parameter was recorded
            self.touch_rows(torch.arange(self.rows))
        weight = self.weight
        if self.sums is None and (moved := self.check_sentinels()):
            count = len(self.sentinels[0])
            self.watch_all(f"the optimizer changed {moved} of {count} rows that no sample touched")
            self.sums.stale[:] = True  # other rows may have changed before
        if self.sums is not None:
            rows = self.sums.changed(weight)
        else:
            rows = torch.nonzero(self.counts).squeeze(1)

        keys = rows if self.keys is None else self.keys[rows]
        kept = torch.ones(len(rows), dtype=torch.bool)
        if self.deleted:
            kept = ~torch.isin(keys, torch.tensor(list(self.deleted)))
        traffic = self.counts[rows][kept]
        return Changes(
            keys[kept].numpy(), weight[rows[kept]].float().cpu().numpy(), traffic.numpy(),
            list(self.deleted)
        )

    def settle(self):
        """Forgets the changes, because a window has them."""
        self.counts.zero_()
        self.deleted.clear()
        if self.sums is not None:
            self.sums.settle()
        self.choose_sentinels()


class Tap:
    """Records the changes of a model's tables and writes them as windows.

    `exported` is what `export` returned for the model: it names the tables, and makes the network.
    Without it `tables` maps the names of modules or parameters to table names; by default every
    `nn.Embedding` and `nn.EmbeddingBag` is a table with the name of its module. `keys` maps a table
    name to the key of each row, where keys are not row numbers. `network` returns the bytes of the
    dense network's ONNX file.
    """

    def __init__(self, model, folder, lineage, optimizer, tables=None, keys=None, network=None,
                 exported=None):
        self.writer = WindowWriter(folder, lineage)
        self.optimizers = list(optimizer) if isinstance(optimizer, (list, tuple)) else [optimizer]
        self.network = network or (exported and exported.onnx)
        modules = {
            name: module for name, module in model.named_modules() if isinstance(module, EMBEDDINGS)
        }
        if tables is None:
            names = [one.name for one in exported.schema.tables] if exported else modules
            tables = {name: name for name in names}
        self.tables = []
        for name, table in tables.items():
            part = functools.reduce(lambda a, b: getattr(a, b, None), name.split("."), model)
            if not torch.is_tensor(getattr(part, "weight", part)):
                warnings.warn(f"table `{table}`: the model has no parameter `{name}`, so no window "
                              "has its rows: pass tables={...} with the parameter's name")
                continue
            path = name if torch.is_tensor(part) else f"{name}.weight"
            find = functools.partial(operator.attrgetter(path), model)
            sharing = [one for one in modules.values() if one.weight is find()]
            self.tables.append(TableTap(table, find, (keys or {}).get(table), sharing))
        self.has_closed = False  # whether the newest window is this tap's own
        for table in self.tables:
            self.inspect(table)
            table.choose_sentinels()

    def inspect(self, table):
        """Finds the optimizer of a table. Warns, and compares all rows, if it may change rows
        that no sample touches."""
        weight = table.find()
        if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            table.watch_all("the other ranks look up rows too")
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                if any(parameter is weight for parameter in group["params"]):
                    why = reason(group, optimizer)
                    if why:
                        table.watch_all(why)
                    return
        warnings.warn(f"table `{table.name}`: no optimizer that the tap was given has its weights")

    def delete(self, table, keys):
        """Deletes keys in the next window."""
        one = next(one for one in self.tables if one.name == table)
        # A list may mix negative keys with those of 2^63 and more, which numpy would not take.
        one.deleted.update(dict.fromkeys(as_i64([int(key) for key in keys]).tolist()))

    def touch_since(self, step):
        """Marks all keys of windows after `step` as changed. Call it after the model was
        restored from a checkpoint of `step`: the fleet may hold rows of later steps,
        which the restore undid. Marks every row if the windows do not tell them all."""
        folders = closed(self.writer.folder)
        heads = list(map(head, folders))
        if why := self.untold(heads, step):
            warnings.warn(f"{why}; the next window has every row")
            for table in self.tables:
                table.touch_rows(torch.arange(table.rows))
        for folder, known in zip(folders, heads):
            if known["step"] <= step:
                continue
            window = read(folder)
            for table in self.tables:
                one = window.tables.get(table.name, Changes())
                for keys in (one.keys, one.deleted):
                    table.touch(signed(keys))

    def untold(self, heads, step):
        """Returns why the windows do not tell each row that may differ from the fleet's after a
        restore of `step`; None if they do."""
        first = heads[0]["window"] if heads else self.writer.next
        if first > 1 and (not heads or heads[0]["step"] > step):
            return f"windows before {first} are removed, some perhaps after step {step}"
        # This tap has counted what changed since its own window, and no tap before that.
        if not self.has_closed and step > max((one["step"] for one in heads[-1:]), default=0):
            return f"no window has the changes up to step {step}"
        return None

    def close(self, step, probe=None):
        """Writes the changes since the last window as a window and returns its folder. If that
        fails, the next call writes them."""
        tables = {table.name: table.changes() for table in self.tables}
        dense = self.network() if self.network else None
        folder = self.writer.write(tables, step, dense, probe)
        for table in self.tables:
            table.settle()
        self.has_closed = True
        return folder


def onnx_bytes(network, example, names, output="logit"):
    """Returns the ONNX file of a dense network, for `Tap(network=...)`. `example` are its
    inputs for two samples."""
    out, was_training = io.BytesIO(), network.training
    network.eval()
    write_onnx(network, example, out, names, [output])
    network.train(was_training)
    return out.getvalue()
