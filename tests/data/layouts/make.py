#!/usr/bin/env python3
"""Writes the golden tables for the tests of the importers of `hatchback pack`.

    make.py            writes the files next to this script
    make.py --check    writes nothing; exits with 1 if a file on disk differs from the generated one

Uses Python 3 and its standard library, no clock and no randomness. Each writer follows the
layout that its trainer documents or writes, never Hatchback's own reader. A comment above each
writer quotes that layout. The numbers follow closed formulas, which `tools/src/import/golden.rs`
states a second time:

    value of table t, row r, column c   (t * 1000 + r * 10 + c) / 8
    wide key of row r (i64)             (r - 2) * 10_000_000_019
    short key of row r (u32)            (r * 2_654_435_761) mod 2**32
    count of row r                      1000 // (r + 1)

A value is exact in f16 below 256 and in bf16 below 32. The first two wide keys are negative.
"""

import json
import pathlib
import struct
import sys

HERE = pathlib.Path(__file__).resolve().parent


def values(t, rows, dim):
    return [(t * 1000 + r * 10 + c) / 8 for r in range(rows) for c in range(dim)]


def wide_keys(rows):
    return [(r - 2) * 10_000_000_019 for r in range(rows)]


def short_keys(rows):
    return [(r * 2_654_435_761) % 2**32 for r in range(rows)]


def counts(rows):
    return [1000 // (r + 1) for r in range(rows)]


def pack(code, numbers):
    """Returns little-endian bytes. Struct codes: e f16, f f32, d f64, i i32, q i64,
    I u32, Q u64."""
    return struct.pack(f"<{len(numbers)}{code}", *numbers)


def pack_bf16(numbers):
    """Returns the upper halves of the f32 numbers. Asserts that every lower half is zero,
    so none is rounded."""
    raw = struct.pack(f"<{len(numbers)}f", *numbers)
    assert all(raw[i : i + 2] == b"\0\0" for i in range(0, len(raw), 4))
    return b"".join(raw[i + 2 : i + 4] for i in range(0, len(raw), 4))


# safetensors: u64 LE header length n; n bytes of JSON; then the contiguous tensors. The JSON is
# {name: {dtype, shape, data_offsets: [from, to]}} plus an optional "__metadata__" map of strings.
# Spaces pad it so that (8 + n) % 8 == 0. The offsets count from the end of the header.
def safetensors(tensors):
    header, data = {"__metadata__": {"generation": "7", "step": "1200"}}, b""
    for name, dtype, shape, raw in tensors:
        header[name] = {
            "dtype": dtype, "shape": shape, "data_offsets": [len(data), len(data) + len(raw)]
        }
        data += raw
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % 8)
    return struct.pack("<Q", len(text)) + text + data


# npy: "\x93NUMPY", version major and minor, header length, a Python dict literal; then the data
# in C order. The length is u16 LE in version 1 and u32 LE in version 2. Spaces and a newline pad
# the literal, so that the data starts at a multiple of 64.
def npy(descr, shape, raw, version=1):
    size = {1: "<H", 2: "<I"}[version]
    dims = "".join(f"{n}, " for n in shape) if len(shape) == 1 else ", ".join(map(str, shape))
    text = (
        f"{{'descr': '{descr}', 'fortran_order': False, 'shape': ({dims.rstrip(' ')}), }}".encode()
    )
    prefix = 8 + struct.calcsize(size)
    text += b" " * (-(prefix + len(text) + 1) % 64) + b"\n"
    return b"\x93NUMPY" + bytes([version, 0]) + struct.pack(size, len(text)) + text + raw


# HugeCTR sparse model folder: `key` i64 LE per row (always 8 bytes), `emb_vector` f32[rows][dim].
# Localized slots add `slot_id` (size_t per row). HPS may add `meta`, which has the size of `key`
# and the access count of each row. The files have no headers and do not state the dim.
def hugectr(folder, t, rows, dim, extras):
    files = {"key": pack("q", wide_keys(rows)), "emb_vector": pack("f", values(t, rows, dim))}
    if extras:
        files["slot_id"] = pack("Q", [r % 3 for r in range(rows)])
        files["meta"] = pack("q", counts(rows))
    return {f"hugectr/{folder}/{name}": raw for name, raw in files.items()}


# SOK dump: `<table>-key`, `<table>-weight`, `<table>-<Opt>-<slot>`. `_` replaces punctuation of the
# table's name. Each file has 296 bytes of header, then the data, little-endian. The header:
#     name[256]            right-justified with spaces
#     u32 *big-endian*     kind: 0 key, 1 embedding, 2 optimizer
#     variable name[32]    right-justified with spaces
#     u32 *big-endian*     dtype: 0 i32, 1 i64, 2 u32, 3 u64, 4 f16, 5 f32, 6 f64
def sok_file(name, kind, slot, dtype, raw):
    head = (
        name.rjust(256).encode() + struct.pack(">I", kind) + slot.rjust(32).encode()
        + struct.pack(">I", dtype)
    )
    assert len(head) == 296
    return head + raw


# SOK `meta_info`, big-endian: u32 n; then u32 key dtypes[n], u32 embedding dtypes[n], u32 dims[n],
# u64 row counts[n], names[n][256], optimizers[n][32], both right-justified.
def sok_meta(tables):
    n = len(tables)
    names, optimizers, keys, embs, dims, rows = zip(*tables)
    raw = struct.pack(f">I{n}I{n}I{n}I{n}Q", n, *keys, *embs, *dims, *rows)
    return (
        raw + "".join(s.rjust(256) for s in names).encode()
        + "".join(s.rjust(32) for s in optimizers).encode()
    )


def sok():
    """Returns the files of the documented layout: headers with names, and a meta_info."""
    user, item = "emb/user:0", "item"
    return {
        "sok/emb_user_0-key": sok_file(user, 0, "", 1, pack("q", wide_keys(11))),
        "sok/emb_user_0-weight": sok_file(user, 1, "", 5, pack("f", values(6, 11, 4))),
        "sok/emb_user_0-Adam-m": sok_file(user, 2, "m", 5, pack("f", values(7, 11, 4))),
        "sok/item-key": sok_file(item, 0, "", 2, pack("I", short_keys(13))),
        "sok/item-weight": sok_file(item, 1, "", 4, pack("e", values(1, 13, 2))),
        "sok/meta_info": sok_meta([(user, "Adam", 1, 5, 4, 11), (item, "None", 2, 4, 2, 13)]),
    }


def sok_bare():
    """Returns the files that `sok.dump` of 23.12 to 25.03 writes: blank names and no meta_info."""
    return {
        "sok_bare/table1_0-key": sok_file("", 0, "", 1, pack("q", wide_keys(5))),
        "sok_bare/table1_0-weight": sok_file("", 1, "", 6, pack("d", values(8, 5, 3))),
    }


# HugeCTR EmbeddingCollection: `meta_data` = i32[5], i32 ids[tables], u64 key counts[tables]
# (unaligned if tables is even), i32 dims[tables]. The i32[5] are {tables, key type: 0 u32 1 i64,
# value type: 0 f32 1 f16, 0, 0}. `key<id>` and `weight<id>` have an i32[32] header, then the raw
# array. The header is {1 key 2 weight 3 optimizer, table id, 0...}.
def collection_meta(key_type, value_type, tables):
    n = len(tables)
    ids, rows, dims = zip(*tables)
    return struct.pack(f"<5i{n}i{n}Q{n}i", n, key_type, value_type, 0, 0, *ids, *rows, *dims)


def collection_file(kind, table, raw):
    return struct.pack("<32i", kind, table, *[0] * 30) + raw


def collection(e, key_type, keys, code, value_type, value_code, tables, ts):
    files = {"meta_data": collection_meta(key_type, value_type, tables)}
    for (table, rows, dim), t in zip(tables, ts):
        files[f"key{table}"] = collection_file(1, table, pack(code, keys(rows)))
        files[f"weight{table}"] = collection_file(2, table, pack(value_code, values(t, rows, dim)))
    return {f"embedding_collection_{e}/{name}": raw for name, raw in files.items()}


def golden():
    model = safetensors(
        [
            ("plain", "F32", [12, 4], pack("f", values(2, 12, 4))),
            ("half", "F16", [20, 8], pack("e", values(1, 20, 8))),
            ("brain", "BF16", [20, 4], pack_bf16(values(0, 20, 4))),
            ("double", "F64", [6, 3], pack("d", values(5, 6, 3))),
            ("sparse.keys", "I64", [9], pack("q", wide_keys(9))),
            ("sparse.rows", "F32", [9, 6], pack("f", values(3, 9, 6))),
            ("sparse.counts", "I64", [9], pack("q", counts(9))),
        ]
    )
    files = {
        "safetensors/model.safetensors": model,
        "npy/a.npy": npy("<f4", [10, 5], pack("f", values(4, 10, 5))),
        "npy/v2.npy": npy("<f4", [10, 5], pack("f", values(4, 10, 5)), version=2),
        "npy/half.npy": npy("<f2", [10, 5], pack("e", values(1, 10, 5))),
        "npy/keys.npy": npy("<i8", [10], pack("q", wide_keys(10))),
        "npy/counts.npy": npy("<u4", [10], pack("I", counts(10))),
    }
    files |= hugectr("plain", 9, 8, 4, extras=False) | hugectr("localized", 10, 7, 2, extras=True)
    files |= sok() | sok_bare()
    files |= collection(0, 1, wide_keys, "q", 0, "f", [(0, 6, 4), (1, 9, 2)], [11, 12])
    files |= collection(1, 0, short_keys, "I", 1, "e", [(0, 3, 2), (1, 5, 4), (2, 4, 8)], [0, 1, 1])
    return files


def differences(files):
    on_disk = {p.relative_to(HERE).as_posix() for p in HERE.glob("*/**/*") if p.is_file()}
    for name in sorted(on_disk | set(files)):
        path = HERE / name
        if not path.is_file() or files.get(name) != path.read_bytes():
            yield name


def main():
    files = golden()
    if sys.argv[1:] == ["--check"]:
        stale = list(differences(files))
        for name in stale:
            print(f"{name}: differs from what make.py writes", file=sys.stderr)
        sys.exit(1 if stale else 0)
    for name, raw in files.items():
        (HERE / name).parent.mkdir(parents=True, exist_ok=True)
        (HERE / name).write_bytes(raw)


if __name__ == "__main__":
    main()
