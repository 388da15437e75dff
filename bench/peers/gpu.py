#!/usr/bin/env python3
"""Times the lookups of other libraries on a GPU, on the keys of `hatchback-bench gpu shapes`.

    hatchback-bench gpu shapes --batch 64,8192,65536 --keys KEYS --json REPORT
    bench/peers/gpu.py REPORT KEYS [--json FILE] [--device cpu]

The peers are torch's EmbeddingBag, cuEmbed, the gpu_cache of HugeCTR and NVE. All rows are in GPU
memory, as in the report. cuEmbed and gpu_cache are compiled from their sources, whose folders the
environment names:

    CUEMBED=.../cuEmbed  GPU_CACHE=.../HugeCTR/gpu_cache  NVCC=nvcc

NVE is the Python package pynve. A peer that cannot run here prints SKIPPED and the reason. Each
peer must first give torch's rows or sums. Only then is it timed, with events on the stream. The
key sets of a point rotate as they do in the report, so that no loop measures the second-level
cache. `share` is the peer's time divided by Hatchback's: 2 means that Hatchback is twice as fast.
The bar is the least share of gpu_cache at the largest batch of f32 rows. With --device cpu only
torch runs, to try the script. Exit status 77: no peer can run here.
"""

import argparse
import ctypes
import itertools
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time

TABLES = 26
ROUNDS, REPEATS = 30, 5
# The bar: Hatchback's lookups are this many times as fast as those of gpu_cache.
BAR = 2.0
# Slots of a cache for each row: sets that are 77 % full on average seldom overflow.
SLOTS_PER_ROW = 1.3
HERE = os.path.dirname(os.path.abspath(__file__))


class Skipped(Exception):
    """Why a peer does not run."""


class Shape:
    """A point of the report, its table of all rows, and its key sets as numbers of rows."""

    def __init__(self, torch, point, folder, device):
        self.codec, self.dim, self.rows = point["codec"], point["dim"], point["rows"]
        self.batch, self.hotness = point["batch"], point["hotness"]
        self.dtype = {"f32": torch.float32, "f16": torch.float16}[self.codec]
        path = os.path.join(folder, point["keys_file"])
        keys = torch.frombuffer(bytearray(open(path, "rb").read()), dtype=torch.int64)
        a_set = TABLES * self.batch * self.hotness
        expected = point["sets"] * a_set
        if keys.numel() != expected or keys.min() < 0 or keys.max() >= self.rows:
            raise SystemExit(
                f"{path}: {keys.numel()} keys up to {keys.max()},"
                f" {expected} below {self.rows} expected"
            )
        first = torch.arange(TABLES).repeat_interleave(self.batch * self.hotness) * self.rows
        self.sets = [(keys + first).to(device) for keys in keys.split(a_set)]
        torch.manual_seed(1)
        self.table = (
            torch.rand(TABLES * self.rows, self.dim, dtype=torch.float32).to(self.dtype).to(device)
        )
        self.bags = [places.view(-1, self.hotness) for places in self.sets]


class Torch:
    name = "torch EmbeddingBag"

    def __init__(self, torch):
        self.torch = torch

    def call(self, shape):
        bag = self.torch.nn.functional.embedding_bag
        return lambda number: bag(shape.bags[number], shape.table, mode="sum")


def compiled(name, define, includes, sources=()):
    """Returns the functions of gpu_peers.cu that need `define`, compiled by nvcc."""
    nvcc = os.environ.get("NVCC") or shutil.which("nvcc")
    if not nvcc:
        raise Skipped("no nvcc: name it in NVCC")
    library = os.path.join(tempfile.mkdtemp(), f"lib{name}.so")
    command = [
        nvcc, "-O3", "-std=c++17", "-arch=native", "-shared", "-Xcompiler", "-fPIC",
        f"-D{define}", "-o", library,
    ]
    command += [f"-I{folder}" for folder in includes] + [
        os.path.join(HERE, "gpu_peers.cu"), *sources
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise Skipped(f"nvcc: {(done.stderr.strip() or 'no reason').splitlines()[-1]}")
    return ctypes.CDLL(library)


def folder_of(variable, needed):
    """Returns the folder that the environment names, if it has the file `needed`."""
    folder = os.environ.get(variable)
    if not folder:
        raise Skipped(f"{variable} does not name the folder of its sources")
    if not os.path.exists(os.path.join(folder, needed)):
        raise Skipped(f"{variable}={folder} has no {needed}")
    return folder


def pointer(tensor):
    return ctypes.c_void_p(tensor.data_ptr())


class CuEmbed:
    name = "cuEmbed"

    def __init__(self, torch):
        folder = folder_of("CUEMBED", "cuembed/include/embedding_lookup.cuh")
        self.torch, self.library = torch, compiled("cuembed", "WITH_CUEMBED", [folder])

    def call(self, shape):
        bags = len(shape.bags[0])
        out = self.torch.empty(bags, shape.dim, dtype=shape.dtype, device="cuda")
        sets = [places.to(self.torch.int32) for places in shape.sets]
        run = getattr(self.library, f"peer_cuembed_{shape.codec}")
        sizes = [shape.dim, bags, shape.hotness]

        def lookup(number):
            stream = ctypes.c_void_p(self.torch.cuda.current_stream().cuda_stream)
            run(
                pointer(shape.table), pointer(sets[number]), *map(ctypes.c_int, sizes),
                pointer(out), stream,
            )
            return out

        return lookup


class GpuCache:
    name = "HugeCTR gpu_cache"

    def __init__(self, torch):
        folder = folder_of("GPU_CACHE", "src/nv_gpu_cache.cu")
        source = os.path.join(folder, "src/nv_gpu_cache.cu")
        include = os.path.join(folder, "include")
        self.torch, self.library = (
            torch, compiled("gpu_cache", "WITH_GPU_CACHE", [include], [source])
        )
        self.library.peer_gpu_cache_new.restype = ctypes.c_void_p
        self.cache = None

    def call(self, shape):
        if shape.codec != "f32" or shape.hotness != 1:
            raise Skipped("it has rows of f32 only, and does not pool")
        torch, count = self.torch, shape.sets[0].numel()
        if self.cache:
            self.library.peer_gpu_cache_delete(ctypes.c_void_p(self.cache))
        # With more rows a set of 64 could overflow, and the cache would lack some.
        slots = 2 * len(shape.table)
        self.cache = self.library.peer_gpu_cache_new(
            ctypes.c_size_t(slots), ctypes.c_size_t(shape.dim)
        )
        keys = torch.arange(len(shape.table), dtype=torch.int64, device="cuda")
        out = torch.zeros(count, shape.dim, device="cuda")
        missing = torch.empty(count, dtype=torch.int64, device="cuda")
        missing_keys, missed = (
            torch.empty_like(missing), torch.zeros(1, dtype=torch.int64, device="cuda")
        )
        cache, stream = (
            ctypes.c_void_p(self.cache), ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        )
        length, dim = ctypes.c_size_t(len(keys)), ctypes.c_size_t(shape.dim)
        self.library.peer_gpu_cache_fill(
            cache, pointer(keys), length, pointer(shape.table), dim, stream
        )

        def lookup(number):
            left = [pointer(missing), pointer(missing_keys), pointer(missed)]
            self.library.peer_gpu_cache_query(
                cache, pointer(shape.sets[number]), ctypes.c_size_t(count), pointer(out), *left,
                stream,
            )
            return out

        return lookup


class Nve:
    name = "NVE"

    def __init__(self, torch):
        try:
            import pynve.torch.nve_layers as layers
        except ImportError as e:
            raise Skipped(f"pynve: {e}")
        self.torch, self.layers = torch, layers
        # The name of the kinds of storage differs between releases.
        self.kinds = getattr(layers, "LayerType", None) or layers.CacheType

    def call(self, shape):
        if shape.hotness != 1:
            raise Skipped("its cache is measured with one key a bag")
        rows, dim = shape.table.shape
        layer = self.layers.NVEmbedding(
            rows, dim, shape.dtype, self.kinds.LinearUVM, optimize_for_training=False,
            gpu_cache_size=int(rows * SLOTS_PER_ROW) * dim * shape.table.element_size(),
            weight_init=shape.table,
        )
        keys = self.torch.arange(rows, dtype=self.torch.int64, device="cuda")
        layer.insert(keys, shape.table, 0)
        return lambda number: layer(shape.sets[number])


def time_us(torch, device, call, sets):
    """Returns the median time of `call` in us: on the GPU between two events.

    Each call takes the next key set.
    """
    numbers = itertools.cycle(range(sets))
    if device == "cpu":
        start = time.perf_counter()
        call(next(numbers))
        return 1e6 * (time.perf_counter() - start)
    times = []
    # As many launches as in the report: there are no more key sets than launches.
    repeats = max(REPEATS, sets // ROUNDS)
    for _ in range(ROUNDS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(repeats):
            call(next(numbers))
        end.record()
        end.synchronize()
        times.append(1000 * start.elapsed_time(end) / repeats)
    return statistics.median(times)


def check(torch, shape, found):
    """Raises if `found` is not torch's result, but for the order of the sums and their rounding."""
    expected = torch.nn.functional.embedding_bag(shape.bags[0], shape.table, mode="sum").float()
    found = found.float().view(expected.shape)
    difference = (found - expected).abs().max().item()
    bound = (1e-5 if shape.codec == "f32" else 2e-3) * shape.hotness
    if not difference <= bound:
        raise RuntimeError(f"a value differs from torch's by {difference}")


def start_peers(torch, device, missing):
    """Returns the peers that can run here; prints why the others cannot, and adds it to `missing`.
    """
    peers = []
    for peer in [Torch, CuEmbed, GpuCache, Nve]:
        try:
            if device == "cpu" and peer is not Torch:
                raise Skipped("it has no CPU")
            peers.append(peer(torch))
        except Skipped as e:
            missing[peer.name] = str(e)
            print(f"SKIPPED: {peer.name}: {e}")
    return peers


def bar(lines, missing):
    """Returns the bar in the form of the benches' reports; prints it. `missing` has the reason why
    a peer has no figures.
    """
    figures = {"name": f"times as fast as {GpuCache.name}, rows of f32, one key", "bar": BAR}
    of_peer = [line for line in lines if line["peer"] == GpuCache.name]
    if of_peer:
        batch = max(line["batch"] for line in of_peer)
        least = min(line["share"] for line in of_peer if line["batch"] == batch)
        figures |= {"value": least, "holds": least >= BAR}
        said = f"batch {batch}: {least:.3f}, demanded {BAR:g}: "
        said += "holds" if figures["holds"] else "MISSED"
    else:
        figures["not run"] = missing.get(GpuCache.name, "it ran no point")
        said = f"not run: {figures['not run']}"
    print(f"bar: {figures['name']}: {said}")
    return figures


def measure(torch, device, peers, points, folder, missing):
    """Returns a line of figures for each peer and point. Points that a peer lacks are left out;
    `missing` has the last reason.
    """
    lines, failed = [], False
    for point in points:
        shape = Shape(torch, point, folder, device)
        for peer in peers:
            line = {k: point[k] for k in ("codec", "dim", "hotness", "keys", "batch")} | {
                "peer": peer.name
            }
            try:
                call = peer.call(shape)
                check(torch, shape, call(0))
                us = time_us(torch, device, call, len(shape.sets))
                line |= {
                    "us": us, "hatchback_us": point["gpu_us_p50"],
                    "share": us / point["gpu_us_p50"],
                }
                figures = (
                    f"{us:10.1f} us, Hatchback {point['gpu_us_p50']:10.1f} us,"
                    f" share {line['share']:.2f}"
                )
            except Skipped as e:
                figures = f"SKIPPED: {e}"
            except Exception as e:
                failed, figures = True, f"FAILED: {type(e).__name__}: {e}"
            if "us" not in line:
                missing[peer.name] = figures
            print(f"{line['dim']:4} x {line['codec']}, {line['hotness']} a bag, {line['keys']:7}, "
                  f"batch {line['batch']:6}: {peer.name:20} {figures}", flush=True)
            lines += [line] if "us" in line else []
    return lines, failed


def nothing_runs(why):
    bar([], {GpuCache.name: why})
    print(f"SKIPPED: all peers: {why}")
    sys.exit(77)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("report", help="the JSON of `hatchback-bench gpu shapes`")
    parser.add_argument("keys", help="its folder of keys")
    parser.add_argument("--json", help="write the figures to this file")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    options = parser.parse_args()
    try:
        import torch
    except ImportError as e:
        return nothing_runs(e)
    if options.device == "cuda" and not torch.cuda.is_available():
        return nothing_runs("torch finds no GPU")
    points = [p for p in json.load(open(options.report))["points"] if p["keys_file"]]
    if not points:
        sys.exit(
            f"{options.report}: no point has keys;"
            " run `hatchback-bench gpu shapes --keys FOLDER`"
        )
    missing = {}
    peers = start_peers(torch, options.device, missing)
    lines, failed = measure(torch, options.device, peers, points, options.keys, missing)
    # gpu_cache has rows of f32 only.
    bars = [bar(lines, missing)] if any(p["codec"] == "f32" for p in points) else []
    if options.json:
        with open(options.json, "w") as file:
            json.dump({"bench": "gpu peers", "bars": bars, "points": lines}, file, indent=1)
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
