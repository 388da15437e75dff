"""Cases: networks with inputs and the outputs that ONNX Runtime gives.

kernels/tests/cases/mod.rs reads what this writes. Needs numpy, onnx and onnxruntime.
"""

import struct

import numpy
import onnxruntime


def expected(onnx_bytes, feeds, output):
    """Returns what ONNX Runtime gives for `output`."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    # Its optimizer has faults: of 5,000 random graphs (opsets 7 to 23, seeds from 2,000,001 on) two
    # have other values with it, 2002024 and 2004327. Without it they are Hatchback's.
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(onnx_bytes, options, providers=["CPUExecutionProvider"])
    return session.run([output], feeds)[0]


def _bytes(data):
    return struct.pack("<I", len(data)) + data


def encode(name, onnx_bytes, feeds, output, outputs):
    """Returns one case as bytes. `feeds` are arrays [batch, ...] by name."""
    batch = next(iter(feeds.values())).shape[0]
    parts = [_bytes(name.encode()), _bytes(onnx_bytes), struct.pack("<I", len(feeds))]
    for key, value in feeds.items():
        width = int(numpy.prod(value.shape[1:]))
        parts.append(_bytes(key.encode()) + struct.pack("<I", width))
    parts += [_bytes(output.encode()), struct.pack("<I", batch)]
    for value in [*feeds.values(), outputs]:
        parts.append(_bytes(numpy.ascontiguousarray(value, dtype="<f4").tobytes()))
    return b"".join(parts)
