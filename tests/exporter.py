#!/usr/bin/env python3
"""Tests the exporter of the trainer's package with the newest torch, in an environment of its own.

It exports models of each kind, follows the page of the first model, and exports the model classes
of a public package. The scores are those of the `hatchback` program.

usage: tests/exporter.py FOLDER     FOLDER has the programs, such as target/release
"""

import os
import pathlib
import subprocess
import sys

from daemon_car import REPOSITORY
from virtual_env import programs

PACKAGES = [
    "torch==2.15.0", "numpy", "onnx", "onnxscript==0.7.2", "onnxruntime", "tqdm", "scikit-learn",
    "torchfm==0.7.0", "keras==3.15.1",
]
TESTS = [
    "test_exporter", "test_columns", "test_refusals", "test_first_model", "test_rewrites",
    "test_network_doc", "test_tap",
]


def main() -> None:
    program = pathlib.Path(sys.argv[1]).resolve() / "hatchback"
    # Without the variable keras looks for TensorFlow.
    imports = "import torch, onnxscript, onnxruntime, torchfm, keras"
    check = ["python", "-c", f"import os; os.environ['KERAS_BACKEND'] = 'torch'; {imports}"]
    python = programs("exporter", PACKAGES, check) / "python"
    environment = os.environ | {"HATCHBACK": str(program), "PYTHONDONTWRITEBYTECODE": "1"}
    trainer = REPOSITORY / "tools" / "trainer"
    for command in (
        ["-m", "unittest", "-q", *TESTS],
        [trainer / "extras" / "field" / "run.py", "--package", "torchfm"],
    ):
        subprocess.run([python, *command], cwd=trainer / "tests", env=environment, check=True)


if __name__ == "__main__":
    main()
