"""Exports the model classes of public packages and prints what became of each.

Each is exported with 64 rows. The network's scores by ONNX Runtime are compared with the model's on
200 other rows, together and one by one. With $HATCHBACK the export is also packed and run.
`--bench` also compares the p50 of whole requests with that of ONNX Runtime's network alone, on one
core.

usage: run.py [--package NAME] [--class NAME] [--fuxictr FOLDER] [--bench] [--json FILE] [--trace]
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from pathlib import Path

import onnxruntime
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import hatchback_trainer  # noqa: E402
from data import rows  # noqa: E402
from hatchback_trainer.batch import Flat, Leaf  # noqa: E402
from hatchback_trainer.exporter import recorded  # noqa: E402
from packages import PACKAGES  # noqa: E402

import zoo  # noqa: E402

CLOSE = 2e-4
APART = 5 * CLOSE  # smallest deviation of the scores, below which a wrong network looks right
BATCHES = (1, 64)
SECONDS = 1  # of each measurement


def spread(model, has_paddings=True):
    """Gives every table and matrix values whose differences reach the scores: many packages begin
    with 1e-4, and training is what this command leaves out. Without paddings no random bag is
    empty: some packages divide by the number of its rows that are not zeros."""
    for module in model.modules():
        for weight in module.parameters(recurse=False):
            if weight.is_floating_point() and weight.dim() > 1 and weight.std() < 0.1:
                is_table = isinstance(module, torch.nn.Embedding)
                width = (2 / weight[0].numel()) ** 0.5
                torch.nn.init.normal_(weight, std=0.3 if is_table else width)
        if has_paddings and getattr(module, "padding_idx", None) is not None:
            module.weight[module.padding_idx] = 0


def other_leaves(exporter, batch):
    """Returns the flat batch, its leaves and what its collections looked up."""
    flat = Flat(exporter.source.forward, batch)
    calls = recorded(exporter.source, flat)[1] if exporter.calls else []
    return flat, [
        Leaf(name, tensor, leaf.per_sample)
        for name, tensor, leaf in zip(flat.names, flat.tensors, exporter.leaves)
    ], calls


def runtime_error(exporter, folder, batch):
    """Returns the largest difference of ONNX Runtime's scores, for all rows and one by one; None if
    it lacks an operator."""
    flat, leaves, calls = other_leaves(exporter, batch)
    want = exporter.source.scores(flat)
    if want[0][:, 0].std() < APART:
        raise ValueError(f"the scores hardly differ: by {want[0][:, 0].std():.1e}")
    inputs = exporter.network_inputs(exporter.follow(leaves, calls), leaves)
    given = dict(zip(exporter.made.inputs, (one.numpy() for one in inputs)))
    try:
        session = onnxruntime.InferenceSession(str(folder / "dense.onnx"))
    except onnxruntime.capi.onnxruntime_pybind11_state.NotImplemented:
        return None
    names = {one.name for one in session.get_inputs()}
    answer = lambda first, end: session.run(
        None, {name: value[first:end] for name, value in given.items() if name in names})
    worst = 0.0
    parts = [(0, len(want[0]))] + [(place, place + 1) for place in range(20)]
    for first, end in parts:
        for found, one in zip(answer(first, end), want):
            scale = 1 + one[first:end].abs()
            gap = (torch.from_numpy(found).reshape(end - first, -1) - one[first:end]).abs() / scale
            worst = max(worst, gap.max().item())
    return worst


def program_error(done, batch):
    """Returns the engine and the largest difference of the scores that the program gives."""
    said = done.pack(codec="f32")
    engine = next((line for line in said.splitlines() if line.startswith("dense network")), "")
    found = done.score(batch)
    exporter = done.exporter
    flat, *_ = other_leaves(exporter, batch)
    want = torch.cat([one[:, :1] for one in exporter.source.scores(flat)], dim=1)
    want = torch.sigmoid(want) if done.schema.activation == "sigmoid" else want
    value = lambda one: list(one.values()) if isinstance(one, dict) else (
        one[:1] if isinstance(one, list) else [one])
    have = torch.tensor([value(one) for one in found])
    return engine, (have - want).abs().max().item()


def runtime_p50(path, given, samples):
    """Returns the median time of a run of ONNX Runtime on one thread, in us."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(str(path), options)
    names = {one.name for one in session.get_inputs()}
    given = {name: value[:samples] for name, value in given.items() if name in names}
    times, end = [], time.perf_counter() + SECONDS
    while time.perf_counter() < end or len(times) < 5:
        began = time.perf_counter()
        session.run(None, given)
        times.append(time.perf_counter() - began)
    return 1e6 * statistics.median(times)


def speeds(done, folder, batch):
    """Returns the p50 of ONNX Runtime over that of a request, for each size of a batch."""
    exporter = done.exporter
    _, leaves, calls = other_leaves(exporter, batch)
    inputs = exporter.network_inputs(exporter.follow(leaves, calls), leaves)
    given = dict(zip(exporter.made.inputs, (one.numpy() for one in inputs)))
    program = Path(os.environ["HATCHBACK"]).with_name("hatchback-bench")
    subprocess.run(
        [program, "request", done.bundle, "--batch", ",".join(map(str, BATCHES)), "--keys",
         "uniform", "--cache-mib", "64", "--seconds", str(SECONDS), "--flash", folder / "bench",
         "--json", folder / "bench.json"], check=True, capture_output=True)
    points = json.loads((folder / "bench.json").read_text())["points"]
    return {
        one["batch"]: round(
            runtime_p50(folder / "dense.onnx", given, one["batch"]) / one["latency"]["p50_us"], 2)
        for one in points
    }


def attempt(case, is_timed):
    torch.manual_seed(1)
    model = case.build()
    owner = getattr(model, "__self__", model)
    owner.eval()
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        spread(owner, has_paddings=not is_timed)
        folder = Path(folder)
        export = case.export or hatchback_trainer.export
        done = export(model, case.batch(rows(64, 1)), folder, **case.options)
        held = case.batch(rows(200, 2))
        # `export_keras` takes the only argument of the model, and Keras takes it in a tuple.
        held = (held,) if case.export else held
        result = {
            "seconds": round(time.monotonic() - began, 1), "notes": done.notes,
            "dense": list(done.schema.dense_features),
            "features": [one.name for one in done.schema.features],
            "lookups": sum(
                1 if isinstance(one.table, str) else len(one.table)
                for one in done.schema.features),
            "error": runtime_error(done.exporter, folder, held),
        }
        if result["error"] is None and "HATCHBACK" not in os.environ:
            raise ValueError("ONNX Runtime lacks an operator of it, and there is no $HATCHBACK")
        if "HATCHBACK" in os.environ:
            result["engine"], result["car"] = program_error(done, held)
        if is_timed:
            result["speeds"] = speeds(done, folder, held)
        return result


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--package", action="append")
    parser.add_argument("--class", dest="kind", action="append")
    parser.add_argument("--fuxictr", help="checkout of FuxiCTR, or its unpacked source archive")
    parser.add_argument("--bench", action="store_true")
    parser.add_argument("--json")
    parser.add_argument("--trace", action="store_true")
    args = parser.parse_args()
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    results, absent, broken = [], [], []
    known = PACKAGES | {"fuxictr": lambda: zoo.fuxictr(args.fuxictr)}
    for name in args.package or known:
        if name == "fuxictr" and args.fuxictr is None:
            print("fuxictr skipped: its wheel has no models; --fuxictr FOLDER says where they are")
            absent.append(name)
            continue
        try:
            cases = known[name]()
        except Exception as error:
            is_absent = lacks(name, error) and not args.package
            (absent if is_absent else broken).append(name)
            print(f"{name} {'skipped' if is_absent else 'FAILED'}: {type(error).__name__}: {error}")
            if args.trace:
                traceback.print_exc()
            continue
        for case in cases:
            if args.kind and case.name not in args.kind:
                continue
            result = {"package": name, "class": case.name, "sequence": case.sequence}
            try:
                result |= attempt(case, args.bench)
                errors = [result[one] for one in ("error", "car") if result.get(one) is not None]
                good = all(error < CLOSE for error in errors)
                result["state"] = "right" if good else "WRONG"
            except Exception as error:
                lines = (str(error).strip() or "?").splitlines()
                result |= {"state": "refused", "why": f"{type(error).__name__}: {lines[0][:300]}"}
                if args.trace:
                    traceback.print_exc()
            results.append(result)
            print(f"{name:17} {case.name:20} {result['state']:8} {line(result)}", flush=True)
    count = lambda state, some: sum(one["state"] == state for one in some)
    sequences = [one for one in results if one["sequence"]]
    right = count("right", results)
    wrong = count("WRONG", results)
    print(f"{right} of {len(results)} right, {wrong} wrong")
    if absent or broken:
        print(f"{len(absent)} packages skipped, {len(broken)} failed: {', '.join(absent + broken)}")
    print(f"sequences: {count('right', sequences)} of {len(sequences)} right")
    timed = [speed for one in results for speed in one.get("speeds", {}).values()]
    if timed:
        ahead, close = (sum(speed >= least for speed in timed) for least in (1, 1 / 1.2))
        print(f"p50 at most ONNX Runtime's: {ahead} of {len(timed)}; 1.2 times: {close}")
    if args.json:
        Path(args.json).write_text(json.dumps(results, indent=1))
    sys.exit(1 if wrong or broken else 0)


def lacks(name, error):
    """Returns whether an error says that a package is not installed. TorchRec also needs an FBGEMM
    that was built for its torch, and the index has none for some."""
    root = name.replace("-", "_")
    roots = (root, "fbgemm_gpu") if name == "torchrec" else (root,)
    return isinstance(error, ModuleNotFoundError) and error.name in roots


def line(result):
    if result["state"] == "refused":
        return result["why"]
    car = f" car {result['car']:.0e}, {result['engine']}" if "car" in result else ""
    error = "-" if result["error"] is None else f"{result['error']:.0e}"
    car += "".join(f" {speed} x" for speed in result.get("speeds", {}).values())
    return (
        f"{error}{car} {result['lookups']} lookups of "
        f"{','.join(result['features'][:6])}; dense {','.join(result['dense'][:4])}"
    )


if __name__ == "__main__":
    main()
