"""The whole loop on one machine: trains online, taps, selects, gates, publishes, and updates a
car, week by week.

`hatchback demo --live` runs it. The car that is updated is compared with one that stays on the
base. Every step is a command of the `hatchback` program, as a datacenter and a car would run it.
"""

import json
import shutil
import subprocess
import time
from pathlib import Path

from ..samples import write_lines
from ..window import WindowWriter
from .experiment import export_base
from .flights import OnlineDLRM, flight_stream

POLICY = """format = 1
samples_min = 300
auc_drop_max = 0.02
logloss_rise_max = 0.05
"""
PROBES = 32
HELD_OUT = 10  # one sample of so many is for the gate and is not trained on


class LoopDemo:
    """The folders and commands of the demo."""

    def __init__(self, program, folder):
        self.program, self.folder = program, folder
        self.published = []

    def run(self, *words, check=True):
        done = subprocess.run([self.program, *map(str, words)], capture_output=True, text=True)
        if check and done.returncode:
            raise RuntimeError(f"hatchback {words[0]}: {done.stderr.strip()}")
        return done

    def sync(self, car):
        folder = self.folder
        words = [
            "--root", folder / "keys/1.root.json", "--state", folder / f"{car}.sync", "--flash",
            folder / car
        ]
        self.run("sync", "--from", folder / "repository", *words)

    def publish(self, bundle, *options):
        self.run(
            "publish", bundle, "--keys", self.folder / "keys", "--to", self.folder / "repository",
            *options
        )

    def begin(self, model):
        """Publishes the base and brings it to both cars."""
        folder = self.folder
        (folder / "gate.toml").write_text(POLICY)
        export_base(model, [], folder / "base")
        self.run(
            "pack", folder / "base/model.toml", "--out", folder / "base.hatch", "--codec", "u8"
        )
        self.run("keys", "new", folder / "keys", "--plain")
        self.publish(folder / "base.hatch")
        self.sync("stale")
        self.sync("fresh")

    def score(self, car, samples):
        report = json.loads(
            self.run(
                "eval", self.folder / car, "--samples", samples, "--batch", "64", "--json", "-"
            ).stdout
        )
        return report["auc"]

    def release(self, budget_mib, held_out):
        """Turns the newest window into a signed delta in the car. Returns
        the report of `select`."""
        folder, out = self.folder, self.folder / "next.hatch"
        words = [
            "--windows", folder / "windows", "--state", folder / "state", "--base",
            folder / "base.hatch", "--out", out
        ]
        words += [word for bundle in self.published for word in ("--published", bundle)]
        report = json.loads(
            self.run("select", *words, "--budget-mib", budget_mib, "--json", "-").stdout
        )
        policy = ["--policy", folder / "gate.toml"]
        gate = self.run(
            "gate", out, "--fleet", folder / "state/fleet", "--samples", held_out, *policy,
            check=False
        )
        report["refused"] = gate.stderr.strip() if gate.returncode else None
        self.published = []
        if not gate.returncode:
            bundle = folder / f"{report['parent'] + 1}.hatch"
            out.rename(bundle)
            Path(f"{out}.approved").rename(f"{bundle}.approved")
            self.publish(bundle, *policy)
            self.published = [bundle]
            self.sync("fresh")
        return report


def first_score(demo, samples):
    """Scores one sample with the updated car."""
    with open(samples, encoding="ascii") as file:
        line = file.readline()
    done = subprocess.run(
        [demo.program, "run", str(demo.folder / "fresh")], input=line, capture_output=True,
        text=True, check=True
    )
    return json.loads(done.stdout)["score"][0]


def polyline(values, x, y, color):
    points = " ".join(f"{x(at):.1f},{y(value):.1f}" for at, value in enumerate(values))
    return f'<polyline points="{points}" fill="none" stroke="{color}" stroke-width="2"/>'


def svg(report):
    """Returns a picture of AUC by week, stale and fresh, above the delay from step to score."""
    stale, fresh, delay = (
        ([week[key] for week in report["weeks"]]) for key in ("stale_auc", "fresh_auc", "delay_s")
    )
    low, high = min(stale + fresh) - 0.01, max(stale + fresh) + 0.01
    x = lambda at: 70 + 600 * at / max(1, len(stale) - 1)
    y = lambda auc: 230 - 190 * (auc - low) / (high - low)
    z = lambda seconds: 380 - 100 * seconds / max(delay)
    parts = [
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 720 420" '
        'font-family="sans-serif" font-size="13">'
    ]
    parts.append(
        '<rect width="720" height="420" fill="white"/>'
        '<path d="M70 40V230H670M70 270V380H670" stroke="#888" fill="none"/>'
    )
    parts += [
        polyline(stale, x, y, "#999999"), polyline(fresh, x, y, "#2266aa"),
        polyline(delay, x, z, "#aa4422")
    ]
    parts.append(
        '<text x="70" y="28">AUC of each week before it was trained on: '
        "updated car (blue), base only (grey)</text>"
    )
    parts.append(
        '<text x="70" y="262">seconds from the trainer\'s step to the car\'s score (red)</text>'
    )
    for auc in (low, (low + high) / 2, high):
        parts.append(f'<text x="64" y="{y(auc) + 4:.1f}" text-anchor="end">{auc:.3f}</text>')
    parts.append(
        f'<text x="64" y="{z(max(delay)) + 4:.1f}" text-anchor="end">{max(delay):.1f}</text>'
    )
    parts.append('<text x="370" y="410" text-anchor="middle">weeks after 1 July 2013</text></svg>')
    return "\n".join(parts) + "\n"


def run(data, out, program, budget_kib=64.0, weeks_max=None):
    """Runs the loop over the flights and writes live.json and live.svg into `out`."""
    out = Path(out)
    if out.exists():
        shutil.rmtree(out)
    out.mkdir(parents=True)
    stream = flight_stream(data)
    model = OnlineDLRM(stream)
    model.train(stream.base)
    model.changes()
    demo = LoopDemo(str(Path(program).resolve()) if Path(program).exists() else program, out)
    demo.begin(model)
    windows, report = WindowWriter(out / "windows", "flights"), {"weeks": []}
    print(
        f"{'week':>4} {'stale AUC':>9} {'fresh AUC':>9} {'delta':>10} {'waiting':>8} "
        f"{'step to score':>14}",
        flush=True
    )

    for number, samples in enumerate(stream.windows[:weeks_max], start=1):
        held_out, seen = (
            samples[HELD_OUT - 1 :: HELD_OUT],
            [one for at, one in enumerate(samples) if at % HELD_OUT != HELD_OUT - 1]
        )
        write_lines(out / "week.jsonl", samples)
        write_lines(out / "heldout.jsonl", held_out)
        stale, fresh = (
            demo.score("stale", out / "week.jsonl"), demo.score("fresh", out / "week.jsonl")
        )
        model.train(seen)
        start = time.monotonic()
        probe = "".join((out / "week.jsonl").read_text().splitlines(keepends=True)[:PROBES])
        windows.write(model.changes(), model.step, model.onnx(), probe)
        done = demo.release(budget_kib / 1024, out / "heldout.jsonl")
        first_score(demo, out / "week.jsonl")
        delay = time.monotonic() - start
        week = {
            "week": number, "stale_auc": stale, "fresh_auc": fresh, "delay_s": delay,
            "bytes": done["bytes"]
        }
        report["weeks"].append(week | {"deferred": done["deferred"], "refused": done["refused"]})
        note = f"  refused: {done['refused']}" if done["refused"] else ""
        print(
            f"{number:4} {stale:9.5f} {fresh:9.5f} {done['bytes']:10,} {done['deferred']:8,} "
            f"{delay:12.2f} s{note}",
            flush=True
        )

    (out / "live.json").write_text(json.dumps(report, indent=1) + "\n")
    (out / "live.svg").write_text(svg(report))
    mean = lambda key: sum(week[key] for week in report["weeks"]) / len(report["weeks"])
    print(
        f"mean AUC: base only {mean('stale_auc'):.5f}, updated {mean('fresh_auc'):.5f}; "
        f"plot {out / 'live.svg'}"
    )
    return report
