"""Runs NVIDIA's perf_analyzer, unchanged, against the daemon: over gRPC and over HTTP, on samples
of the coupon model, with 1 to 8 requests in flight. Every request must be answered. Prints SKIPPED
if perf_analyzer cannot be installed or started here: its program needs glibc 2.38.

Usage: python3 tests/perf_analyzer.py FOLDER, the folder of the programs hatchback and hatchbackd.
PERF_ANALYZER is the command that starts perf_analyzer, in place of the one in target/perf_analyzer.
"""

import csv
import json
import os
import pathlib
import shlex
import subprocess
import sys
import tempfile
import urllib.request

from daemon_car import MODEL, Car, heldout
from virtual_env import programs

PACKAGE = "perf-analyzer==2.60.0"
CONCURRENCY = "1:8:7"


def command() -> list[str]:
    """Returns the command that starts perf_analyzer; installs the package if there is none."""
    given = shlex.split(os.environ.get("PERF_ANALYZER", ""))
    if not given:
        check = ["perf_analyzer", "--version"]
        given = [str(programs("perf_analyzer", [PACKAGE], check) / "perf_analyzer")]
    print(
        subprocess.run(
            [*given, "--version"], check=True, capture_output=True, text=True
        ).stdout.strip()
    )
    return given


def input_data(widths: dict[str, int]) -> dict:
    """Returns the held-out samples as perf_analyzer reads them: each input, keys padded with -1."""

    def padded(sample: dict, name: str) -> list[int]:
        bag = sample["sparse"].get(name, [])
        return bag + [-1] * (widths[name] - len(bag))

    def one(sample: dict) -> dict:
        keys = {name: padded(sample, name) for name in widths if name != "dense"}
        return {"dense": sample["dense"], **keys} if "dense" in widths else keys

    return {"data": [one(sample) for sample in heldout()]}


def measure(program: list[str], car: Car, kind: str, work: pathlib.Path) -> None:
    """Runs perf_analyzer over `kind`, and prints what it found."""
    report = work / f"{kind}.csv"
    arguments = [
        "-m", MODEL, "-u", f"127.0.0.1:{car.port}", "-i", kind, "--input-data", work / "data.json"
    ]
    arguments += ["--concurrency-range", CONCURRENCY, "-f", report]
    # Whether two windows agree depends on the machine, and nothing here asks for it.
    arguments += ["--measurement-mode", "count_windows", "--measurement-request-count", "500"]
    arguments += ["--stability-percentage", "100000"]
    ran = subprocess.run([*program, *arguments], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "error" not in ran.stdout.lower(), ran.stdout
    rows = list(csv.DictReader(report.open()))
    assert [row["Concurrency"] for row in rows] == ["1", "8"], rows
    for row in rows:
        rate = float(row["Inferences/Second"])
        assert rate > 0, row
        latencies = ", ".join(
            f"{name} {float(row[f'{name} latency']):.0f} us" for name in ("p50", "p99")
        )
        print(f"{kind}, {row['Concurrency']} in flight: {rate:.0f} inferences/s, {latencies}")


def main() -> None:
    program, programs = command(), pathlib.Path(sys.argv[1]).resolve()
    with tempfile.TemporaryDirectory() as folder, Car(programs, pathlib.Path(folder)) as car:
        work = pathlib.Path(folder)
        metadata = json.loads(
            urllib.request.urlopen(f"http://127.0.0.1:{car.port}/v2/models/{MODEL}").read()
        )
        widths = {tensor["name"]: int(tensor["shape"][1]) for tensor in metadata["inputs"]}
        (work / "data.json").write_text(json.dumps(input_data(widths)))
        for kind in ("grpc", "http"):
            measure(program, car, kind, work)
        car.stop()


if __name__ == "__main__":
    main()
