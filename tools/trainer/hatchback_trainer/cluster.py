"""Packs a model on a Dask cluster, from an object store into an object store. Needs distributed and
fsspec, not torch.

    python3 -m hatchback_trainer.cluster s3://models/7/model.toml --out s3://bundles/7.hatch \
        --shares s3://scratch --scheduler tcp://10.0.0.1:8786

Each table is a task: a worker fetches the table's files, runs `hatchback pack --table`, and puts
the packed table into the folder of shares, its head last. The last task merges the shares into the
bundle. A task whose head is there already does nothing. So a lost worker loses only its current
table, and a driver that is started again continues.
"""

import argparse
import contextlib
import logging
import os
import posixpath
import shutil
import subprocess
import tempfile
import time
import uuid
import zlib
from dataclasses import dataclass
from pathlib import Path

import fsspec
from distributed import Client, as_completed, get_worker

from .model_sources import ChangedSource, ModelSources, fetch, identity

LOG = logging.getLogger(__name__)

PAUSE_S_MAX = 60  # before another attempt
MACHINE_FAULT_STATUS = 3  # of `hatchback`, such as for a full disk

# Stores that show a file only when it is whole. In others a file is renamed into place.
OBJECT_STORES = {"s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "adl", "oss"}


@dataclass(frozen=True)
class Job:
    """The parameters that all tasks share."""

    model: str  # URL of model.toml
    text: bytes  # of model.toml as the driver read it, by zlib: every task holds a copy
    shares: str  # URL of the folder of packed tables
    hatchback: str  # the program on a worker
    options: tuple  # of `hatchback pack`
    threads: int  # of one `hatchback pack`
    storage: tuple  # options of the store, as (name, value)

    def open(self, url):
        return fsspec.core.url_to_fs(url, **dict(self.storage))

    def write_model(self, folder):
        """Writes model.toml into `folder`, which is made. Returns its path."""
        path = Path(folder, posixpath.basename(self.model))
        path.parent.mkdir()
        path.write_bytes(zlib.decompress(self.text))
        return path


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
    """`hatchback` refused the model or cannot be started: no attempt would end in another way."""


# Errors that no attempt can heal. Any other is tried again: each store raises errors of its own,
# and Dask replaces one that cannot be pickled with a plain `Exception`.
FINAL = (Refused, ChangedSource, PermissionError, ImportError)


def put(fs, local, remote):
    """Writes a file to the store under its name only when it is complete. Returns its bytes.

    Raises what the store raises. No other file is left there then, unless its removal fails too.
    """
    protocols = {fs.protocol} if isinstance(fs.protocol, str) else set(fs.protocol)
    if protocols & OBJECT_STORES:
        fs.put_file(str(local), remote)
    else:
        part = f"{remote}.part-{uuid.uuid4().hex}"
        try:
            fs.put_file(str(local), part)
            fs.mv(part, remote)
        except BaseException:
            with contextlib.suppress(Exception):
                fs.rm_file(part)
            raise
    return Path(local).stat().st_size


def run_program(job, words, work):
    """Runs `hatchback pack` with its temporary files in the folder `work`. The program ends with
    the worker, even if the worker is killed.

    Raises `OSError` for a signal or a fault of this machine, and `Refused` for any other failure.
    """
    ends_too = ["setpriv", "--pdeathsig", "KILL", "--"] if shutil.which("setpriv") else []
    threads = ["--threads", str(job.threads)]
    command = [*ends_too, job.hatchback, "pack", *words, *threads, *job.options]
    environment = {**os.environ, "TMPDIR": str(work)}
    try:
        done = subprocess.run(command, capture_output=True, text=True, env=environment)
    except (FileNotFoundError, PermissionError) as error:
        raise Refused(f"{job.hatchback}: cannot be started on this worker: {error}") from error
    message = f"{' '.join(command)}\n{done.stderr.strip()}"
    if done.returncode < 0:
        raise OSError(f"{job.hatchback}: ended by signal {-done.returncode}")
    if done.returncode == MACHINE_FAULT_STATUS:
        raise OSError(message)
    if done.returncode != 0:
        raise Refused(message)


@dataclass(frozen=True)
class Table:
    """A table of the model."""

    number: int
    name: str

    def files(self):
        """Returns the names of the packed files. The head is written last."""
        return f"t{self.number:04}.blobs", f"t{self.number:04}.head"


def scratch():
    """Returns a temporary folder of the worker. After a kill, the nanny (Dask's parent process)
    removes it."""
    return tempfile.TemporaryDirectory(dir=get_worker().local_directory)


def pack_table(job, table, needs):
    """Packs one table. Runs on a worker."""
    shares, folder = job.open(job.shares)
    shares.invalidate_cache()
    if shares.exists(posixpath.join(folder, table.files()[-1])):
        return Done(packed=False)
    models, model = job.open(job.model)
    with scratch() as work:
        times, out = [time.monotonic()], Path(work, "share")
        local = job.write_model(Path(work, "model"))
        bytes_in = fetch(models, posixpath.dirname(model), needs, local.parent)
        times.append(time.monotonic())
        run_program(job, [str(local), "--out", str(out), "--table", table.name], work)
        times.append(time.monotonic())
        shares.makedirs(folder, exist_ok=True)
        files = [(out / file, posixpath.join(folder, file)) for file in table.files()]
        bytes_out = sum(put(shares, local, remote) for local, remote in files)
        times.append(time.monotonic())
    spent = [after - before for before, after in zip(times, times[1:])]
    return Done(True, bytes_in, bytes_out, *spent)


def merge(job, tables, needs, out):
    """Makes the bundle of the packed tables. Runs on a worker."""
    urls = (job.shares, job.model, out)
    (shares, folder), (models, model), (outs, target) = (job.open(url) for url in urls)
    with scratch() as work:
        times, packed = [time.monotonic()], Path(work, "share")
        packed.mkdir()
        local = job.write_model(Path(work, "model"))
        bytes_in = fetch(models, posixpath.dirname(model), needs, local.parent)
        for file in (file for table in tables for file in table.files()):
            shares.get_file(posixpath.join(folder, file), str(packed / file))
            bytes_in += (packed / file).stat().st_size
        times.append(time.monotonic())
        bundle = Path(work, "bundle")
        run_program(job, [str(local), "--out", str(bundle), "--merge", str(packed)], work)
        times.append(time.monotonic())
        outs.makedirs(posixpath.dirname(target), exist_ok=True)
        bytes_out = put(outs, bundle, target)
        times.append(time.monotonic())
    spent = [after - before for before, after in zip(times, times[1:])]
    return Done(True, bytes_in, bytes_out, *spent)


def pause_s(attempt):
    """Returns the pause before an attempt, counted from 1, in seconds: none before the first, then
    1, 2, 4 and so on, at most `PAUSE_S_MAX`."""
    return min(2 ** (attempt - 2), PAUSE_S_MAX) if attempt > 1 else 0


def attempt_after(seconds, function, *arguments):
    """Returns `function(*arguments)`, called after a pause. Runs on a worker."""
    time.sleep(seconds)
    return function(*arguments)


def run_tasks(client, tasks, attempts_max):
    """Runs tasks, `{name: (function, arguments)}`, in their order of priority. Returns the results
    by name.

    Dask moves the task of a lost worker to another worker, and gives up after a few. This function
    then submits the task again, and also after an error that may pass. A task has up to
    `attempts_max` attempts in all.
    The pause before an attempt is on a worker, so an outage of the store takes only the attempts of
    the tasks that have begun.

    Raises an error of a task that is in `FINAL`, or that of its last attempt.
    """
    results, attempts, names = {}, dict.fromkeys(tasks, 0), {}

    def submit(name, priority):
        attempts[name] += 1
        task, key = (pause_s(attempts[name]), *tasks[name]), f"{name}-{uuid.uuid4().hex}"
        future = client.submit(attempt_after, *task, key=key, pure=False, priority=priority)
        names[future.key] = name
        return future

    running = as_completed([submit(name, -place) for place, name in enumerate(tasks)])
    for future in running:
        name = names[future.key]
        if future.status == "finished":
            results[name] = future.result()
            # Dask then forgets the task. Otherwise it would repeat the task if the worker with the
            # result is lost.
            future.release()
            continue
        error = future.exception() if future.status == "error" else None
        error = error or RuntimeError(f"Dask reports the task as {future.status}")
        if isinstance(error, FINAL) or attempts[name] >= attempts_max:
            raise error
        LOG.warning("%s: attempt %d of %d failed, and another follows: %s: %s",
                    name, attempts[name], attempts_max, type(error).__name__, error)
        running.add(submit(name, 0))
    return results


def pack(
    client, model, out, shares, *, hatchback="hatchback", options=(), threads=1, storage=None,
    attempts_max=20,
):
    """Packs `model`, the URL of a model.toml, into the bundle `out` on the workers of `client`.

    `shares` is the URL of a folder for packed tables; each state of the sources has a folder in it.
    Its content may be removed once the bundle is there. Each task has at most `attempts_max`
    attempts. Returns the results of all tasks by name; the merge is `merge`.

    Raises `Refused` with the message of `hatchback` if the model or a file is wrong,
    `ChangedSource` if a file changes meanwhile, `PermissionError` if a store denies access, and the
    last error of a task that failed `attempts_max` times.
    """
    storage = tuple((storage or {}).items())
    fs, path = fsspec.core.url_to_fs(model, **dict(storage))
    sources = ModelSources(fs, path)
    common, merged = sources.common_needs(), sources.merge_needs()
    needs = [sources.table_needs(number) for number in range(len(sources.tables()))]
    version = client.submit(program_version, hatchback, pure=False).result()
    inputs = [*common, *(need for table in needs for need in table)]
    folder = posixpath.join(shares, identity(sources, inputs, [version, *options]))
    text = zlib.compress(sources.text)
    job = Job(model, text, folder, hatchback, tuple(options), threads, storage)

    tables = [(Table(*table), [*common, *needs[table[0]]]) for table in enumerate(sources.tables())]
    tables.sort(key=lambda one: -sum(need.bytes for need in one[1]))
    tasks = {f"pack-t{table.number:04}": (pack_table, job, table, own) for table, own in tables}
    results = run_tasks(client, tasks, attempts_max)
    final = {"merge": (merge, job, [table for table, _ in tables], [*common, *merged], out)}
    return results | run_tasks(client, final, attempts_max)


def program_version(hatchback):
    """Returns the version that the program on a worker prints."""
    asked = subprocess.run([hatchback, "--version"], check=True, capture_output=True, text=True)
    return asked.stdout.strip()


def main():
    parser = argparse.ArgumentParser(
        prog="hatchback_trainer.cluster", description="Packs a model on a Dask cluster."
    )
    add = parser.add_argument
    add("model", metavar="URL", help="the model.toml, such as s3://models/7/model.toml")
    add("--out", required=True, metavar="URL", help="the bundle to write")
    add("--shares", required=True, metavar="URL", help="a folder for packed tables")
    add("--scheduler", required=True, metavar="ADDRESS",
        help="Dask's scheduler, such as tcp://10.0.0.1:8786")
    add("--hatchback", default="hatchback", metavar="PROGRAM", help="the program on the workers")
    add("--threads", type=int, default=1, metavar="N", help="threads for one table (default: 1)")
    add("--option", action="append", default=[], metavar="WORD",
        help="a word for `hatchback pack`, such as --option=--codec=u8")
    args = parser.parse_args()
    with Client(args.scheduler) as client:
        results = pack(
            client, args.model, args.out, args.shares, hatchback=args.hatchback,
            options=args.option, threads=args.threads,
        )
    packed = [done for name, done in results.items() if name != "merge" and done.packed]
    moved = sum(done.bytes_in + done.bytes_out for done in results.values())
    written = f"{args.out}: {results['merge'].bytes_out} bytes"
    print(f"{written}; {len(packed)} of {len(results) - 1} tasks packed, {moved} bytes moved")


if __name__ == "__main__":
    main()
