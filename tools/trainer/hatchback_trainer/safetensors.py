"""A writer of the safetensors layout: u64 LE header length, JSON header, then all tensors one after the other.

The header is padded with spaces so that the data starts at a multiple of 8. Only F32 and I64, only what we export; it
never reads tensors back (`read_header` is for looking and for tests). It assumes a little-endian machine.
"""

import json
import struct

import torch

DTYPES = {torch.float32: "F32", torch.int64: "I64"}


def header_of(tensors):
    """Maps each name to dtype, shape and byte range, in the order of the data."""
    header, at = {}, 0
    for name, tensor in tensors:
        end = at + tensor.numel() * tensor.element_size()
        header[name] = {"dtype": DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [at, end]}
        at = end
    return header


def write(path, tensors):
    """Writes a dict of tensors. The 8-byte ones come first, so that every tensor is aligned to its element size."""
    ordered = sorted(tensors.items(), key=lambda item: (-item[1].element_size(), item[0]))
    text = json.dumps(header_of(ordered), separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for _, tensor in ordered:
            file.write(tensor.detach().contiguous().numpy().tobytes())


def read_header(path):
    """Returns the header as a dict, and the number of bytes after it."""
    with open(path, "rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(length))
        return header, len(file.read())
