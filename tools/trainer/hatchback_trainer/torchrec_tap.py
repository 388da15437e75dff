"""The tap of TorchRec models: `ModelDeltaTracker` proposes rows, and each rank reads
its shards of them.

Make the model with
`DistributedModelParallel(..., model_tracker_config=ModelTrackerConfig(consumers=["publisher"]))`.
Every rank calls `changes` where a window ends; rank 0 gets the whole rows and writes the window.
Once it is written, every rank calls `settle`: until then `changes` returns the same rows again.
The tracker records lookups, not changes: optimizers with weight decay or dense moments change more
rows than it reports, and are refused.
"""

import torch
import torch.distributed as dist

from .window import Changes

CONSUMER = "publisher"


def shards_of(weight):
    """Yields (first row, first column, tensor) of this rank's shards of a table; a whole
    table is one shard."""
    if not hasattr(weight, "local_shards"):
        yield 0, 0, weight.detach()
        return
    for shard in weight.local_shards():
        row, column = shard.metadata.shard_offsets
        yield row, column, shard.tensor.detach()


def check_optimizer(model):
    """Refuses a fused optimizer that changes rows that no sample looked up."""
    fused = getattr(model, "fused_optimizer", None)
    for group in getattr(fused, "param_groups", []):
        if group.get("weight_decay", 0):
            raise ValueError(
                f"weight_decay {group['weight_decay']} changes rows that the tracker does not see"
            )


def joined(name, shape, pieces):
    """Returns keys and whole rows of one table. `pieces` are (keys, first column,
    rows) of all ranks."""
    keys = torch.unique(torch.cat([piece[0] for piece in pieces]))
    rows, seen = (
        torch.zeros(len(keys), shape[1]), torch.zeros(len(keys), shape[1], dtype=torch.bool)
    )
    for some, column, values in pieces:
        place = torch.searchsorted(keys, some)
        rows[place, column : column + values.shape[1]] = values
        seen[place, column : column + values.shape[1]] = True
    if not seen.all():
        row = int(torch.nonzero(~seen)[0, 0])
        raise ValueError(f"table `{name}`: no rank has every column of key {int(keys[row])}")
    return keys.numpy(), rows.numpy()


class TorchRecTap:
    """Reads the changed rows of a `DistributedModelParallel` with a `ModelDeltaTracker`.

    `tables` maps the tracker's names, such as `ebc.embedding_bags.user`, to table names; by
    default the last part.
    """

    def __init__(self, model, tables=None, consumer=CONSUMER):
        self.model, self.tables, self.consumer = model, tables, consumer
        self.batch = self.tracker().curr_batch_idx
        self.ids = {}  # the tracker's name of a table -> ids since the last `settle`
        check_optimizer(model)

    def tracker(self):
        return self.model.get_model_tracker()

    def delta(self):
        """Returns the ids that this rank looked up since the last `settle`. The tracker fails if
        there was no batch, and tells of each id once."""
        tracker = self.tracker()
        if tracker.curr_batch_idx != self.batch:
            self.batch = tracker.curr_batch_idx
            for fqn, delta in tracker.get_delta(self.consumer).items():
                ids = [delta.ids.cpu(), *([self.ids[fqn]] if fqn in self.ids else [])]
                self.ids[fqn] = torch.unique(torch.cat(ids))
        return self.ids

    def settle(self):
        """Forgets the changes of this rank, because a window has them."""
        self.ids = {}

    def local_pieces(self):
        """Returns {table: (shape, [(keys, first column, rows)])} of this rank's shards."""
        state, pieces = self.model.state_dict(), {}
        for fqn, ids in self.delta().items():
            name = fqn.rsplit(".", 1)[-1] if self.tables is None else self.tables[fqn]
            weight = state[f"{fqn}.weight"]
            shards = list(shards_of(weight))
            if len({row for row, _, _ in shards}) > 1:
                raise ValueError(
                    f"table `{name}`: a rank has row shards at several rows, "
                    "which its local ids do not tell apart"
                )
            parts = [
                (ids + row, column, shard[ids.to(shard.device)].float().cpu())
                for row, column, shard in shards
            ]
            pieces[name] = tuple(weight.shape), parts
        return pieces

    def changes(self):
        """Returns the `Changes` of each table on rank 0, and None on the other ranks. Every
        rank must call it."""
        pieces = self.local_pieces()
        everyone = [pieces]
        if dist.is_initialized() and dist.get_world_size() > 1:
            everyone = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
            dist.gather_object(pieces, everyone)
            if everyone is None:
                return None
        tables = {}
        for rank in everyone:
            for name, (shape, parts) in rank.items():
                tables.setdefault(name, (shape, []))[1].extend(parts)
        return {
            name: Changes(*joined(name, shape, parts)) for name, (shape, parts) in tables.items()
        }
