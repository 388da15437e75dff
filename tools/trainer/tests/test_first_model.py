"""Runs docs/first_model.md from top to bottom, with the `hatchback` program.

Without onnxscript or target/release/hatchback (or $HATCHBACK) the page is skipped, and the test
says so.
"""

import importlib.util
import os
import re
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
PROGRAM = Path(os.environ.get("HATCHBACK", ROOT / "target/release/hatchback"))
BLOCK = re.compile(r"<!-- tutorial -->\n```(python|sh)\n(.*?)```", re.DOTALL)


class FirstModel(unittest.TestCase):
    def test_the_page_can_be_followed(self):
        if importlib.util.find_spec("onnxscript") is None or not PROGRAM.exists():
            self.skipTest(f"onnxscript is not installed, or {PROGRAM} is not built")
        blocks = BLOCK.findall((ROOT / "docs/first_model.md").read_text(encoding="utf-8"))
        self.assertEqual([kind for kind, _ in blocks], "python python sh sh python sh".split())

        # One Python process has all Python blocks, as a user's session would; it runs the
        # shell blocks in between.
        program = ["import subprocess"]
        for kind, text in blocks:
            shell = (
                f"print(subprocess.run({['sh', '-euc', text]!r}, check=True, "
                "capture_output=True, text=True).stdout)"
            )
            program.append(text if kind == "python" else shell)
        path = f"{PROGRAM.parent}:{os.environ['PATH']}"
        environment = os.environ | {
            "PATH": path, "PYTHONPATH": str(ROOT / "tools/trainer"), "PYTHONDONTWRITEBYTECODE": "1"
        }
        with tempfile.TemporaryDirectory() as folder:
            done = subprocess.run(
                [sys.executable, "-c", "\n".join(program)], cwd=folder, env=environment,
                capture_output=True, text=True
            )
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertEqual(done.stdout.count('"score":'), 4, done.stdout)
        self.assertIn("ranker@2", done.stdout)
        self.assertLess(sum(text.count("\n") for kind, text in blocks if kind == "sh"), 15)


if __name__ == "__main__":
    unittest.main()
