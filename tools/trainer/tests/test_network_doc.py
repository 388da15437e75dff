"""Runs the Python blocks of docs/network.md with the torch that is installed."""

import os
import re
import tempfile
import unittest
import warnings
from pathlib import Path

import torch

PAGE = Path(__file__).resolve().parents[3] / "docs" / "network.md"
NEW_EXPORTER = tuple(int(part) for part in torch.__version__.split(".")[:2]) >= (2, 9)


class NetworkPage(unittest.TestCase):
    def test_the_blocks_export_a_network(self):
        blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
        self.assertEqual(len(blocks), 3, "a model, the new exporter, the older one")
        model, new, older = blocks
        before = os.getcwd()
        with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            os.chdir(folder)
            try:
                exec(model + (new if NEW_EXPORTER else older), {})  # pylint: disable=exec-used
            finally:
                os.chdir(before)
            exported = Path(folder) / "dense.onnx"
            self.assertGreater(exported.stat().st_size, 500)
            self.assertEqual((Path(folder) / "dense.onnx.data").exists(), NEW_EXPORTER)


if __name__ == "__main__":
    unittest.main()
