#!/usr/bin/env python3
"""Builds all tests and runs the test programs, as many at a time as there are cores.

`cargo test` runs one program after the other. Most of them wait for processes, disks and clocks, so
half of the machine would be idle. The output of a program is printed when it ends, with the time
and the CPU time that it took.

usage: tests/run.py [ARGUMENT]... [--without PROGRAM] [-- COMMAND...]

The test program PROGRAM is built and does not run. ARGUMENT is one of `cargo test`, such as
--workspace. Each COMMAND is a line for the shell, and runs beside the programs, in the root of the
repository.
"""

import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor, as_completed

# The programs that take longest start first, so that none of them runs alone at the end.
FIRST = ("gpu", "flash", "board", "update", "hatchback_bench")


def programs(arguments):
    """Builds the tests. Returns name, command and package folder of each."""
    command = ["cargo", "test", "--no-run", "--message-format=json-render-diagnostics", *arguments]
    built = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    if built.returncode:
        sys.exit(built.returncode)
    found = []
    for message in map(json.loads, built.stdout.splitlines()):
        if message.get("executable") and message["profile"]["test"]:
            folder = os.path.dirname(message["manifest_path"])
            found.append((message["target"]["name"], [message["executable"]], folder))
    return sorted(found, key=lambda f: FIRST.index(f[0]) if f[0] in FIRST else len(FIRST))


def run(name, command, folder):
    """Runs a command in its folder, as cargo runs a test. Returns name, status and output."""
    start = time.monotonic()
    cargo = os.environ.get("CARGO", shutil.which("cargo"))
    environment = os.environ | {"CARGO": cargo, "CARGO_MANIFEST_DIR": folder}
    with tempfile.TemporaryFile() as said:
        process = subprocess.Popen(command, cwd=folder, env=environment, stdout=said,
                                   stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL)
        # `getrusage` would add up all commands that run at a time.
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = status = os.waitstatus_to_exitcode(status)
        said.seek(0)
        output = said.read().decode(errors="replace")
    cpu, wall = used.ru_utime + used.ru_stime, time.monotonic() - start
    return name, status, f"{output}-- {name}: status {status}, {wall:.0f} s, CPU {cpu:.0f} s"


def main():
    arguments, root = sys.argv[1:], str(pathlib.Path(__file__).resolve().parent.parent)
    end = arguments.index("--") if "--" in arguments else len(arguments)
    options, left_out, failed = arguments[:end], None, []
    if "--without" in options:
        at = options.index("--without")
        _, left_out = options[at:at + 2]
        del options[at:at + 2]
    found = [each for each in programs(options) if each[0] != left_out]
    found[1:1] = [(line, ["sh", "-c", line], root) for line in arguments[end + 1:]]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for one in as_completed(pool.submit(run, *each) for each in found):
            name, status, said = one.result()
            print(f"-- {name}\n{said}", flush=True)
            if status:
                failed.append(name)
    if failed:
        sys.exit(f"tests/run.py: failed: {', '.join(sorted(failed))}")


if __name__ == "__main__":
    main()
