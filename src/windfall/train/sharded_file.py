"""A safetensors file that several ranks write and read together, each its own rows: nobody holds a whole tensor.

The file does not depend on the number of ranks: its header names whole tensors, and the rows of a tensor follow each
other. On one machine all ranks write into the file at once. A rank on another machine cannot open it and sends its rows
to rank 0, which writes them; it gets rows to read in the same way.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from windfall.train.ranks import Ranks
from windfall.train.sharding import Shard

DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip
"""Names of dtypes in safetensors files."""
WRITE_BYTES = 64 << 20
"""Bytes copied from a device and written at a time."""


def write(path: Path, tensors: Mapping[str, Shard], ranks: Ranks) -> None:
    """Write the file. Every rank calls this with its shards of the same tensors, in the same order. OSError on every
    rank if one of them cannot write."""
    tensors = _ordered(tensors)
    header, start = _header(tensors)
    error: OSError | None = None
    try:
        if ranks.first:
            with path.open("xb") as file:
                file.write(header)
                file.truncate(start + _size(tensors))
                os.posix_fallocate(file.fileno(), 0, max(1, start + _size(tensors)))  # a full disk fails here, at once
    except OSError as e:
        error = e
    _agree(ranks, error)
    try:
        fd = os.open(path, os.O_WRONLY)
        try:
            for shard, offset in zip(tensors.values(), _offsets(tensors), strict=True):
                if ranks.first or not _whole(shard):
                    _write_rows(fd, shard, start + offset)
        finally:
            os.close(fd)
    except OSError as e:
        error = e
    _agree(ranks, error)


def names(path: Path) -> set[str]:
    """The tensors in the file."""
    with safe_open(str(path), framework="pt") as file:
        return set(file.keys())


def read(path: Path, shards: Mapping[str, Shard]) -> None:
    """Fill the shards whose tensors are in the file. ValueError if a tensor has another shape there."""
    with safe_open(str(path), framework="pt") as file:
        present = set(file.keys())
        for name, shard in shards.items():
            if name not in present:
                continue
            found = file.get_slice(name)
            if tuple(found.get_shape()) != shard.shape:
                raise ValueError(
                    f"{name} has shape {list(found.get_shape())} in the file, expected {list(shard.shape)}"
                )
            if not shard.shape:
                shard.local.copy_(file.get_tensor(name))
            elif len(shard.local):
                shard.local.copy_(found[shard.first_row : shard.first_row + len(shard.local)])


def _header(tensors: Mapping[str, Shard]) -> tuple[bytes, int]:
    """The head of the file, and its length: where the first tensor starts."""
    table: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    for (name, shard), offset in zip(tensors.items(), _offsets(tensors), strict=True):
        size = _nbytes(shard)
        table[name] = {
            "dtype": DTYPES[shard.local.dtype], "shape": list(shard.shape), "data_offsets": [offset, offset + size]
        }  # fmt: skip
    text = json.dumps(table).encode()
    text += b" " * (-len(text) % 8)  # tensors start at a multiple of 8 bytes
    return len(text).to_bytes(8, "little") + text, 8 + len(text)


def _offsets(tensors: Mapping[str, Shard]) -> list[int]:
    """Where each tensor starts. The format allows no gaps, so the widest dtypes come first (see `_ordered`)."""
    out, at = [], 0
    for shard in tensors.values():
        out.append(at)
        at += _nbytes(shard)
    return out


def _ordered(tensors: Mapping[str, Shard]) -> dict[str, Shard]:
    """The tensors by falling width of their dtypes, so that each starts at a multiple of its own width."""
    return dict(sorted(tensors.items(), key=lambda item: (-item[1].local.element_size(), item[0])))


def _whole(shard: Shard) -> bool:
    """Whether this rank holds all rows. Such a tensor is on every rank, and rank 0 writes it."""
    return tuple(shard.local.shape) == shard.shape


def _size(tensors: Mapping[str, Shard]) -> int:
    return sum(map(_nbytes, tensors.values()))


def _nbytes(shard: Shard) -> int:
    return prod(shard.shape) * shard.local.element_size()


def _write_rows(fd: int, shard: Shard, at: int) -> None:
    flat = shard.local.detach().reshape(-1)
    width = flat.element_size()
    at += shard.first_row * prod(shard.shape[1:]) * width
    for first in range(0, len(flat), WRITE_BYTES // width):
        piece = flat[first : first + WRITE_BYTES // width].cpu().contiguous()
        data = memoryview(piece.view(torch.uint8).numpy().data)
        while data:
            done = os.pwrite(fd, data, at)
            at, data = at + done, data[done:]


def _agree(ranks: Ranks, error: OSError | None) -> None:
    """Raise the first error of any rank on all of them."""
    for found in ranks.all_gather(error):
        if found is not None:
            raise found
