#!/usr/bin/env python3
"""Builds all tests and runs the test programs, as many at a time as there are cores.

`cargo test` runs one program after the other. Most of them wait for processes, disks and clocks, so
half of the machine would be idle. The output of a program is printed when it ends.

usage: tests/run.py [ARGUMENT]...     arguments of `cargo test`, such as --workspace
"""

import json
import os
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor, as_completed

# The programs that take longest start first, so that none of them runs alone at the end.
FIRST = ("gpu", "flash", "board", "update", "hatchback_bench")


def programs(arguments):
    """Builds the tests. Returns name, program and package folder of each."""
    command = ["cargo", "test", "--no-run", "--message-format=json-render-diagnostics", *arguments]
    built = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    if built.returncode:
        sys.exit(built.returncode)
    found = []
    for message in map(json.loads, built.stdout.splitlines()):
        if message.get("executable") and message["profile"]["test"]:
            folder = os.path.dirname(message["manifest_path"])
            found.append((message["target"]["name"], message["executable"], folder))
    return sorted(found, key=lambda f: FIRST.index(f[0]) if f[0] in FIRST else len(FIRST))


def run(name, program, folder):
    """Runs a test program in the folder of its package, as cargo does."""
    start = time.monotonic()
    cargo = os.environ.get("CARGO", shutil.which("cargo"))
    environment = os.environ | {"CARGO": cargo, "CARGO_MANIFEST_DIR": folder}
    done = subprocess.run([program], cwd=folder, env=environment, stdin=subprocess.DEVNULL,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT, errors="replace")
    return name, done.returncode, done.stdout, time.monotonic() - start


def main():
    found, failed = programs(sys.argv[1:]), []
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for one in as_completed(pool.submit(run, *each) for each in found):
            name, status, said, seconds = one.result()
            print(f"-- {name}\n{said}-- {name}: status {status}, {seconds:.0f} s", flush=True)
            if status:
                failed.append(name)
    if failed:
        sys.exit(f"tests/run.py: failed: {', '.join(sorted(failed))}")


if __name__ == "__main__":
    main()
