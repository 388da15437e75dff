"""Scores recommendation models with the runtime that a car has: the same code, the same bits.

`Model` opens a flash directory or a bundle and scores numpy arrays. `pack`,
`inspect` and `evaluate` are the commands of the program `hatchback`, which this
package has too (`python -m hatchback`).
"""

import json
import os
import subprocess
import sys

from ._native import (
    Answer,
    Busy,
    Closed,
    DeadlineExceeded,
    Error,
    Failed,
    Model,
    NotFinite,
    OpenError,
    RequestError,
    __version__,
    run_program,
)

__all__ = [
    "Answer", "Busy", "Closed", "DeadlineExceeded", "Error", "Failed", "Model", "NotFinite",
    "OpenError", "RequestError", "evaluate", "explain", "inspect", "main", "pack",
]


def _run(arguments):
    """Runs the program in a process of its own and returns what it prints."""
    program = [sys.executable, "-m", "hatchback", *map(os.fspath, arguments)]
    done = subprocess.run(program, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise Error(done.stderr.strip().removeprefix("error: "))
    return done.stdout


def _report(arguments):
    """Runs a command with `--json` and returns its report."""
    return json.loads(_run([*arguments, "--json", "-"]))


def _options(**values):
    """Returns the options of a command for the values that are not None."""
    for name, value in values.items():
        if value is not None:
            yield "--" + name.replace("_", "-")
            yield str(value)


def pack(spec, out, *, parent=None, codec=None, placement=None):
    """Packs the model that the file `spec` (model.toml) describes into the bundle `out`.

    With `parent`, a bundle or flash directory, the result is a delta. Returns what `inspect` says
    of the bundle. Raises `Error` with the file, the field and the value that is refused.
    """
    options = _options(parent=parent, codec=codec, placement=placement)
    _run(["pack", spec, "--out", out, *options])
    return inspect(out)


def inspect(path):
    """Returns what is in the bundle or flash directory `path`: the
    report of `hatchback inspect`."""
    return _report(["inspect", path])


def evaluate(path, *, samples=None, batch=None, target=None, flash=None):
    """Scores labelled samples and returns AUC, logloss and statuses: the
    report of `hatchback eval`.

    `samples` is a file with a JSON line for each sample; the default is the model's probe set.
    """
    return _report(
        ["eval", path, *_options(samples=samples, batch=batch, target=target, flash=flash)]
    )


def explain(path, sample, *, against=None):
    """Returns why `sample`, a dict as a line of samples, has its score: the
    report of `hatchback explain`. `against` is a model with another generation."""
    return _report(["explain", path, json.dumps(sample), *_options(against=against)])


def main():
    """Runs the program `hatchback` with the arguments of this process."""
    sys.exit(run_program(sys.argv[1:]))
