"""Times networks on Hatchback's engine and on ONNX Runtime, one thread each, one after the other.

    ZOO=large python3 tests/onnx/zoo.py export zoo legacy 18
    python3 tests/onnx/zoo.py cases zoo large.bin
    cargo build --release -p hatchback-kernels --example onnx_cases
    python3 tests/onnx/compare_speed.py target/release/examples/onnx_cases large.bin

Prints microseconds of a run at batch 1, 8 and 64, and ONNX Runtime's time over Hatchback's. Needs
numpy and onnxruntime.
"""

import struct
import subprocess
import sys
import time

import numpy
import onnxruntime

BATCHES = (1, 8, 64)
ROUNDS = 15


class Reader:
    """Reads the file that cases.py writes."""

    def __init__(self, data):
        self.data, self.at = data, 0

    def number(self):
        (value,) = struct.unpack_from("<I", self.data, self.at)
        self.at += 4
        return value

    def bytes(self):
        length = self.number()
        self.at += length
        return self.data[self.at - length:self.at]

    def case(self):
        name, onnx = self.bytes().decode(), self.bytes()
        inputs = [(self.bytes().decode(), self.number()) for _ in range(self.number())]
        output, batch = self.bytes().decode(), self.number()
        values = [numpy.frombuffer(self.bytes(), "<f4").reshape(batch, -1) for _ in inputs]
        self.bytes()
        return name, onnx, output, dict(zip((n for n, _ in inputs), values))


def time_onnx_runtime(onnx, output, values):
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    options.log_severity_level = 4
    session = onnxruntime.InferenceSession(onnx, options, providers=["CPUExecutionProvider"])
    shapes = {i.name: i.shape[1:] for i in session.get_inputs()}
    times = []
    for batch in BATCHES:
        feeds = {n: numpy.ascontiguousarray(
            numpy.resize(v, (batch, v.shape[1])).reshape([batch, *shapes[n]]))
            for n, v in values.items()}
        best, runs = float("inf"), 1 + 256 // batch
        for _ in range(ROUNDS):
            start = time.perf_counter()
            for _ in range(runs):
                session.run([output], feeds)
            best = min(best, (time.perf_counter() - start) * 1e6 / runs)
        times.append(best)
    return times


def main(program, path):
    printed = subprocess.run([program, "--time", path], check=True, capture_output=True, text=True)
    ours = {line.split()[0]: [float(x) for x in line.split()[1:]]
            for line in printed.stdout.splitlines()}
    with open(path, "rb") as file:
        reader = Reader(file.read())
    print("network | Hatchback, us at batch 1, 8, 64 | ONNX Runtime | ONNX Runtime / Hatchback")
    while reader.at < len(reader.data):
        name, onnx, output, values = reader.case()
        theirs = time_onnx_runtime(onnx, output, values)
        ratios = [b / a for a, b in zip(ours[name], theirs)]
        rows = (ours[name], theirs, ratios)
        digits = (1, 1, 2)
        print(name, *(" ".join(f"{x:.{d}f}" for x in row) for row, d in zip(rows, digits)),
              sep=" | ")


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    main(*sys.argv[1:])
