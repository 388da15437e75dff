"""Measures what a fleet gains from each byte of its deltas, on a stream in time order, with
the real `hatchback` program.

A base is trained first. Then each window of the stream is scored by every fleet, and after that
trained on. Its changes are sent to each fleet under the fleet's own policy, as deltas of
`hatchback select`. The report has the mean AUC of each policy on windows that its fleet had not
seen, and the bytes that the policy sent.
"""

import json
import math
import subprocess
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

import torch

from ..model_files import export_model
from ..samples import write_lines
from ..window import WindowWriter
from .flights import OnlineDLRM

EIGHTH = "an eighth of the bytes of all rows in f32"
POLICIES = {  # name -> codec, part of the u8 rows' bytes, whether rows are sent at all
    "stale": ("f32", None, False),
    "dense only": ("f32", 0.0, False),
    "all rows f32": ("f32", 1.0, True),
    "all rows u8": ("u8", 1.0, True),
    "all rows u4": ("u4", 1.0, True),
    "top 50 %": ("u8", 0.5, True),
    "top 25 %": ("u8", 0.25, True),
    "1/8 of f32, u8": ("u8", EIGHTH, True),
    "1/8 of f32, u4": ("u4", EIGHTH, True),
    "top 20 %": ("u8", 0.2, True),
    "top 10 %": ("u8", 0.1, True),
    "top 5 %": ("u8", 0.05, True),
}
# The other policies are measured against these.
COMPARED = ("stale", "dense only", "all rows f32", "all rows u8")


def export_base(model, probe, out):
    weights = {name: table.weight[: len(table.keys)] for name, table in model.tables.items()}
    counts = {
        name: table.total[: len(table.keys)].to(torch.int64) for name, table in model.tables.items()
    }
    export_model(
        SimpleNamespace(schema=model.schema(), weights=weights), model.network, probe, out, counts
    )


class Fleet:
    """The cars of one policy: a state folder of `select`, whose `fleet` is what the cars hold."""

    def __init__(self, name, program, folder, model_toml):
        self.codec, self.share, self.with_rows = POLICIES[name]
        self.name, self.program, self.folder = (
            name, program,
            folder / name.replace(" ", "-").replace("%", "percent").replace("/", "of")
        )
        self.folder.mkdir()
        self.base, self.published, self.bytes, self.auc, self.logloss = (
            self.folder / "base.hatch", [], [], [], []
        )
        self.run("pack", model_toml, "--out", self.base, "--codec", self.codec)
        self.select(folder / "none", None)

    def run(self, *words):
        done = subprocess.run([self.program, *map(str, words)], capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"hatchback {words[0]} ({self.name}): {done.stderr.strip()}")
        return done.stdout

    def select(self, windows, budget):
        """Makes a delta of new windows and publishes it to this fleet. Returns its bytes."""
        Path(windows).mkdir(exist_ok=True)
        out = self.folder / "next.hatch"
        words = [
            "--windows", windows, "--state", self.folder / "state", "--out", out, "--base",
            self.base, "--json", "-"
        ]
        words += [] if budget is None else ["--budget-mib", f"{budget / (1 << 20):.9f}"]
        words += [word for bundle in self.published for word in ("--published", bundle)]
        report = json.loads(self.run("select", *words))
        self.published = []
        if report["generation"]:
            self.published = [out.rename(self.folder / f"{report['parent']}.hatch")]
        return report["bytes"]

    def evaluate(self, samples):
        """Scores the samples of the next window with the generation that the cars hold."""
        held = self.folder / "state/fleet"
        # `eval` installs a delta into the folder first
        model = self.published[0] if self.published else held
        words = ["--flash", held, "--samples", samples, "--batch", "64", "--json", "-"]
        report = json.loads(self.run("eval", model, *words))
        self.auc.append(report["auc"])
        self.logloss.append(report["logloss"])


SMALLEST_SHARE = 0.05


def publish_window(fleets, windows, dense_windows):
    """Sends a window to every fleet under its policy."""
    by_name = {fleet.name: fleet for fleet in fleets}
    fixed = by_name["dense only"].select(dense_windows, None)
    by_name["dense only"].bytes.append(fixed)
    by_name["stale"].bytes.append(0)
    rows = by_name["all rows u8"].select(windows, None) - fixed
    by_name["all rows u8"].bytes.append(fixed + rows)
    for fleet in fleets:
        if fleet.with_rows and fleet.name != "all rows u8":
            if fleet.share == EIGHTH:
                # The dense network of a small model alone takes more than an eighth.
                budget = max(by_name["all rows f32"].bytes[-1] / 8, fixed + SMALLEST_SHARE * rows)
            else:
                budget = None if fleet.share == 1.0 else fixed + fleet.share * rows
            fleet.bytes.append(fleet.select(windows, budget))


def mean(values):
    return sum(values) / len(values)


def report_of(fleets, seconds):
    full = next(fleet for fleet in fleets if fleet.name == "all rows f32")
    points = []
    for fleet in fleets:
        points.append(
            {
                "policy": fleet.name,
                "kib_a_window": mean(fleet.bytes) / 1024,
                "share_of_f32_bytes": sum(fleet.bytes) / sum(full.bytes),
                "auc": mean(fleet.auc),
                "logloss": mean(fleet.logloss),
                "auc_below_f32": mean(full.auc) - mean(fleet.auc),
                "auc_by_window": fleet.auc,
            }
        )
    good = [
        point for point in points
        if point["auc_below_f32"] <= 0.0005 and point["share_of_f32_bytes"] <= 1 / 8
    ]
    return {"points": points, "bar_holds": bool(good), "train_seconds": seconds}


def print_report(report):
    print(
        f"{'policy':14} {'KiB/window':>11} {'of f32':>8} {'mean AUC':>9} {'logloss':>9} "
        f"{'below f32':>10}"
    )
    for one in report["points"]:
        print(
            f"{one['policy']:14} {one['kib_a_window']:11.1f} {one['share_of_f32_bytes']:8.3f} "
            f"{one['auc']:9.5f} {one['logloss']:9.5f} {one['auc_below_f32']:10.5f}"
        )
    verdict = "holds" if report["bar_holds"] else "does not hold"
    print(
        f"AUC within 0.0005 of all rows in f32 at 1/8 of the bytes or less: {verdict}; "
        f"training took {report['train_seconds']:.0f} s"
    )


def svg(report, name):
    """Returns a picture of mean AUC against bytes, on a logarithmic axis."""
    points = [one for one in report["points"] if one["kib_a_window"] > 0]
    low, high = (
        math.log10(min(p["kib_a_window"] for p in points)) - 0.1,
        math.log10(max(p["kib_a_window"] for p in points)) + 0.1
    )
    aucs = [one["auc"] for one in report["points"]]
    bottom, top = min(aucs) - 0.002, max(aucs) + 0.002
    x = lambda kib: 80 + 560 * (math.log10(kib) - low) / (high - low)
    y = lambda auc: 340 - 300 * (auc - bottom) / (top - bottom)
    parts = [
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 720 400" '
        'font-family="sans-serif" font-size="13">'
    ]
    parts.append(
        '<rect width="720" height="400" fill="white"/>'
        '<path d="M80 40V340H660" stroke="#888" fill="none"/>'
    )
    stale = next(one for one in report["points"] if one["kib_a_window"] == 0)
    parts.append(f'<path d="M80 {y(stale["auc"]):.1f}H660" stroke="#bbb" stroke-dasharray="4"/>')
    parts.append(
        f'<text x="90" y="{y(stale["auc"]) - 6:.1f}" fill="#666">stale, {stale["auc"]:.4f}</text>'
    )
    for number, one in enumerate(sorted(points, key=lambda one: one["kib_a_window"]), 1):
        cx, cy = x(one["kib_a_window"]), y(one["auc"])
        parts.append(f'<circle cx="{cx:.1f}" cy="{cy:.1f}" r="4" fill="#2266aa"/>')
        # Neighbours that nearly coincide get their numbers above and below.
        parts.append(
            f'<text x="{cx:.1f}" y="{cy - 9 if number % 2 else cy + 19:.1f}" '
            f'text-anchor="middle">{number}</text>'
        )
        parts.append(
            f'<text x="470" y="{116 + 16 * number}">{number}  {one["policy"]}, '
            f'{one["kib_a_window"]:.0f} KiB</text>'
        )
    for kib in (10, 20, 50, 100, 200, 500, 1000):
        if low <= math.log10(kib) <= high:
            parts.append(f'<text x="{x(kib):.1f}" y="358" text-anchor="middle">{kib}</text>')
    for step in range(5):
        auc = bottom + (top - bottom) * step / 4
        parts.append(f'<text x="74" y="{y(auc) + 4:.1f}" text-anchor="end">{auc:.4f}</text>')
    parts.append('<text x="370" y="386" text-anchor="middle">KiB a delta</text>')
    parts.append(f'<text x="80" y="24">mean AUC on the next window, {name}</text></svg>')
    return "\n".join(parts) + "\n"


def run(stream, out, program, windows_max=None, policies=tuple(POLICIES)):
    """Runs the experiment and writes NAME.json and NAME.svg into `out`."""
    out = Path(out)
    out.mkdir(parents=True, exist_ok=True)
    program = str(Path(program).resolve()) if Path(program).exists() else program
    model, start = OnlineDLRM(stream), time.monotonic()
    model.train(stream.base)
    model.changes()
    seconds = time.monotonic() - start

    with tempfile.TemporaryDirectory() as scratch:
        scratch = Path(scratch)
        export_base(model, [], scratch / "base")
        names = [name for name in POLICIES if name in COMPARED or name in policies]
        fleets = [Fleet(name, program, scratch, scratch / "base/model.toml") for name in names]
        rows, dense = (
            WindowWriter(scratch / "windows", stream.name),
            WindowWriter(scratch / "dense", stream.name)
        )
        for samples in stream.windows[:windows_max]:
            write_lines(scratch / "next.jsonl", samples)
            for fleet in fleets:
                fleet.evaluate(scratch / "next.jsonl")
            start = time.monotonic()
            model.train(samples)
            seconds += time.monotonic() - start
            network = model.onnx()
            rows.write(model.changes(), model.step, network)
            dense.write({}, model.step, network)
            publish_window(fleets, rows.folder, dense.folder)

    report = report_of(fleets, seconds)
    (out / f"{stream.name}.json").write_text(json.dumps(report, indent=1) + "\n")
    (out / f"{stream.name}.svg").write_text(svg(report, stream.name))
    print_report(report)
    return report
