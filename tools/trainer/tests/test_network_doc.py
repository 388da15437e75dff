"""Runs the Python blocks of docs/network.md with the frameworks that are installed.

A block whose framework is missing is skipped, and the test says which one.
tools/trainer/extras/test has TorchRec; `pip install tensorflow-cpu tf2onnx`
brings what Keras needs.
"""

import importlib.util
import os
import re
import subprocess
import sys
import tempfile
import unittest
import warnings
from pathlib import Path

PAGE = Path(__file__).resolve().parents[3] / "docs" / "network.md"
PROGRAM = Path(os.environ.get("HATCHBACK", PAGE.parents[1] / "target/release/hatchback"))


def section(heading):
    """Returns the text under a heading of the page."""
    text = PAGE.read_text(encoding="utf-8").split(f"\n## {heading}\n")[1]
    return text.split("\n## ")[0]


class NetworkPage(unittest.TestCase):
    def run_block(self, framework, modules, folder):
        """Runs the only block of a framework's section in `folder`, as a program of its own."""
        missing = [module for module in modules if importlib.util.find_spec(module) is None]
        if missing:
            reason = f"the block of {framework} is not run: {', '.join(missing)} is not installed"
            print(f"SKIPPED: {reason}")
            self.skipTest(reason)
        (block,) = re.findall(
            r"```python\n(.*?)```", section(f"Export from {framework}"), re.DOTALL
        )
        package = str(Path(__file__).resolve().parents[1])
        environment = os.environ | {"PYTHONPATH": package, "PYTHONDONTWRITEBYTECODE": "1"}
        done = subprocess.run(
            [sys.executable, "-c", block], cwd=folder, env=environment, capture_output=True,
            text=True
        )
        self.assertEqual(done.returncode, 0, done.stderr)

    def test_the_block_of_torchrec_exports_a_model(self):
        with tempfile.TemporaryDirectory() as folder:
            self.run_block("TorchRec", ["torchrec"], folder)
            model = Path(folder) / "ranker" / "model.toml"
            self.assertIn('name = "bags.tags"', model.read_text(encoding="utf-8"))
            if PROGRAM.exists():
                subprocess.run(
                    [PROGRAM, "pack", model, "--out", Path(folder) / "m", "--codec", "f32"],
                    check=True, capture_output=True
                )

    def test_the_block_of_keras_exports_a_network(self):
        with tempfile.TemporaryDirectory() as folder:
            self.run_block("Keras", ["keras", "tensorflow", "tf2onnx"], folder)
            import onnx

            graph = onnx.load(Path(folder) / "dense.onnx").graph
            self.assertEqual([value.name for value in graph.input], ["dense", "emb"])
            self.assertEqual([value.name for value in graph.output], ["ctr", "cvr"])

    def test_the_blocks_export_a_network(self):
        if importlib.util.find_spec("torch") is None:
            self.skipTest("the blocks of PyTorch are not run: torch is not installed")
        import torch

        new_exporter = tuple(int(part) for part in torch.__version__.split(".")[:2]) >= (2, 9)
        blocks = re.findall(r"```python\n(.*?)```", section("Export from PyTorch"), re.DOTALL)
        self.assertEqual(len(blocks), 3, "a model, the new exporter, the older one")
        model, new, older = blocks
        before = os.getcwd()
        with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            os.chdir(folder)
            try:
                exec(model + (new if new_exporter else older), {})  # pylint: disable=exec-used
            finally:
                os.chdir(before)
            exported = Path(folder) / "dense.onnx"
            self.assertGreater(exported.stat().st_size, 500)
            self.assertEqual((Path(folder) / "dense.onnx.data").exists(), new_exporter)


if __name__ == "__main__":
    unittest.main()
