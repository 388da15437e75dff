"""The dense network of a DLRM of Criteo's shape (13 dense features, 26 tables),
with random seeded weights.

For timing and for demos with generated tables. The network is never trained and uses no Criteo
data: its scores are meaningless.
"""

from dataclasses import dataclass
from pathlib import Path

import torch

from ..model_files import export_dense
from ..models import DLRM, init_xavier

DENSE, TABLES = 13, 26


@dataclass(frozen=True)
class Shape:
    dim: int
    bottom: list  # hidden widths between the dense features and `dim`
    top: list  # hidden widths between the interaction and the logit


SMALL = Shape(dim=32, bottom=[128, 64], top=[256, 128])
MLPERF = Shape(dim=128, bottom=[512, 256], top=[1024, 1024, 512, 256])


def network(shape):
    torch.manual_seed(13 * 26)
    dlrm = DLRM(DENSE, TABLES, shape.dim, shape.bottom, shape.top)
    init_xavier(dlrm)
    return dlrm


def export(out, shape):
    """Writes `dense.onnx` (dense `[B, 13]`, emb `[B, 26, dim]` -> logit `[B, 1]`)
    into the folder `out`."""
    out = Path(out)
    out.mkdir(parents=True, exist_ok=True)
    dlrm = network(shape)
    export_dense(dlrm, {"dense": [DENSE], "emb": [TABLES, shape.dim]}, out / "dense.onnx")
    print(f"criteo: {sum(p.numel() for p in dlrm.parameters())} parameters, written to {out}")
