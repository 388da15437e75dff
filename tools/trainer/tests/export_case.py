"""The base of the tests that export models and score other rows with the `hatchback` program.

Without torch 2.7, onnxscript or the program the tests are skipped, and say so.
"""

import json
import os
import sys
import tempfile
import unittest
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT / "tools/trainer"))
os.environ.setdefault("HATCHBACK", str(ROOT / "target/release/hatchback"))
os.environ["KERAS_BACKEND"] = "torch"

from field_models import B  # noqa: E402

import hatchback_trainer  # noqa: E402
from hatchback_trainer.deploy import run  # noqa: E402

CLOSE = 3e-6


def lacks():
    """Returns why the tests cannot run here; None if they can."""
    if tuple(map(int, torch.__version__.split("+")[0].split(".")[:2])) < (2, 7):
        return f"export needs torch 2.7, and this is {torch.__version__}"
    try:
        import onnxscript  # noqa: F401
    except ImportError:
        return "onnxscript is not installed"
    program = os.environ["HATCHBACK"]
    return None if Path(program).exists() else f"{program} is not built"


LACKS = lacks()
if LACKS:
    print(f"SKIPPED: the exports of other models: {LACKS}")


@unittest.skipIf(LACKS, LACKS)
class ExportCase(unittest.TestCase):
    def setUp(self):
        torch.set_num_threads(1)
        torch.manual_seed(5)
        temporary = tempfile.TemporaryDirectory()
        self.addCleanup(temporary.cleanup)
        self.folder = Path(temporary.name)

    def export(self, model, batch, **options):
        return hatchback_trainer.export(model, batch, self.folder / "exported", **options)

    def assert_same(self, done, model, batch, call):
        """Compares the program's scores of a batch with the model's own."""
        with torch.no_grad():
            want = call(model.eval(), batch)
        want = (want[0] if isinstance(want, tuple) else want).reshape(B, -1)[:, 0]
        want = torch.sigmoid(want) if done.schema.activation == "sigmoid" else want
        self.assertLess((torch.tensor(done.score(batch)) - want).abs().max().item(), CLOSE)

    def scored(self, done, *lines):
        """Returns the program's scores of lines of JSON."""
        path = self.folder / "lines.jsonl"
        path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
        answers = map(json.loads, run("run", done.bundle, "--samples", path).splitlines())
        return [answer["score"][0] for answer in answers]
