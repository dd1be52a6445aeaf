"""What of a journal cannot be used any more: where it is damaged, and what was in it as far as can be told.

A journal is believed up to its first damaged record and no further, later files included: what follows was made by
weights that grew out of what is lost. A record that is cut off at the end of a file is no damage: a killed process
leaves one.

Nothing here writes.
"""

from __future__ import annotations

import mmap
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import xxhash

from windfall.ledger.journal_reader import HEAD, MOST, Assigned, Began, Judged, Made, Past, Record, Stretch

UNKNOWN = "?"
"""Stands for the responses whose tokens are there, but not their names."""
_BEGINS = re.compile(rb"\x92[\x01-\x03]|\x95\x04")
"""How the payload of a record begins: an array of two (Began, Assigned, Made) or five (Judged), then the tag."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Lost:
    """A part of the journal that is not used."""

    file: str
    why: str
    bytes: int = 0
    tokens: dict[str, int] = field(default_factory=dict)
    """By response: how many of its tokens are known to have been there."""

    def plus(self, other: dict[str, int]) -> dict[str, int]:
        return {id: max(self.tokens.get(id, 0), other.get(id, 0)) for id in self.tokens | other}


def look(path: Path, at: int, handles: dict[int, str], settings: str) -> Lost | None:
    """What follows the whole records of a file, which end at byte `at`; None if that is nothing or a torn record.

    `handles` and `settings` are those of the life that wrote the last of these records.
    """
    size = path.stat().st_size
    if size == 0:
        return Lost(file=path.name, why="it is empty")
    if size == at:
        return None
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        tokens = count(_salvaged(data, at), handles, settings)
        rest = size - at
        length = HEAD.unpack_from(data, at)[0] if rest >= HEAD.size else 0
        torn = rest < HEAD.size or (rest < HEAD.size + length and length <= MOST)
        if torn and tokens is None:
            return None
    return Lost(file=path.name, why=f"it is damaged at byte {at:,} of {size:,}", bytes=rest, tokens=tokens or {})


def known(past: Past) -> dict[str, int]:
    """How many tokens of each response a journal has."""
    return {id: sum(len(e.tokens) for e in said if isinstance(e, Stretch)) for id, said in past.items()}


def count(records: Iterator[Record], handles: dict[int, str], settings: str) -> dict[str, int] | None:
    """Tokens by response in these records; None if there is no record at all."""
    out: dict[str, int] | None = None
    handles, ours = dict(handles), True
    for record in records:
        out = {} if out is None else out
        match record:
            case Began():
                handles, ours = {}, record.settings == settings
            case Assigned() if ours:
                handles |= record.handles
            case Judged() if ours:
                out.setdefault(record.id, 0)
            case Made(frame=frame) if ours:
                for handle, made in zip(frame.handles, frame.counts or (1,) * len(frame.handles), strict=False):
                    id = handles.get(handle, UNKNOWN)
                    out[id] = out.get(id, 0) + made
    return out


def _salvaged(data: mmap.mmap, at: int) -> Iterator[Record]:
    """Whole records behind a damaged one, wherever they begin."""
    decode = msgspec.msgpack.Decoder(Record).decode
    while (found := _next(data, at)) is not None:
        start, at = found
        try:
            yield decode(data[start:at])
        except msgspec.DecodeError:
            continue


def _next(data: mmap.mmap, at: int) -> tuple[int, int] | None:
    """Payload of the first whole record whose head is at `at` or later: where it begins and ends."""
    for match in _BEGINS.finditer(data, at + HEAD.size):
        start = match.start()
        length, checksum = HEAD.unpack_from(data, start - HEAD.size)
        if 0 < length <= min(MOST, len(data) - start):
            with memoryview(data) as view, view[start : start + length] as payload:
                if xxhash.xxh32_intdigest(payload) == checksum:
                    return start, start + length
    return None
