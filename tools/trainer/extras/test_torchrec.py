"""TorchRec's own classes on CPU: the tap with every kind of sharding, one and two ranks,
the export, and DCP."""

import os
import sys
import tempfile
import unittest
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as processes
import torchrec
from torch import nn
from torch.distributed import checkpoint
from torch.distributed.optim import _apply_optimizer_in_backward
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.model_tracker.types import ModelTrackerConfig
from torchrec.distributed.sharding_plan import (
    column_wise, construct_module_sharding_plan, data_parallel, row_wise, table_wise
)
from torchrec.distributed.types import ShardingEnv, ShardingPlan

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import hatchback_trainer  # noqa: E402
from hatchback_trainer.shards import assemble, read_dcp  # noqa: E402
from hatchback_trainer.torchrec_tap import TorchRecTap, shards_of  # noqa: E402

ROWS = {"a": 400, "b": 300, "c": 200}
DIM = 8


class Model(nn.Module):
    def __init__(self, device="cpu"):
        super().__init__()
        config = lambda name: torchrec.EmbeddingBagConfig(
            name=name, embedding_dim=DIM, num_embeddings=ROWS[name], feature_names=[f"f_{name}"]
        )
        self.ebc = torchrec.EmbeddingBagCollection(
            device=torch.device(device), tables=[config(name) for name in ROWS]
        )
        self.top = nn.Linear(DIM * len(ROWS) + 1, 1)

    def forward(self, dense, features):
        return self.top(torch.cat([dense, self.ebc(features).values()], dim=1))


def features(seed, batch=16):
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, 4, (len(ROWS) * batch,), generator=generator)
    counts = lengths.reshape(len(ROWS), batch).sum(dim=1).tolist()
    keys = [
        torch.randint(0, ROWS[name], (count,), generator=generator)
        for name, count in zip(ROWS, counts)
    ]
    return torchrec.KeyedJaggedTensor.from_lengths_sync(
        [f"f_{name}" for name in ROWS], torch.cat(keys), lengths
    )


def whole_tables(model):
    """Returns every table on rank 0, put together from the shards of all ranks."""
    local = {
        name: list(shards_of(model.state_dict()[f"ebc.embedding_bags.{name}.weight"]))
        for name in ROWS
    }
    local = {
        name: [(row, column, tensor.clone()) for row, column, tensor in shards]
        for name, shards in local.items()
    }
    everyone = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
    dist.gather_object(local, everyone)
    if everyone is None:
        return None
    tables = {}
    for name, rows in ROWS.items():
        shards = {(row, column): tensor for rank in everyone for row, column, tensor in rank[name]}
        tables[name] = assemble(
            (rows, DIM), [(*place, tensor) for place, tensor in shards.items()], name
        )
    return tables


def follow(rank, world, port, kind):
    """Trains with a tap on every rank, and compares a fleet that applies the
    changes with the tables."""
    os.environ |= {
        "RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(world)
    }
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    torch.manual_seed(3)
    dist.init_process_group("gloo")
    model = Model("meta")
    _apply_optimizer_in_backward(torch.optim.SGD, model.ebc.parameters(), {"lr": 0.5})
    placed = {
        "table-wise": lambda at: table_wise(rank=at % world),
        "row-wise": lambda at: row_wise(),
        "column-wise": lambda at: column_wise(ranks=[rank for rank in range(world)]),
        "data-parallel": lambda at: data_parallel(),
        "mixed": lambda at: [
            table_wise(rank=world - 1), row_wise(), column_wise(ranks=list(range(world)))
        ][at],
    }[kind]
    sharder = EmbeddingBagCollectionSharder()
    plan = {name: placed(at) for at, name in enumerate(ROWS)}
    plan = construct_module_sharding_plan(
        model.ebc, plan, sharder=sharder, world_size=world, local_size=world, device_type="cpu"
    )
    model = DistributedModelParallel(
        model,
        device=torch.device("cpu"),
        env=ShardingEnv.from_process_group(dist.group.WORLD),
        plan=ShardingPlan({"ebc": plan}),
        sharders=[sharder],
        model_tracker_config=ModelTrackerConfig(consumers=["publisher"], auto_compact=True),
    )
    dense = torch.optim.SGD(model.parameters(), lr=0.5)
    tap, fleet = TorchRecTap(model), whole_tables(model)
    for window in range(3):
        for step in range(2):
            dense.zero_grad()
            model(
                torch.ones(16, 1), features(100 * window + 10 * step + rank)
            ).square().mean().backward()
            dense.step()
        tap.changes()  # as if the window was not written
        changes = tap.changes()
        tap.settle()
        tables = whole_tables(model)
        if rank == 0:
            for name, one in changes.items():
                assert 0 < len(one.keys) < ROWS[name], (kind, name, len(one.keys))
                fleet[name][torch.from_numpy(one.keys)] = torch.from_numpy(one.rows)
            for name in ROWS:
                assert torch.equal(fleet[name], tables[name]), (kind, window, name)
    again = tap.changes()
    assert again == ({} if rank == 0 else None), "no batch, no change"
    dist.barrier()
    dist.destroy_process_group()


class TorchRec(unittest.TestCase):
    port = 29600 + os.getpid() % 300

    def spawn(self, world, kind):
        TorchRec.port += 1
        processes.spawn(follow, (world, TorchRec.port, kind), nprocs=world)

    def test_one_rank(self):
        for kind in ("table-wise", "row-wise", "data-parallel"):
            with self.subTest(kind):
                self.spawn(1, kind)

    def test_two_ranks_with_every_kind_of_shard(self):
        for kind in ("table-wise", "row-wise", "column-wise", "mixed"):
            with self.subTest(kind):
                self.spawn(2, kind)

    def test_a_model_with_a_collection_is_exported(self):
        torch.manual_seed(3)
        with tempfile.TemporaryDirectory() as folder:
            found = hatchback_trainer.export(Model(), (torch.randn(16, 1), features(1)), folder)
            self.assertEqual(
                [f.table for f in found.schema.features], [f"ebc.{name}" for name in ROWS]
            )
            self.assertEqual(len((Path(folder) / "probe.jsonl").read_text().splitlines()), 16)

    def test_a_distributed_checkpoint_is_read_whole(self):
        model = Model()
        with tempfile.TemporaryDirectory() as folder:
            checkpoint.save(model.state_dict(), checkpoint_id=folder, no_dist=True)
            tensors = read_dcp(folder)
        for name, value in model.state_dict().items():
            self.assertTrue(torch.equal(tensors[name], value), name)


if __name__ == "__main__":
    unittest.main()
