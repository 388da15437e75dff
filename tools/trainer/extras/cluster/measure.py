"""Measures a cluster of one worker against one of two, with one core each, on this machine. A
folder is the store. They take turns, twice each; the best of each counts.

usage: HATCHBACK=target/release/hatchback PYTHONPATH=. \\
           VENV/bin/python extras/cluster/measure.py [ROWS [FOLDER]]
ROWS of each of 26 tables of 32 values [320000: 1.1 GB]. The model is made in FOLDER [a temporary
one].
"""

import os
import sys
import tempfile
import time
from pathlib import Path

from distributed import Client, LocalCluster

sys.path.insert(0, str(Path(__file__).parent))
import synthetic
from hatchback_trainer import cluster


def timed(workers, turn, work, hatchback):
    """Packs on this many workers; returns the seconds and the results of the tasks."""
    local = work / f"dask-{turn}"
    with LocalCluster(
        n_workers=workers, threads_per_worker=1, dashboard_address=None, local_directory=local
    ) as dask:
        with Client(dask) as client:
            urls = [
                f"file://{work}/{path}"
                for path in ("model/model.toml", f"out/{turn}.hatch", f"shares-{turn}")
            ]
            start = time.monotonic()
            results = cluster.pack(client, *urls, hatchback=hatchback)
            return time.monotonic() - start, results


def main(rows, folder):
    work, hatchback = Path(folder), str(Path(os.environ["HATCHBACK"]).resolve())
    synthetic.write(work / "model", lambda number: rows)
    seconds = {1: [], 2: []}
    for turn, workers in enumerate((1, 2, 1, 2)):
        took, results = timed(workers, turn, work, hatchback)
        seconds[workers].append(took)
        final = results.pop("merge")
        total = lambda name: sum(getattr(done, name) for done in results.values())
        print(f"{workers} workers: {took:.1f} s")
        print(
            f"  tables: {total('bytes_in') / 2**20:.0f} MiB in,"
            f" {total('bytes_out') / 2**20:.0f} MiB out; fetch {total('fetch_s'):.1f} s,"
            f" pack {total('run_s'):.1f} s, put {total('put_s'):.1f} s, all workers"
        )
        print(
            f"  merge: {final.bytes_in / 2**20:.0f} MiB in, {final.bytes_out / 2**20:.0f} MiB out;"
            f" fetch {final.fetch_s:.1f} s, merge {final.run_s:.1f} s, put {final.put_s:.1f} s"
        )
    one, two = ((work / "out" / f"{turn}.hatch").read_bytes() for turn in (2, 3))
    assert one == two, "two workers made another bundle than one"
    print(
        f"two workers of one: {min(seconds[2]) / min(seconds[1]):.2f} of the time; bar 0.6;"
        " the same bytes"
    )


if __name__ == "__main__":
    rows = int(sys.argv[1]) if len(sys.argv) > 1 else 320_000
    if len(sys.argv) > 2:
        main(rows, sys.argv[2])
    else:
        with tempfile.TemporaryDirectory() as folder:
            main(rows, folder)
