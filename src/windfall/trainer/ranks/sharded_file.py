"""A safetensors file that several ranks write and read together, each its own rows: no rank holds a whole tensor.

The file does not depend on the number of ranks: its header names whole tensors, and the rows of a tensor follow each
other. On one machine all ranks write into the file at once. A rank on another machine cannot open it and sends its rows
to rank 0, which writes them; it gets rows to read in the same way.

All ranks call these functions together. Bytes travel in pieces of at most PIECE_BYTES, rank after rank, so that rank 0
needs memory for one piece only. If rank 0 cannot write or read a piece, the others still send and receive to the end,
and then all of them raise the error.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from windfall.trainer.ranks.ranks import TrainerRanks
from windfall.weights.buffers import write_at
from windfall.weights.publishing.publish import RankRows

PIECE_BYTES = 64 << 20
"""Bytes that are copied from a device, sent or written at a time."""
DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip
"""Names of dtypes in safetensors files."""


class WantedRows(NamedTuple):
    """Rows of a tensor in a file that a rank needs. A tensor without dimensions has a count of -1."""

    name: str
    first: int
    count: int
    dtype: torch.dtype
    nbytes: int


def write(path: Path, tensors: Mapping[str, RankRows], ranks: TrainerRanks) -> None:
    """Write the file. Every rank calls this with its shards of the same tensors. OSError on every rank if one of them
    cannot write."""
    # The format allows no gaps. By falling width of their dtypes, each tensor starts at a multiple of its own width.
    tensors = dict(sorted(tensors.items(), key=lambda item: (-item[1].local.element_size(), item[0])))
    header, starts, end = _layout(tensors)
    error: OSError | None = None
    try:
        if ranks.first:
            with path.open("xb") as file:
                file.write(header)
                file.truncate(end)
                os.posix_fallocate(file.fileno(), 0, end)  # a full disk fails here, at once
    except OSError as e:
        error = e
    _agree(ranks, error)
    mine = [
        piece
        for shard, start in zip(tensors.values(), starts, strict=True)
        if ranks.first or tuple(shard.local.shape) != shard.shape  # what every rank holds is written by rank 0
        for piece in pieces(start + shard.first_row * _row_bytes(shard), shard.local.detach().reshape(-1))
    ]
    if ranks.remote:
        send_to_first(ranks, mine, lambda at, data: None)
    else:
        error = _write_local(path, mine, ranks)
    _agree(ranks, error)


def _write_local(path: Path, mine: Sequence[tuple[int, Tensor]], ranks: TrainerRanks) -> OSError | None:
    """Write the rows of this rank and, on rank 0, those of the remote ranks. Never ends before they have sent them."""
    fd, error = -1, None
    try:
        fd = os.open(path, os.O_WRONLY)
        for at, values in mine:
            write_at(fd, at, memoryview(_bytes(values).numpy().data))
    except OSError as e:
        error = e
    try:
        return send_to_first(ranks, (), lambda at, data: write_at(fd, at, data)) or error
    finally:
        if fd >= 0:
            os.close(fd)


def send_to_first(
    ranks: TrainerRanks, parts: Sequence[tuple[int, Tensor]], write: Callable[[int, memoryview], None]
) -> OSError | None:
    """Write the `parts` of all remote ranks on rank 0. A part is the position of its first byte and a flat tensor.
    Ranks on the machine of rank 0 pass none. Returns the first error of `write`."""
    told = ranks.gather([(at, values.numel() * values.element_size()) for at, values in parts])
    if told is None:
        for _, values in parts:
            ranks.send(_bytes(values), 0)
        return None
    error: OSError | None = None
    for sender, (at, nbytes) in [(rank, part) for rank, parts in enumerate(told) for part in parts]:
        box = torch.empty(nbytes, dtype=torch.uint8)
        ranks.receive(box, sender)
        try:
            if error is None:
                write(at, memoryview(box.numpy().data))
        except OSError as e:
            error = e
    return error


def names(path: Path, ranks: TrainerRanks | None = None) -> set[str]:
    """The tensors in the file. Every rank calls this."""
    return set(_shapes(path, ranks or TrainerRanks.alone()))


def read(path: Path, shards: Mapping[str, RankRows], ranks: TrainerRanks | None = None) -> None:
    """Fill the shards whose tensors are in the file. Every rank calls this. ValueError if a tensor has another shape
    there."""
    ranks = ranks or TrainerRanks.alone()
    shapes = _shapes(path, ranks)
    error: Exception | None = None
    for name, shard in shards.items():
        if shapes.get(name, shard.shape) != shard.shape:
            error = ValueError(f"{name} has shape {list(shapes[name])} in the file, expected {list(shard.shape)}")
    _agree(ranks, error)
    wanted = [rows for name, shard in shards.items() if name in shapes for rows in _rows(name, shard)]

    def store(rows: WantedRows, values: Tensor) -> None:
        local = shards[rows.name].local
        first = rows.first - shards[rows.name].first_row
        target = local if rows.count < 0 else local[first : first + rows.count]
        target.copy_(values.view(target.shape))

    if ranks.remote:
        ranks.gather(wanted)
        for rows in wanted:
            box = torch.empty(rows.nbytes, dtype=torch.uint8)
            ranks.receive(box, 0)
            store(rows, box.view(rows.dtype))
    else:
        with safe_open(str(path), framework="pt") as file:
            try:
                for rows in wanted:
                    store(rows, _load(file, rows))
            except OSError as e:
                error = e
            error = _send_from_first(ranks, file) or error
    _agree(ranks, error)


def _send_from_first(ranks: TrainerRanks, file: Any) -> OSError | None:
    """Send the remote ranks the rows that they want. Returns the first error; the bytes after it are not valid."""
    error: OSError | None = None
    for receiver, rows in [(rank, rows) for rank, wanted in enumerate(ranks.gather([]) or []) for rows in wanted]:
        piece = torch.zeros(rows.nbytes, dtype=torch.uint8)
        try:
            if error is None:
                piece = _bytes(_load(file, rows).to(rows.dtype).reshape(-1))
        except OSError as e:  # the receivers still wait for their bytes
            error = e
        ranks.send(piece, receiver)
    return error


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


def _rows(name: str, shard: RankRows) -> list[WantedRows]:
    """What a rank reads to fill its shard, in pieces."""
    local = shard.local
    if not shard.shape:
        return [WantedRows(name, 0, -1, local.dtype, local.element_size())]
    each = _row_bytes(shard)
    step = max(1, PIECE_BYTES // max(each, 1))
    return [
        WantedRows(name, shard.first_row + first, n, local.dtype, n * each)
        for first in range(0, len(local), step)
        if (n := min(step, len(local) - first)) * each
    ]


def _load(file: Any, rows: WantedRows) -> Tensor:
    try:
        if rows.count < 0:
            return file.get_tensor(rows.name)
        return file.get_slice(rows.name)[rows.first : rows.first + rows.count]
    except SafetensorError as e:
        raise OSError(f"{rows.name} cannot be read: {e}") from e


def _layout(tensors: Mapping[str, RankRows]) -> tuple[bytes, list[int], int]:
    """The head of the file, where each tensor starts, and where the file ends."""
    table: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    starts, at = [], 0
    for name, shard in tensors.items():
        starts.append(at)
        at += prod(shard.shape) * shard.local.element_size()
        dtype = DTYPES[shard.local.dtype]
        table[name] = {"dtype": dtype, "shape": list(shard.shape), "data_offsets": [starts[-1], at]}
    text = json.dumps(table).encode()
    text += b" " * (-len(text) % 8)  # tensors start at a multiple of 8 bytes
    head = len(text).to_bytes(8, "little") + text
    return head, [len(head) + start for start in starts], len(head) + at


def pieces(at: int, flat: Tensor) -> list[tuple[int, Tensor]]:
    """Parts of a flat tensor, each with its position if the first byte is at `at`. They are not copied."""
    width, step = flat.element_size(), PIECE_BYTES // flat.element_size()
    return [(at + first * width, flat[first : first + step]) for first in range(0, len(flat), step)]


def _row_bytes(shard: RankRows) -> int:
    return prod(shard.shape[1:]) * shard.local.element_size()


def _bytes(values: Tensor) -> Tensor:
    return values.cpu().contiguous().view(torch.uint8)


def _agree(ranks: TrainerRanks, error: Exception | None) -> None:
    """Raise the first error of any rank on all of them."""
    for found in ranks.all_gather(error):
        if found is not None:
            raise found
