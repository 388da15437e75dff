"""Puts sharded tables together: row and column shards in memory, and
checkpoints of torch.distributed (DCP).

A table that is split over ranks must be whole before `hatchback pack` reads it. Nothing here
needs a process group.
"""

import torch


def assemble(shape, shards, name="table"):
    """Returns the tensor of `shape` that `shards` make up. Each is (first
    row, first column, tensor).

    Every value must be in exactly one shard.
    """
    rows, columns = shape
    whole, seen = None, torch.zeros(rows, columns, dtype=torch.bool)
    for row, column, shard in shards:
        place = slice(row, row + shard.shape[0]), slice(column, column + shard.shape[1])
        if row < 0 or column < 0 or place[0].stop > rows or place[1].stop > columns:
            raise ValueError(
                f"{name}: a shard {list(shard.shape)} at [{row}, {column}] is outside "
                f"[{rows}, {columns}]"
            )
        if seen[place].any():
            raise ValueError(
                f"{name}: a shard {list(shard.shape)} at [{row}, {column}] overlaps another one"
            )
        whole = torch.empty(rows, columns, dtype=shard.dtype) if whole is None else whole
        whole[place] = shard.detach().cpu()
        seen[place] = True
    if not seen.all():
        row, column = torch.nonzero(~seen)[0].tolist()
        raise ValueError(f"{name}: no shard has the value at [{row}, {column}]")
    return whole


def read_dcp(folder):
    """Returns the tensors of a DCP checkpoint by name, whole, whatever their shards were. Needs
    torch 2.3 or newer."""
    from torch.distributed import checkpoint
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    reader = checkpoint.FileSystemReader(folder)
    found = reader.read_metadata().state_dict_metadata
    tensors = {
        name: torch.empty(one.size, dtype=one.properties.dtype)
        for name, one in found.items()
        if isinstance(one, TensorStorageMetadata)
    }
    checkpoint.load(tensors, storage_reader=reader, no_dist=True)
    return tensors
