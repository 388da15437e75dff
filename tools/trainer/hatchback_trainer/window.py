"""Windows: what changed in a model between two steps, as `hatchback select` reads
it (FORMAT.md section 8).

A window is a folder with rows.safetensors, optionally dense.onnx and probe.jsonl, and window.json,
which is renamed into place last. A writer that is killed leaves no window. This file needs numpy
and no torch, and never looks at a model.
"""

import hashlib
import json
import os
import re
import shutil
import time
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from . import safetensors

FORMAT = 1
HEAD, ROWS, DENSE, PROBE = "window.json", "rows.safetensors", "dense.onnx", "probe.jsonl"


@dataclass
class Changes:
    """The changes of one table: rows with their u64 keys, and deleted keys. A key occurs once."""

    keys: object = ()  # [n] integers; a negative one counts as the u64 of the same bits
    rows: object = None  # f32 [n, dim]
    traffic: object = None  # [n] lookups of each row in the window
    deleted: object = ()  # [d] integers


@dataclass
class Window:
    """A closed window, as `read` returns it."""

    head: dict
    tables: dict = field(default_factory=dict)  # table name -> Changes
    dense: bytes | None = None
    probe: str | None = None


def as_u64(keys):
    """Returns keys as u64 `[n]`. Negative ones keep their bits."""
    array = safetensors.as_array(keys) if len(keys) else np.zeros(0, np.int64)
    if array.dtype.kind not in "iu":  # Numpy takes a list with -1 and 2**63 for floats
        raise ValueError(f"keys: are of type {array.dtype}, must be integers of at most 64 bits")
    return (
        array.astype(np.uint64) if array.dtype.kind == "u"
        else array.astype(np.int64).view(np.uint64)
    )


def columns(tables):
    """Returns the tensors of rows.safetensors. A column without entries is left out."""
    tensors = {}
    for name, one in tables.items():
        keys, deleted = as_u64(one.keys), as_u64(one.deleted)
        both = np.concatenate([keys, deleted])
        if len(np.unique(both)) != len(both):
            raise ValueError(f"table `{name}`: a key occurs twice, or is both written and deleted")
        if len(keys):
            rows = safetensors.as_array(one.rows).astype(np.float32, copy=False)
            if rows.ndim != 2 or len(rows) != len(keys):
                raise ValueError(
                    f"table `{name}`: rows have shape {list(rows.shape)}, not [{len(keys)}, dim]"
                )
            if not np.isfinite(rows).all():
                bad = int(np.flatnonzero(~np.isfinite(rows).all(axis=1))[0])
                raise ValueError(
                    f"table `{name}`: the row of key {keys[bad]} is not finite: "
                    "the training diverged"
                )
            tensors[f"{name}.keys"], tensors[f"{name}.rows"] = keys, rows
            if one.traffic is not None:
                tensors[f"{name}.traffic"] = safetensors.as_array(one.traffic).astype(
                    np.float32, copy=False
                )
        if len(deleted):
            tensors[f"{name}.deleted"] = deleted
    return tensors


def write_file(path, parts):
    """Writes a durable file. Returns its entry in window.json."""
    digest, size = hashlib.sha256(), 0
    with open(path, "wb") as file:
        for part in parts:
            digest.update(part)
            size += len(part)
            file.write(part)
        file.flush()
        os.fsync(file.fileno())
    return {"name": path.name, "bytes": size, "sha256": digest.hexdigest()}


def sync_folder(folder):
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class WindowWriter:
    """Writes the windows of one model into `folder`, numbered from 1 or after
    the last closed one."""

    def __init__(self, folder, lineage):
        if not re.fullmatch(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,119}", lineage):
            rule = "is not 1..=120 of [A-Za-z0-9._-], or begins with a dot"
            raise ValueError(f"lineage: `{lineage}` {rule}")
        self.folder, self.lineage = Path(folder), lineage
        self.folder.mkdir(parents=True, exist_ok=True)
        self.next = last_closed(self.folder) + 1

    def write(self, tables, step, dense=None, probe=None, closed_ms=None):
        """Closes a window and returns its folder.

        `tables` maps table names to `Changes`. `dense` is the bytes of an ONNX file, `probe` lines
        of samples. Without `dense` the fleet keeps its network; give one with every window, so that
        rows and network are of one step.
        """
        folder = self.folder / f"{self.next:012}"
        if folder.exists():
            shutil.rmtree(folder)  # a killed writer left it without window.json
        folder.mkdir()
        files = [write_file(folder / ROWS, safetensors.blocks(columns(tables)))]
        if dense is not None:
            files.append(write_file(folder / DENSE, [dense]))
        if probe is not None:
            files.append(
                write_file(folder / PROBE, [probe.encode() if isinstance(probe, str) else probe])
            )
        sync_folder(folder)

        head = {"format": FORMAT, "lineage": self.lineage, "window": self.next, "step": int(step)}
        head["closed_ms"] = int(time.time() * 1000) if closed_ms is None else int(closed_ms)
        head["files"] = files
        text = json.dumps(head, separators=(",", ":")) + "\n"
        write_file(folder / f"{HEAD}.part", [text.encode()])
        os.replace(folder / f"{HEAD}.part", folder / HEAD)
        sync_folder(folder)
        sync_folder(self.folder)
        self.next += 1
        return folder


def closed(folder):
    """Returns the folders of all closed windows, in order."""
    named = [
        path for path in Path(folder).iterdir() if len(path.name) == 12 and path.name.isdigit()
    ]
    return sorted(path for path in named if (path / HEAD).is_file())


def head(folder):
    """Returns the content of window.json of the window in `folder`."""
    return json.loads((Path(folder) / HEAD).read_text())


def last_closed(folder):
    """Returns the number of the newest closed window; 0 without one."""
    return max((int(path.name) for path in closed(folder)), default=0)


def read(folder):
    """Returns the window in `folder`. Checks the hash of every file."""
    folder = Path(folder)
    window = Window(head(folder))
    for one in window.head["files"]:
        content = (folder / one["name"]).read_bytes()
        if hashlib.sha256(content).hexdigest() != one["sha256"]:
            raise ValueError(f"{folder / one['name']}: content does not match the hash in {HEAD}")
        if one["name"] == DENSE:
            window.dense = content
        elif one["name"] == PROBE:
            window.probe = content.decode()
    for name, tensor in safetensors.read(folder / ROWS).items():
        table, column = name.rsplit(".", 1)
        setattr(window.tables.setdefault(table, Changes()), column, tensor)
    return window
