"""A writer of the safetensors layout: u64 LE header length, JSON header, then all tensors
one after the other.

The header is padded with spaces so that the data starts at a multiple of 8. F32, I64 and U64 only;
torch tensors and numpy arrays. It needs numpy, not torch. It assumes a little-endian machine.
"""

import json
import struct

import numpy as np

DTYPES = {np.dtype(np.float32): "F32", np.dtype(np.int64): "I64", np.dtype(np.uint64): "U64"}
ARRAYS = {name: dtype for dtype, name in DTYPES.items()}


def as_array(tensor):
    """Returns a torch tensor or a numpy array as a contiguous numpy array in the machine's byte
    order."""
    array = np.ascontiguousarray(
        tensor.detach().cpu().numpy() if hasattr(tensor, "detach") else tensor
    )
    return array.astype(array.dtype.newbyteorder("="), copy=False)


def header_of(tensors):
    """Maps each name to dtype, shape and byte range, in the order of the data."""
    header, at = {}, 0
    for name, array in tensors:
        if array.dtype not in DTYPES:
            raise ValueError(f"tensor `{name}`: {array.dtype} is not one of {list(ARRAYS)}")
        end = at + array.nbytes
        header[name] = {
            "dtype": DTYPES[array.dtype], "shape": list(array.shape), "data_offsets": [at, end]
        }
        at = end
    return header


def blocks(tensors):
    """Yields the bytes of a file with a dict of tensors. The 8-byte ones come first, so that
    every tensor is aligned."""
    arrays = {name: as_array(tensor) for name, tensor in tensors.items()}
    ordered = sorted(arrays.items(), key=lambda item: (-item[1].itemsize, item[0]))
    text = json.dumps(header_of(ordered), separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    yield struct.pack("<Q", len(text)) + text
    for _, array in ordered:
        yield array.tobytes()


def write(path, tensors):
    """Writes a dict of tensors."""
    with open(path, "wb") as file:
        for block in blocks(tensors):
            file.write(block)


def read_parts(path):
    """Returns the header as a dict, and the bytes after it."""
    with open(path, "rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        return json.loads(file.read(length)), file.read()


def read(path):
    """Returns the tensors of a file as a dict of numpy arrays."""
    header, data = read_parts(path)
    header.pop("__metadata__", None)
    tensors = {}
    for name, one in header.items():
        begin, end = one["data_offsets"]
        tensors[name] = np.frombuffer(
            data[begin:end], dtype=ARRAYS[one["dtype"]]
        ).reshape(one["shape"]).copy()
    return tensors
