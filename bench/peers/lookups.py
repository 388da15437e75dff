"""Runs the sum-pooled embedding bags of PyTorch and FBGEMM on one core.

`hatchback-bench lookup` starts this program. Every engine has `tables` tables of shape
`[rows, dim]`, filled with arbitrary values of its format. The engines for fp32 share their tables.
Every call has new keys, which the program draws before the clock of the call starts.
"""

import ctypes
import os

import peer

peer.restart_tuned()

import fbgemm_gpu
import numpy as np
import torch
from fbgemm_gpu.split_embedding_configs import SparseType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation
from fbgemm_gpu.split_table_batched_embeddings_ops_inference import (
    IntNBitTableBatchedEmbeddingBagsCodegen,
)


def check_fbgemm():
    """Returns the vector instructions that FBGEMM detects.

    Raises if it does not detect those that torch uses. Without libc10.so preloaded, FBGEMM reads
    an empty copy of the processor's description. It then runs its scalar reference code, which is
    20 times slower.
    """
    library = ctypes.CDLL(os.path.join(os.path.dirname(fbgemm_gpu.__file__), "fbgemm.so"))
    library._ZN6fbgemm18fbgemmSupportedCPUEv()
    detected = {}
    for name, symbol in [
        ("AVX2", "20fbgemmHasAvx2Support"), ("AVX512", "22fbgemmHasAvx512Support")
    ]:
        has = getattr(library, f"_ZN6fbgemm{symbol}Ev")
        has.restype = ctypes.c_bool
        detected[name] = has()
    capability = torch.backends.cpu.get_cpu_capability()
    if capability in detected and not detected[capability]:
        raise RuntimeError(
            f"fbgemm does not detect {capability}: it would run its scalar reference code"
        )
    return ", ".join(name for name in detected if detected[name]) or "no vector instructions"


def fbgemm(tables, rows, dim, kind):
    """Returns a table-batched embedding bag, and a view of the rows of each table."""
    specs = [(f"t{t}", rows, dim, kind, EmbeddingLocation.HOST) for t in range(tables)]
    bags = IntNBitTableBatchedEmbeddingBagsCodegen(
        specs, device="cpu", output_dtype=SparseType.FP32
    )
    bags.initialize_weights()
    return bags, [weights for weights, _ in bags.split_embedding_weights()]


class Lookups:
    def setup(self, tables, rows, dim):
        torch.set_num_threads(1)
        self.tables, self.rows, vectors = tables, rows, check_fbgemm()
        single, weights = fbgemm(tables, rows, dim, SparseType.FP32)
        weights = [w[:, : 4 * dim].view(torch.float32) for w in weights]
        for w in weights:
            w.uniform_(-1, 1)
        half, rows16 = fbgemm(tables, rows, dim, SparseType.FP16)
        byte, rows8 = fbgemm(tables, rows, dim, SparseType.INT8)
        for t in range(tables):
            rows16[t][:, : 2 * dim].view(torch.float16).copy_(weights[t])
            rows8[t].random_(0, 255)
            rows8[t][:, :4] = torch.tensor([0.01, -1.0]).half().view(torch.uint8)
        eager = [torch.nn.EmbeddingBag.from_pretrained(w, mode="sum") for w in weights]
        torch8 = [torch.ops.quantized.embedding_bag_byte_prepack(w) for w in weights]
        torch4 = [torch.ops.quantized.embedding_bag_4bit_prepack(w) for w in weights]
        bag8 = torch.ops.quantized.embedding_bag_byte_rowwise_offsets
        bag4 = torch.ops.quantized.embedding_bag_4bit_rowwise_offsets
        self.calls = {
            "torch EmbeddingBag, fp32": lambda k: [bag(k.bags[t]) for t, bag in enumerate(eager)],
            "torch quantized, byte": lambda k: [
                bag8(w, k.flat[t], k.starts) for t, w in enumerate(torch8)
            ],
            "torch quantized, 4 bit": lambda k: [
                bag4(w, k.flat[t], k.starts) for t, w in enumerate(torch4)
            ],
            "FBGEMM, fp32": lambda k: single(k.all, k.offsets),
            "FBGEMM, fp16": lambda k: half(k.all, k.offsets),
            "FBGEMM, int8": lambda k: byte(k.all, k.offsets),
        }
        self.cumulative_zipf = np.cumsum(1.0 / np.arange(1, rows + 1) ** 1.05)
        self.row_of_rank = np.random.default_rng(1).permutation(rows)
        about = f"torch {torch.__version__}, fbgemm_gpu {fbgemm_gpu.__version__} ({vectors})"
        return {"engines": list(self.calls), "about": about}

    def round(self, engine, rows, keys, hotness, batch, calls, seed):
        random = np.random.default_rng(seed)
        drawn = [
            Keys(self.draw(random, rows, keys, batch * hotness), batch, hotness)
            for _ in range(calls + 1)
        ]
        call = self.calls[engine]
        with torch.inference_mode():
            return {"times_us": peer.times_us(lambda i: call(drawn[i]), calls, warm_up=calls)}

    def draw(self, random, rows, keys, n):
        """Returns keys of shape `[tables, n]` of the `rows` most popular rows.

        Their distribution is uniform, or else Zipf. With Zipf the popular rows are scattered over
        the table.
        """
        if keys == "uniform":
            return random.integers(0, rows, (self.tables, n))
        cumulative = self.cumulative_zipf[:rows]
        at = random.random((self.tables, n)) * cumulative[-1]
        ranks = np.searchsorted(cumulative, at, side="right").clip(max=rows - 1)
        return self.row_of_rank[ranks]


class Keys:
    """The keys of one call in the form that each engine takes."""

    def __init__(self, keys, batch, hotness):
        tables = len(keys)
        self.flat = list(torch.from_numpy(keys))
        self.bags = [k.view(batch, hotness) for k in self.flat]
        self.starts = torch.arange(0, batch * hotness, hotness)
        self.all = torch.from_numpy(keys.reshape(-1).astype(np.int32))
        self.offsets = torch.arange(0, tables * batch * hotness + 1, hotness, dtype=torch.int32)


peer.serve(Lookups())
