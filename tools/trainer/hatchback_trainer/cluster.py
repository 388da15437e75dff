"""Packs a model on a Dask cluster, from an object store into an object store. Needs distributed and fsspec, not torch.

    python3 -m hatchback_trainer.cluster s3://models/7/model.toml --out s3://bundles/7.hatch --shares s3://scratch \
        --scheduler tcp://10.0.0.1:8786

Each table is a task: a worker fetches the table's files, runs `hatchback pack --table`, and puts the packed table into
the folder of shares, its head last. The last task merges the shares into the bundle. A task whose head
is there already does nothing. So a lost worker loses only its current table, and a driver that is started again continues.
"""

import argparse
import posixpath
import shutil
import subprocess
import tempfile
import time
import uuid
from dataclasses import dataclass
from pathlib import Path

import fsspec
from distributed import Client, KilledWorker, as_completed, get_worker

from .model_sources import ModelSources, fetch, identity

# Stores that show a file only when it is whole. In others a file is renamed into place.
OBJECT_STORES = {"s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "adl", "oss"}


@dataclass(frozen=True)
class Job:
    """The parameters that all tasks share."""

    model: str  # URL of model.toml
    shares: str  # URL of the folder of packed tables
    hatchback: str  # the program on a worker
    options: tuple  # of `hatchback pack`
    threads: int  # of one `hatchback pack`
    storage: tuple  # options of the store, as (name, value)

    def open(self, url):
        return fsspec.core.url_to_fs(url, **dict(self.storage))


@dataclass(frozen=True)
class Done:
    """The result of a task. `packed` is false if an earlier task had already packed the table."""

    packed: bool
    bytes_in: int = 0
    bytes_out: int = 0
    fetch_s: float = 0.0
    run_s: float = 0.0
    put_s: float = 0.0


class Refused(Exception):
    """`hatchback` refused the model: another attempt would end in the same way."""


def put(fs, local, remote):
    """Writes a file to the store under its name only when it is complete. Returns its bytes."""
    protocols = {fs.protocol} if isinstance(fs.protocol, str) else set(fs.protocol)
    if protocols & OBJECT_STORES:
        fs.put_file(str(local), remote)
    else:
        part = f"{remote}.part-{uuid.uuid4().hex}"
        fs.put_file(str(local), part)
        fs.mv(part, remote)
    return Path(local).stat().st_size


def run_program(job, words):
    """Runs `hatchback pack`. The program ends with the worker, even if the worker is killed."""
    ends_too = ["setpriv", "--pdeathsig", "KILL", "--"] if shutil.which("setpriv") else []
    command = [*ends_too, job.hatchback, "pack", *words, "--threads", str(job.threads), *job.options]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode < 0:
        raise OSError(f"{job.hatchback}: ended by signal {-done.returncode}")
    if done.returncode != 0:
        raise Refused(f"{' '.join(command)}\n{done.stderr.strip()}")


def file_names(number):
    """Returns the names of a packed table's files. The head is written last."""
    return f"t{number:04}.blobs", f"t{number:04}.head"


def scratch():
    """Returns a temporary folder of the worker. After a kill, the nanny (Dask's parent process) removes it."""
    return tempfile.TemporaryDirectory(dir=get_worker().local_directory)


def pack_table(job, number, name, needs):
    """Packs one table. Runs on a worker."""
    shares, folder = job.open(job.shares)
    blobs, head = (posixpath.join(folder, file) for file in file_names(number))
    shares.invalidate_cache()
    if shares.exists(head):
        return Done(packed=False)
    models, model = job.open(job.model)
    with scratch() as work:
        local, out, times = Path(work, "model", posixpath.basename(model)), Path(work, "share"), [time.monotonic()]
        local.parent.mkdir()
        local.write_bytes(models.cat_file(model))
        bytes_in = fetch(models, posixpath.dirname(model), needs, local.parent)
        times.append(time.monotonic())
        run_program(job, [str(local), "--out", str(out), "--table", name])
        times.append(time.monotonic())
        shares.makedirs(folder, exist_ok=True)
        bytes_out = sum(put(shares, out / posixpath.basename(file), file) for file in (blobs, head))
        times.append(time.monotonic())
    spent = [after - before for before, after in zip(times, times[1:])]
    return Done(True, bytes_in, bytes_out, *spent)


def merge(job, tables, needs, out):
    """Makes the bundle of the packed tables. Runs on a worker."""
    (shares, folder), (models, model), (outs, target) = (job.open(url) for url in (job.shares, job.model, out))
    with scratch() as work:
        local, packed, times = Path(work, "model", posixpath.basename(model)), Path(work, "share"), [time.monotonic()]
        packed.mkdir()
        local.parent.mkdir()
        local.write_bytes(models.cat_file(model))
        bytes_in = fetch(models, posixpath.dirname(model), needs, local.parent)
        for file in (file for number in range(tables) for file in file_names(number)):
            shares.get_file(posixpath.join(folder, file), str(packed / file))
            bytes_in += (packed / file).stat().st_size
        times.append(time.monotonic())
        bundle = Path(work, "bundle")
        run_program(job, [str(local), "--out", str(bundle), "--merge", str(packed)])
        times.append(time.monotonic())
        outs.makedirs(posixpath.dirname(target), exist_ok=True)
        bytes_out = put(outs, bundle, target)
        times.append(time.monotonic())
    spent = [after - before for before, after in zip(times, times[1:])]
    return Done(True, bytes_in, bytes_out, *spent)


def run_tasks(client, tasks, attempts_max):
    """Runs tasks, `{name: (function, arguments)}`, in their order of priority. Returns the results by name.

    Dask moves the task of a lost worker to another worker, and gives up after a few. This function then submits the task
    again, and also after an error of the store, up to `attempts_max` times.
    """
    results, attempts, names = {}, dict.fromkeys(tasks, 0), {}

    def submit(name, priority):
        function, *arguments = tasks[name]
        attempts[name] += 1
        key = f"{name}-{uuid.uuid4().hex}"
        future = client.submit(function, *arguments, key=key, pure=False, priority=priority)
        names[future.key] = name
        return future

    running = as_completed([submit(name, -place) for place, name in enumerate(tasks)])
    for future in running:
        name = names[future.key]
        error = future.exception() if future.status == "error" else None
        again = isinstance(error, (KilledWorker, OSError)) or future.status in ("lost", "cancelled")
        if again and attempts[name] < attempts_max:
            running.add(submit(name, 0))
        elif future.status != "finished":
            raise error or RuntimeError(f"{name}: {future.status}")
        else:
            results[name] = future.result()
            # Dask then forgets the task. Otherwise it would repeat the task if the worker with the result is lost.
            future.release()
    return results


def pack(client, model, out, shares, *, hatchback="hatchback", options=(), threads=1, storage=None, attempts_max=20):
    """Packs `model`, the URL of a model.toml, into the bundle `out` on the workers of `client`.

    `shares` is the URL of a folder for packed tables; each state of the sources has a folder in it. Its content may be
    removed once the bundle is there. Returns the results of all tasks by name; the merge is `merge`.

    Raises `Refused` with the message of `hatchback` if the model or a file is wrong.
    """
    storage = tuple((storage or {}).items())
    fs, path = fsspec.core.url_to_fs(model, **dict(storage))
    sources = ModelSources(fs, path)
    common, merged = sources.common_needs(), sources.merge_needs()
    needs = [sources.table_needs(number) for number in range(len(sources.tables()))]
    version = client.submit(program_version, hatchback, pure=False).result()
    name = identity(sources, [*common, *(need for table in needs for need in table)], [version, *options])
    job = Job(model, posixpath.join(shares, name), hatchback, tuple(options), threads, storage)

    largest_first = sorted(range(len(needs)), key=lambda number: -sum(need.bytes for need in needs[number]))
    names = sources.tables()
    tasks = {f"table-{n}": (pack_table, job, n, names[n], [*common, *needs[n]]) for n in largest_first}
    results = run_tasks(client, tasks, attempts_max)
    final = {"merge": (merge, job, len(needs), [*common, *merged], out)}
    return results | run_tasks(client, final, attempts_max)


def program_version(hatchback):
    """Returns the version that the program on a worker prints."""
    return subprocess.run([hatchback, "--version"], check=True, capture_output=True, text=True).stdout.strip()


def main():
    parser = argparse.ArgumentParser(prog="hatchback_trainer.cluster", description="Packs a model on a Dask cluster.")
    parser.add_argument("model", metavar="URL", help="the model.toml, such as s3://models/7/model.toml")
    parser.add_argument("--out", required=True, metavar="URL", help="the bundle to write")
    parser.add_argument("--shares", required=True, metavar="URL", help="a folder for packed tables")
    parser.add_argument("--scheduler", required=True, metavar="ADDRESS", help="Dask's scheduler, such as tcp://10.0.0.1:8786")
    parser.add_argument("--hatchback", default="hatchback", metavar="PROGRAM", help="the program on the workers")
    parser.add_argument("--threads", type=int, default=1, metavar="N", help="threads for one table (default: 1)")
    parser.add_argument("--option", action="append", default=[], metavar="WORD", help="a word for `hatchback pack`, such as --option=--codec=u8")
    args = parser.parse_args()
    with Client(args.scheduler) as client:
        results = pack(client, args.model, args.out, args.shares, hatchback=args.hatchback, options=args.option, threads=args.threads)
    packed = [done for name, done in results.items() if name != "merge" and done.packed]
    moved = sum(done.bytes_in + done.bytes_out for done in results.values())
    print(f"{args.out}: {results['merge'].bytes_out} bytes; {len(packed)} of {len(results) - 1} tables packed, {moved} bytes moved")


if __name__ == "__main__":
    main()
