"""Finds the files that a model.toml needs from a store, table by table, and copies them.

Needs fsspec, never torch. A worker of `cluster.py` fetches what one table needs and no more. Of a
safetensors file it fetches the header and the tensors of that table. The rest of its copy is a
hole.
"""

import hashlib
import json
import posixpath
import string
import struct
import tomllib
from dataclasses import dataclass
from pathlib import Path

PIECE_BYTES = 32 << 20  # bytes of a file that are in memory at a time
PUNCTUATION = str.maketrans(dict.fromkeys(string.punctuation, "_"))  # as SOK names its files


@dataclass(frozen=True)
class Need:
    """A file that a table needs, of `size` bytes: all of it, or the `ranges` (begin, end)."""

    path: str  # relative to the folder of model.toml
    size: int
    state: str  # what the store says of the file's version
    ranges: tuple | None = None

    @property
    def bytes(self):
        return self.size if self.ranges is None else sum(end - begin for begin, end in self.ranges)


class ModelSources:
    """A model.toml in a store. `base` is its folder there."""

    def __init__(self, fs, path):
        fs.invalidate_cache()
        self.fs, self.base = fs, posixpath.dirname(path)
        self.text = fs.cat_file(path)
        self.model = tomllib.loads(self.text.decode())
        self.headers = {}

    def at(self, path):
        return posixpath.normpath(posixpath.join(self.base, path))

    def tables(self):
        """Returns the names of the tables, in the order of their numbers."""
        return [table["name"] for table in self.model.get("table", [])]

    def table_needs(self, number):
        """Returns the files of one table's rows."""
        source = self.model["table"][number]["source"]
        kind, path = source["format"], source["path"]
        parts = [source.get(part) for part in ("keys", "counts")]
        if kind == "safetensors":
            return [self.tensors(path, [source["tensor"], *filter(None, parts)])]
        if kind == "npy":
            return [self.whole(one) for one in [path, *filter(None, parts)]]
        if kind == "embedding_collection":
            table = source["table"]
            return [
                self.whole(f"{path}/{name}")
                for name in (f"key{table}", f"weight{table}", "meta_data")
            ]
        found = [
            one["name"] for one in self.fs.ls(self.at(path), detail=True) if one["type"] == "file"
        ]
        names = sorted(posixpath.basename(name) for name in found)
        if kind == "sok":
            stem = source["table"].strip().translate(PUNCTUATION)
            names = [
                name for name in names if name in (f"{stem}-key", f"{stem}-weight", "meta_info")
            ]
        return [self.whole(f"{path}/{name}") for name in names]

    def common_needs(self):
        """Returns the files that the packing of every table needs: the vocabularies."""
        keys = [feature.get("key", {}) for feature in self.model.get("feature", [])]
        paths = [key["path"] for key in keys if isinstance(key, dict) and "path" in key]
        return [self.whole(path) for path in dict.fromkeys(paths)]

    def merge_needs(self):
        """Returns the files that the merge needs besides the packed tables.

        These are the network and the probe set. Weights beside an ONNX file are found by its name:
        `dense.onnx` and every `dense.onnx*`.
        """
        network = self.model.get("network", {})
        hugectr = network.get("hugectr") or {}
        paths = [value for value in hugectr.values() if isinstance(value, str)]
        if "onnx" in network:
            folder = posixpath.dirname(network["onnx"])
            found = self.fs.glob(self.at(network["onnx"]) + "*")
            paths += [posixpath.join(folder, posixpath.basename(one)) for one in found]
        probe = self.model.get("probe", {}).get("samples")
        return [self.whole(path) for path in dict.fromkeys([*paths, *filter(None, [probe])])]

    def whole(self, path):
        info = self.fs.info(self.at(path))
        return Need(path, info["size"], state(info))

    def tensors(self, path, names):
        """Returns the need of some tensors of a safetensors file: its header and their bytes."""
        one = self.whole(path)
        if path not in self.headers:
            (length,) = struct.unpack("<Q", self.fs.cat_file(self.at(path), start=0, end=8))
            self.headers[path] = (
                8 + length,
                json.loads(self.fs.cat_file(self.at(path), start=8, end=8 + length)),
            )
        data, header = self.headers[path]
        held = [header[name] for name in names if name in header]  # `pack` reports a missing one
        ranges = [tuple(data + at for at in tensor["data_offsets"]) for tensor in held]
        return Need(path, one.size, one.state, ((0, data), *ranges))


def state(info):
    """Returns a text that changes with the file.

    It is the file's size with the store's tag or the time of the last change.
    """
    version = next(
        (info[key] for key in ("ETag", "etag", "md5", "mtime", "LastModified") if info.get(key)), ""
    )
    return f"{info['size']} {version}"


def identity(sources, needs, options):
    """Returns a hash of all that the bytes of the packed tables depend on."""
    files = sorted((need.path, need.state) for need in needs)
    text = json.dumps([sources.text.decode(), files, list(options)])
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def fetch(sources_fs, base, needs, folder):
    """Copies the needs into `folder`, under the paths that model.toml gives them.

    Returns the bytes moved. Raises `ChangedSource` if a file has changed since the needs were
    listed.
    """
    moved = 0
    for need in needs:
        remote, local = posixpath.normpath(posixpath.join(base, need.path)), Path(folder, need.path)
        local.parent.mkdir(parents=True, exist_ok=True)
        with open(local, "wb") as file:
            file.truncate(need.size)
            for begin, end in need.ranges or [(0, need.size)]:
                file.seek(begin)
                for at in range(begin, end, PIECE_BYTES):
                    file.write(
                        sources_fs.cat_file(remote, start=at, end=min(at + PIECE_BYTES, end))
                    )
        sources_fs.invalidate_cache()
        if state(sources_fs.info(remote)) != need.state:
            raise ChangedSource(f"{remote}: changed while it was packed")
        moved += need.bytes
    return moved


class ChangedSource(Exception):
    """A source is no longer the version that the pack began with."""
