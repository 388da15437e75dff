"""Writes a trained model as the four files `hatchback pack` reads:
dense.onnx, tables.safetensors, model.toml, probe.jsonl.

The scores written are PyTorch's. It never trains, quantises, signs or packs.
"""

import contextlib
import inspect
import os
import tempfile
from pathlib import Path

import torch

from . import safetensors
from .samples import write_lines
from .schema import model_toml, tensor_name

OPSET = 13  # the newest opset that TensorRT 8 reads


def older_exporter():
    """Returns the argument that selects the exporter of TorchScript, where torch has two. Its files
    have the same bytes in every version."""
    known = inspect.signature(torch.onnx.export).parameters
    return {"dynamo": False} if "dynamo" in known else {}


def write_onnx(network, example, file, inputs, outputs):
    """Writes a network as ONNX, with the batch left open. `example` are its inputs for two
    samples."""
    torch.onnx.export(
        network,
        example,
        file,
        input_names=list(inputs),
        output_names=list(outputs),
        dynamic_axes={name: {0: "batch"} for name in [*inputs, *outputs]},
        opset_version=OPSET,
        do_constant_folding=True,
        **older_exporter(),
    )


def export_dense(network, shapes, path, outputs=("logit",)):
    """Writes the dense network as ONNX. `shapes` maps an input name to its shape
    without the batch axis."""
    network.eval()
    example = tuple(torch.zeros(2, *shape) for shape in shapes.values())
    write_onnx(network, example, str(path), shapes, outputs)


def input_shapes(schema):
    """Maps each input name to its shape without the batch axis: [nd], [T, D] or [sum of widths]."""
    shapes = {}
    for one in schema.inputs:
        widths = [schema.width(name) for name in one.features]
        widths += [1] * len(one.lengths) + [schema.feature(name).hotness_max for name in one.masks]
        dense = [len(schema.dense_features)]
        shapes[one.name] = (
            dense if not widths else [len(widths), widths[0]] if one.stacked else [sum(widths)]
        )
    return shapes


def as_i64(keys):
    """Returns u64 keys as an I64 tensor `[rows]` of the same bits, because torch has no U64."""
    signed = [key - (1 << 64) if key >= 1 << 63 else key for key in keys]
    return torch.tensor(signed, dtype=torch.int64)


def export_tables(schema, embeddings, counts, path):
    """Writes F32 `[rows, dim]` for each table, and I64 `[rows]` for `<table>.keys`
    (sparse tables) and `<table>.counts`."""
    tensors = {}
    for table in schema.tables:
        tensors[tensor_name(schema, table)] = embeddings.weights[table.name].detach()
        if table.keys is not None:
            tensors[tensor_name(schema, table, "keys")] = as_i64(table.keys)
        if table.counted:
            tensors[tensor_name(schema, table, "counts")] = counts[table.name]
    safetensors.write(path, tensors)


@contextlib.contextmanager
def replaced(out):
    """Yields an empty folder, whose files replace those of `out` once all are written."""
    # An export that fails half way would otherwise leave a folder that packs.
    Path(out).mkdir(parents=True, exist_ok=True)
    # A folder within `out` is on the file system of `out`, so a rename can move its files.
    with tempfile.TemporaryDirectory(dir=out) as folder:
        yield Path(folder)
        for path in Path(folder).iterdir():
            os.replace(path, Path(out) / path.name)


def export_model(embeddings, network, probe, out, counts=None):
    """Writes a model into the folder `out`. `probe` are samples with scores."""
    schema = embeddings.schema
    with replaced(out) as folder:
        export_dense(network, input_shapes(schema), folder / "dense.onnx", schema.outputs)
        export_tables(schema, embeddings, counts, folder / "tables.safetensors")
        (folder / "model.toml").write_text(model_toml(schema), encoding="utf-8", newline="\n")
        write_lines(folder / "probe.jsonl", probe)
