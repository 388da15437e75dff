"""What a data scientist does with an export, by the `hatchback` program: pack, publish, score."""

import json
import os
import shutil
import subprocess
import tempfile
from pathlib import Path


def program():
    """Returns the path of `hatchback`: `$HATCHBACK`, or the one of the path."""
    found = shutil.which(os.environ.get("HATCHBACK", "hatchback"))
    if found is None:
        raise FileNotFoundError("hatchback: no such program; set $HATCHBACK to its path")
    return found


def run(*words):
    """Runs the program and returns what it prints.

    # Errors
    RuntimeError with the program's own message.
    """
    done = subprocess.run([program(), *map(str, words)], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(done.stderr.strip() or f"hatchback {words[0]}: exit {done.returncode}")
    return done.stdout


class Deployable:
    """Calls of an exported model. `folder` has its files."""

    bundle = None

    def pack(self, out=None, parent=None, publish_to=None, keys=None, codec=None):
        """Packs the model into the bundle `out`, by default `NAME-SEQUENCE.hatch` in its folder.
        Publishes it to the repository `publish_to` if there is one. Returns what was printed."""
        name = f"{self.schema.name}-{self.schema.sequence}.hatch"
        self.bundle = Path(out or self.folder / name)
        # `run` keeps an installed copy beside a bundle, which no other bundle of the same sequence
        # may replace.
        shutil.rmtree(self.bundle.with_suffix(".flash"), ignore_errors=True)
        given = {"--parent": parent, "--codec": codec}
        options = [word for pair in given.items() if pair[1] is not None for word in pair]
        said = run("pack", self.folder / "model.toml", "--out", self.bundle, *options)
        if publish_to is not None:
            said += run("publish", self.bundle, "--keys", keys or "keys", "--to", publish_to)
        return said

    def score(self, batch):
        """Scores a batch of the model's own form through the whole request path of a car.

        Returns a list with a score for each sample, or a dict by output.
        """
        from .exporter import lines_of

        if self.bundle is None:
            self.pack()
        with tempfile.TemporaryDirectory() as folder:
            lines = Path(folder) / "samples.jsonl"
            lines_of(self.exporter, batch, lines)
            answers = map(json.loads, run("run", self.bundle, "--samples", lines).splitlines())
            scores = [answer["score"] for answer in answers]
        return [one[0] if isinstance(one, list) and len(one) == 1 else one for one in scores]
