"""Moves bytes between rank 0, which has the run's folder, and the ranks on other machines, which do not.

All ranks call these functions together. Bytes travel in pieces of at most PIECE_BYTES, one per rank in turn, so that
rank 0 needs memory for one piece only, and no rank waits for the whole transfer of another one. If rank 0 cannot write
or read a piece, the others still send and receive to the end: the caller tells them about the error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import zip_longest
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from windfall.trainer.ranks.ranks import TrainerRanks

T = TypeVar("T")
PIECE_BYTES = 64 << 20
"""Bytes that are copied from a device, sent or written at a time."""


class WantedRows(NamedTuple):
    """Rows of a tensor in a file that a rank needs."""

    name: str
    first: int
    count: int
    dtype: torch.dtype
    nbytes: int


def pieces(at: int, flat: Tensor) -> Iterator[tuple[int, Tensor]]:
    """The bytes of a flat tensor in pieces in host memory, each with its position if the first one is at `at`."""
    width = flat.element_size()
    for first in range(0, len(flat), PIECE_BYTES // width):
        piece = flat[first : first + PIECE_BYTES // width].cpu().contiguous()
        yield at + first * width, piece.view(torch.uint8)


def send_to_first(
    ranks: TrainerRanks, parts: Sequence[tuple[int, Tensor]], write: Callable[[int, memoryview], None]
) -> OSError | None:
    """Write the `parts` of all remote ranks on rank 0. A part is the position of its first byte and a flat tensor.
    Ranks on the machine of rank 0 pass none. Returns the first error of `write`."""
    mine = [(at, flat) for at, flat in parts if len(flat)]
    told = ranks.gather([(at, flat.numel() * flat.element_size(), flat.element_size()) for at, flat in mine])
    if told is None:
        for at, flat in mine:
            for _, piece in pieces(at, flat):
                ranks.send(piece, 0)
        return None
    error: OSError | None = None
    box = torch.empty(0, dtype=torch.uint8)
    for sender, (at, nbytes) in _in_turn([_bounds(of) for of in told]):
        if len(box) < nbytes:
            box = torch.empty(nbytes, dtype=torch.uint8)
        ranks.receive(box[:nbytes], sender)
        try:
            if error is None:
                write(at, memoryview(box[:nbytes].numpy().data))
        except OSError as e:
            error = e
    return error


def fetch_from_first(
    ranks: TrainerRanks,
    wanted: Sequence[WantedRows],
    load: Callable[[WantedRows], Tensor],
    store: Callable[[WantedRows, Tensor], None],
) -> Exception | None:
    """Give the remote ranks the rows that they want: rank 0 calls `load`, and the remote rank `store`. Ranks on the
    machine of rank 0 want none. Returns the first error of `load`; what was stored after it is not valid."""
    told = ranks.gather(list(wanted))
    if told is None:
        for rows in wanted:
            box = torch.empty(rows.nbytes, dtype=torch.uint8)
            ranks.receive(box, 0)
            store(rows, box.view(rows.dtype))
        return None
    error: Exception | None = None
    for receiver, rows in _in_turn(told):
        piece = torch.zeros(rows.nbytes, dtype=torch.uint8)
        try:
            if error is None:
                piece = load(rows).to(rows.dtype).reshape(-1).contiguous().view(torch.uint8)
        except Exception as e:  # of the file or its format; the receivers still wait for their bytes
            error = e
        ranks.send(piece, receiver)
    return error


def _bounds(parts: Sequence[tuple[int, int, int]]) -> list[tuple[int, int]]:
    """Position and length of the pieces that `pieces` makes of these parts (position, bytes, width)."""
    out: list[tuple[int, int]] = []
    for at, nbytes, width in parts:
        step = PIECE_BYTES // width * width
        out += [(at + first, min(step, nbytes - first)) for first in range(0, nbytes, step)]
    return out


def _in_turn(of_ranks: Sequence[Sequence[T]]) -> Iterator[tuple[int, T]]:
    """The items of all ranks with the ranks' numbers: the first of every rank, then the second, and so on.

    >>> list(_in_turn([[], ["a", "b"], ["c"]]))
    [(1, 'a'), (2, 'c'), (1, 'b')]
    """
    for row in zip_longest(*([(rank, item) for item in items] for rank, items in enumerate(of_ranks))):
        yield from (found for found in row if found is not None)
