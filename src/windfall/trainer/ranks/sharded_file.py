"""A safetensors file that several ranks write and read together, each its own rows: no rank holds a whole tensor.

The file does not depend on the number of ranks: its header names whole tensors, and the rows of a tensor follow each
other. On one machine all ranks write into the file at once. A rank on another machine cannot open it and sends its rows
to rank 0, which writes them; it gets rows to read in the same way (remote_rows.py).
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from windfall.trainer.ranks import remote_rows
from windfall.trainer.ranks.ranks import TrainerRanks
from windfall.trainer.ranks.remote_rows import PIECE_BYTES, WantedRows
from windfall.trainer.ranks.sharding import RankRows
from windfall.weights.buffers import write_at

DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip
"""Names of dtypes in safetensors files."""


def write(path: Path, tensors: Mapping[str, RankRows], ranks: TrainerRanks) -> None:
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
    places = zip(tensors.values(), _offsets(tensors), strict=True)
    mine = [_flat(shard, start + offset) for shard, offset in places if ranks.first or not _whole(shard)]
    if ranks.remote:
        remote_rows.send_to_first(ranks, mine, lambda at, data: None)
    else:
        error = _write_local(path, mine, ranks)
    _agree(ranks, error)


def _write_local(path: Path, mine: Sequence[tuple[int, torch.Tensor]], ranks: TrainerRanks) -> OSError | None:
    """Write the rows of this rank and, on rank 0, those of the remote ranks. Never ends before they have sent them."""
    fd, error = -1, None
    try:
        fd = os.open(path, os.O_WRONLY)
        for part in mine:
            for at, piece in remote_rows.pieces(*part):
                write_at(fd, at, memoryview(piece.numpy().data))
    except OSError as e:
        error = e
    try:
        failed = remote_rows.send_to_first(ranks, (), lambda at, data: write_at(fd, at, data))
        return error or failed
    finally:
        if fd >= 0:
            os.close(fd)


def names(path: Path, ranks: TrainerRanks | None = None) -> set[str]:
    """The tensors in the file. Every rank calls this."""
    return set(_shapes(path, ranks or TrainerRanks.alone()))


def read(path: Path, shards: Mapping[str, RankRows], ranks: TrainerRanks | None = None) -> None:
    """Fill the shards whose tensors are in the file. Every rank calls this. ValueError if a tensor has another shape
    there."""
    ranks = ranks or TrainerRanks.alone()
    shapes = _shapes(path, ranks)
    _agree(ranks, _other_shape(shapes, shards))
    error: Exception | None = None
    wanted = [rows for name, shard in shards.items() if name in shapes for rows in _rows(name, shard)]

    def store(rows: WantedRows, values: torch.Tensor) -> None:
        local = shards[rows.name].local
        if rows.count < 0:
            local.copy_(values.view(local.shape))
            return
        first = rows.first - shards[rows.name].first_row
        local[first : first + rows.count].copy_(values.view(rows.count, *local.shape[1:]))

    if ranks.remote:
        remote_rows.fetch_from_first(ranks, wanted, lambda rows: torch.empty(0), store)
    else:
        with safe_open(str(path), framework="pt") as file:
            try:
                for rows in wanted:
                    store(rows, _load(file, rows))
            except OSError as e:
                error = e
            error = remote_rows.fetch_from_first(ranks, (), lambda rows: _load(file, rows), store) or error
    _agree(ranks, error)


def _shapes(path: Path, ranks: TrainerRanks) -> dict[str, tuple[int, ...]]:
    """The tensors in the file with their shapes, as rank 0 finds them."""
    found: dict[str, tuple[int, ...]] | Exception = {}
    if ranks.first:
        try:
            with safe_open(str(path), framework="pt") as file:
                found = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
        except OSError as e:
            found = e
        except SafetensorError as e:
            found = ValueError(str(e))
    found = ranks.broadcast(found)
    if isinstance(found, Exception):
        raise found
    return found


def _other_shape(shapes: Mapping[str, tuple[int, ...]], shards: Mapping[str, RankRows]) -> ValueError | None:
    """The error for the first shard whose tensor has another shape in the file."""
    for name, shard in shards.items():
        if name in shapes and shapes[name] != shard.shape:
            return ValueError(f"{name} has shape {list(shapes[name])} in the file, expected {list(shard.shape)}")
    return None


def _rows(name: str, shard: RankRows) -> list[WantedRows]:
    """What a rank reads to fill its shard, in pieces. A tensor without dimensions has a count of -1."""
    local, width = shard.local, shard.local.element_size()
    if not shard.shape:
        return [WantedRows(name, 0, -1, local.dtype, width)]
    each = prod(shard.shape[1:]) * width
    step = max(1, PIECE_BYTES // max(each, 1))
    return [
        WantedRows(name, shard.first_row + first, n, local.dtype, n * each)
        for first in range(0, len(local), step)
        if (n := min(step, len(local) - first)) * each
    ]


def _load(file: Any, rows: WantedRows) -> torch.Tensor:
    try:
        if rows.count < 0:
            return file.get_tensor(rows.name)
        return file.get_slice(rows.name)[rows.first : rows.first + rows.count]
    except SafetensorError as e:
        raise OSError(f"{rows.name} cannot be read: {e}") from e


def _header(tensors: Mapping[str, RankRows]) -> tuple[bytes, int]:
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


def _offsets(tensors: Mapping[str, RankRows]) -> list[int]:
    """Where each tensor starts. The format allows no gaps, so the widest dtypes come first (see `_ordered`)."""
    out, at = [], 0
    for shard in tensors.values():
        out.append(at)
        at += _nbytes(shard)
    return out


def _ordered(tensors: Mapping[str, RankRows]) -> dict[str, RankRows]:
    """The tensors by falling width of their dtypes, so that each starts at a multiple of its own width."""
    return dict(sorted(tensors.items(), key=lambda item: (-item[1].local.element_size(), item[0])))


def _whole(shard: RankRows) -> bool:
    """Whether this rank holds all rows. Such a tensor is on every rank, and rank 0 writes it."""
    return tuple(shard.local.shape) == shard.shape


def _size(tensors: Mapping[str, RankRows]) -> int:
    return sum(map(_nbytes, tensors.values()))


def _nbytes(shard: RankRows) -> int:
    return prod(shard.shape) * shard.local.element_size()


def _flat(shard: RankRows, at: int) -> tuple[int, torch.Tensor]:
    """Where the first row of a shard goes if its tensor starts at `at`, and all its values."""
    flat = shard.local.detach().reshape(-1)
    return at + shard.first_row * prod(shard.shape[1:]) * flat.element_size(), flat


def _agree(ranks: TrainerRanks, error: Exception | None) -> None:
    """Raise the first error of any rank on all of them."""
    for found in ranks.all_gather(error):
        if found is not None:
            raise found
