"""Runs a whole DLRM on one core in two libraries, for `hatchback-bench request --peers`.

The libraries are ONNX Runtime and PyTorch. ONNX Runtime runs the model in f32 and in int8. For
int8 its own tool quantizes the weights of the layers. With int8 it quantizes the activations in
each call (dynamic quantization) and multiplies in int8.

The bench writes the model and its requests into a folder:

    whole.onnx               the model: keys and dense features in, score out
                             (the tables are external data)
    tables.f32               the rows of all tables
    dense.f32                the weights and biases of the dense layers
    keys.i64, dense_in.f32   the samples
"""

from pathlib import Path

import peer

peer.restart_tuned()

import numpy as np
import onnx
import onnxruntime as ort
import torch
from onnxruntime.quantization import quantize_dynamic


def mlp(layers, last):
    """Returns linear layers with a Relu between them and `last` after them.

    Each layer is `(weights, bias)`, of shapes `[out, in]` and `[out]`.
    """
    modules = []
    for weights, bias in layers:
        linear = torch.nn.Linear(weights.shape[1], weights.shape[0])
        linear.weight.data, linear.bias.data = weights, bias
        modules += [linear, torch.nn.ReLU()]
    return torch.nn.Sequential(*modules[:-1], last)


class Net(torch.nn.Module):
    """The model in eager PyTorch, as its users write it: one EmbeddingBag for each table."""

    def __init__(self, tables, bottom, top):
        super().__init__()
        bag = torch.nn.EmbeddingBag.from_pretrained
        self.bags = torch.nn.ModuleList(bag(t, mode="sum") for t in tables)
        self.bottom, self.top = mlp(bottom, torch.nn.ReLU()), mlp(top, torch.nn.Sigmoid())
        self.below = torch.tril_indices(len(tables) + 1, len(tables) + 1, -1)

    def forward(self, dense, keys):
        x = self.bottom(dense)
        rows = [bag(keys[:, t : t + 1]) for t, bag in enumerate(self.bags)]
        vectors = torch.stack([x, *rows], 1)
        products = torch.bmm(vectors, vectors.transpose(1, 2))
        return self.top(torch.cat([x, products[:, self.below[0], self.below[1]]], 1))


def write_int8(folder):
    """Writes `whole.int8.onnx`: the model with the weights of its layers quantized to int8.

    The quantizer gets the model without its tables. They would take gigabytes of memory and
    stay as they are.
    """
    model = onnx.load(folder / "whole.onnx", load_external_data=False)
    (tables,) = (t for t in model.graph.initializer if t.name == "tables")
    model.graph.initializer.remove(tables)
    bare = onnx.helper.make_tensor_value_info("tables", tables.data_type, tables.dims)
    model.graph.input.append(bare)
    onnx.save(model, folder / "bare.onnx")

    quantize_dynamic(
        folder / "bare.onnx", folder / "bare.int8.onnx", op_types_to_quantize=["Gemm", "MatMul"]
    )
    model = onnx.load(folder / "bare.int8.onnx")
    model.graph.input.remove(bare)
    model.graph.initializer.append(tables)
    onnx.save(model, folder / "whole.int8.onnx")


class Requests:
    def setup(self, folder, tables, rows, dim, dense, bottom, top):
        torch.set_num_threads(1)
        folder = Path(folder)
        self.keys = np.fromfile(folder / "keys.i64", np.int64).reshape(-1, tables)
        self.dense = np.fromfile(folder / "dense_in.f32", np.float32).reshape(-1, dense)
        embeddings = torch.empty(tables * rows, dim)
        embeddings.numpy()[:] = np.fromfile(folder / "tables.f32", np.float32).reshape(-1, dim)

        options = ort.SessionOptions()
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        # ONNX Runtime reads the rows from torch's memory, which has huge pages. From the file it
        # would map small pages.
        value = ort.OrtValue.ortvalue_from_numpy(embeddings.numpy())
        options.add_external_initializers(["tables"], [value])
        write_int8(folder)
        session, session_int8 = (
            ort.InferenceSession(str(folder / name), options, providers=["CPUExecutionProvider"])
            for name in ("whole.onnx", "whole.int8.onnx")
        )

        weights = torch.from_numpy(np.fromfile(folder / "dense.f32", np.float32))
        layers = []
        for n, k in zip([*bottom[1:], *top[1:]], [*bottom[:-1], *top[:-1]]):
            matrix, bias, weights = (
                weights[: n * k].view(n, k), weights[n * k :][:n], weights[n * k + n :]
            )
            layers.append((matrix.clone(), bias.clone()))
        assert len(weights) == 0
        split = len(bottom) - 1
        net = Net(embeddings.split(rows), layers[:split], layers[split:]).eval()
        keys, values = torch.from_numpy(self.keys), torch.from_numpy(self.dense)
        self.kept = embeddings, value
        self.engines = {
            "ONNX Runtime": lambda s: session.run(
                None, {"keys": self.keys[s], "dense": self.dense[s]}
            )[0],
            "ONNX Runtime, int8": lambda s: session_int8.run(
                None, {"keys": self.keys[s], "dense": self.dense[s]}
            )[0],
            "torch, eager": lambda s: net(values[s], keys[s]),
        }
        about = f"onnxruntime {ort.__version__}, torch {torch.__version__}"
        return {"engines": list(self.engines), "about": about}

    def at(self, i, batch):
        """Returns the slice of the samples that call `i` scores."""
        first = i * batch % (len(self.keys) - batch + 1)
        return slice(first, first + batch)

    def round(self, engine, batch, calls, first):
        call = self.engines[engine]
        with torch.inference_mode():
            return {"times_us": peer.times_us(lambda i: call(self.at(first + i, batch)), calls)}

    def scores(self, engine, samples):
        with torch.inference_mode():
            return {"scores": np.asarray(self.engines[engine](slice(0, samples))).ravel().tolist()}


peer.serve(Requests())
