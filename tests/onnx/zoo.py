"""The architectures of the field, exported by PyTorch and compared with ONNX Runtime.

    python3 tests/onnx/zoo.py export DIR dynamo 18     # or: legacy 13; by any torch from 1.13 on
    python3 tests/onnx/zoo.py cases DIR zoo.bin        # needs onnx and onnxruntime
    cargo run --release -p hatchback-kernels --example onnx_cases -- zoo.bin
"""

import inspect
import pathlib
import sys
import warnings

import numpy

BATCH = 7


def arguments(module):
    """Returns inputs of about one; some rows of a history are zero, as padding is."""
    import torch

    from zoo_models import DIM

    generator = torch.Generator().manual_seed(5)
    values = []
    for name, shape in module.inputs.items():
        value = torch.randn([BATCH, *shape], generator=generator)
        if name == "history":
            time = shape[0] // DIM
            value = value.view(BATCH, time, DIM)
            for sample in range(BATCH):
                value[sample, 1 + sample % time:] = 0
            value = value.view(BATCH, -1)
        if name == "dense":
            value[:, 0] = torch.rand(BATCH, generator=generator) + 0.3
        values.append(value)
    return tuple(values)


def export(folder, exporter, opset):
    import torch

    import zoo_models

    warnings.filterwarnings("ignore")
    for name in zoo_models.ZOO:
        module = zoo_models.make(name)
        values = arguments(module)
        inputs, outputs = list(module.inputs), getattr(module, "outputs", ["out"])
        path = folder / f"{name}.{exporter}.{torch.__version__.split('.dev')[0]}.{opset}.onnx"
        options = {"input_names": inputs, "output_names": outputs, "opset_version": opset}
        try:
            if exporter == "dynamo":
                batch = torch.export.Dim("batch")
                shapes = tuple({0: batch} for _ in values)
                # Its weights are in a file beside it, as by default.
                torch.onnx.export(module, values, str(path), dynamo=True, verbose=False,
                                  dynamic_shapes=shapes, external_data=True, **options)
            else:
                axes = {name: {0: "batch"} for name in inputs + outputs}
                has_dynamo = "dynamo" in inspect.signature(torch.onnx.export).parameters
                extra = {"dynamo": False} if has_dynamo else {}
                torch.onnx.export(module, values, str(path), dynamic_axes=axes, **extra, **options)
        except Exception as error:
            path.unlink(missing_ok=True)
            print(f"{path.name}: not exported: {str(error).splitlines()[0][:100]}")
            continue
        numpy.savez(path.with_suffix(".npz"), outputs=outputs,
                    **{n: v.numpy() for n, v in zip(inputs, values)})


def write_cases(folder, out):
    import onnx

    import cases

    with open(out, "wb") as file:
        for path in sorted(folder.glob("*.onnx")):
            stored = numpy.load(path.with_suffix(".npz"))
            feeds = {n: stored[n] for n in stored.files if n != "outputs"}
            model = onnx.load(path)
            # The exporter's notes take more room than the network.
            del model.graph.value_info[:], model.graph.metadata_props[:], model.metadata_props[:]
            for node in model.graph.node:
                node.ClearField("doc_string")
                del node.metadata_props[:]
            onnx_bytes = model.SerializeToString()
            for output in stored["outputs"]:
                values = cases.expected(onnx_bytes, feeds, str(output))
                name = f"{path.stem}:{output}"
                file.write(cases.encode(name, onnx_bytes, feeds, str(output), values))


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["export", folder, exporter, opset]:
            pathlib.Path(folder).mkdir(parents=True, exist_ok=True)
            export(pathlib.Path(folder), exporter, int(opset))
        case ["cases", folder, out]:
            write_cases(pathlib.Path(folder), out)
        case _:
            sys.exit(__doc__)
