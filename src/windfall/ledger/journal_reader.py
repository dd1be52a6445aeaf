"""What a journal holds, and reading it back: every file once, its whole records up to the first that is torn.

A journal has a row per response and engine step, millions of them; what is wanted is a few stretches per response. So
rows are collected in columns and put together by response, many at a time. Nothing here writes, or keeps a file open:
a thread may read while the event loop goes on.

Rule: for every response, exactly what was accepted and judged, in order.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
import xxhash

from windfall.link.messages import Tokens
from windfall.types import Finish

HEAD = struct.Struct("<II")
"""Before every record: its length and its checksum."""
MOST = 64 << 20
"""Bytes of the longest record."""
_FEWEST_ROWS, _MOST_ROWS = 1 << 12, 1 << 18
"""Rows that are put together at once: enough that most responses have several, few enough to be small in memory."""


class Began(msgspec.Struct, frozen=True, kw_only=True, array_like=True, tag=1):
    """A life's first record. Responses of a run with other settings are not this run's."""

    settings: str


class Assigned(msgspec.Struct, frozen=True, kw_only=True, array_like=True, tag=2):
    handles: dict[int, str]


class Made(msgspec.Struct, frozen=True, kw_only=True, array_like=True, tag=3):
    frame: Tokens


class Judged(msgspec.Struct, frozen=True, kw_only=True, array_like=True, tag=4):
    """What the environment said of a turn: a reward, an observation, or nothing (`error`)."""

    id: str
    reward: float | None
    observation: str | None
    error: str


Record = Began | Assigned | Made | Judged


@dataclass(kw_only=True, slots=True)
class Stretch:
    """Accepted tokens of one response, of one version."""

    position: int
    tokens: array[int]
    logprobs: array[float]
    version: int
    finish: Finish | None = None

    def grow(self, other: Stretch) -> bool:
        """Take in what follows; False if it does not. Keeps a long journal small in memory."""
        new = self.position + len(self.tokens) - other.position
        if self.finish is not None or self.version != other.version or not 0 <= new <= len(other.tokens):
            return False
        self.tokens.extend(other.tokens[new:])  # a frame that overlapped gave its tail
        self.logprobs.extend(other.logprobs[new:])
        self.finish = other.finish
        return True


Past = dict[str, list[Stretch | Judged]]


def records(path: Path) -> Iterator[tuple[int, Record]]:
    """Whole records, each with the offset behind it, up to the first that is torn."""
    decode = msgspec.msgpack.Decoder(Record).decode
    with path.open("rb") as file:
        at = 0
        while len(head := file.read(HEAD.size)) == HEAD.size:
            length, checksum = HEAD.unpack(head)
            payload = file.read(length) if length <= MOST else b""
            if len(payload) != length or xxhash.xxh32_intdigest(payload) != checksum:
                return
            at += HEAD.size + length
            yield at, decode(payload)


@dataclass(frozen=True, kw_only=True, slots=True)
class File:
    """What was found in one file, apart from what it says of responses."""

    good: int
    """How many bytes of it are whole records."""
    handles: dict[int, str]
    """Of the last life in it."""
    foreign: int
    """Bytes of lives with other settings, if the last life is one of them; else 0."""


def read(path: Path, settings: str, past: Past) -> File:
    """Add what a file says to `past`."""
    rows, end, ours, foreign = _Rows(past), 0, False, 0
    for at, record in records(path):
        match record:
            case Made() if ours:
                rows.made(record.frame)
                if rows.many:
                    rows.settle()
            case Judged() if ours:
                rows.judged(record)
            case Assigned() if ours:
                rows.assigned(record.handles)
            case Began():
                rows.begin_life()
                ours = record.settings == settings
        foreign += 0 if ours else at - end
        end = at
    rows.settle()
    return File(good=end, handles=rows.handles(), foreign=0 if ours else foreign)


class _Rows:
    """Rows in the order they came. A judgement is a row without tokens, at position -1."""

    def __init__(self, past: Past) -> None:
        self._past = past
        self._numbers: dict[str, int] = {}
        """Of the responses, by id: what is sorted by."""
        self._holds: dict[int, int] = {}
        """Handle to number."""
        self._clear()

    def _clear(self) -> None:
        self._owners: list[int] = []
        self._positions: list[int] = []
        self._counts: list[int] = []
        self._versions: list[int] = []
        self._sizes: list[int] = []
        """How many rows each of the versions is for."""
        self._tokens, self._logprobs = bytearray(), bytearray()
        self._finished: dict[int, Finish] = {}
        self._judged: dict[int, Judged] = {}

    @property
    def many(self) -> bool:
        return len(self._owners) >= min(_MOST_ROWS, max(_FEWEST_ROWS, 16 * len(self._numbers)))

    def begin_life(self) -> None:
        """Handles start from 1 again."""
        self._holds.clear()

    def handles(self) -> dict[int, str]:
        names = list(self._numbers)
        return {handle: names[number] for handle, number in self._holds.items()}

    def assigned(self, handles: dict[int, str]) -> None:
        numbers = self._numbers
        for handle, id in handles.items():
            self._holds[handle] = numbers.setdefault(id, len(numbers))

    def made(self, frame: Tokens) -> None:
        holds, n = self._holds, len(frame.handles)
        for row, finish in frame.finished.items():
            self._finished[len(self._owners) + row] = finish
        self._owners += [holds.get(h, -1) for h in frame.handles]
        self._add(frame.positions, frame.counts or (1,) * n, frame.version)
        self._tokens += frame.tokens
        self._logprobs += frame.logprobs

    def judged(self, record: Judged) -> None:
        self._judged[len(self._owners)] = record
        self._owners.append(self._numbers.setdefault(record.id, len(self._numbers)))
        self._add((-1,), (0,), 0)

    def _add(self, positions: tuple[int, ...], counts: tuple[int, ...], version: int) -> None:
        self._positions += positions
        self._counts += counts
        self._versions.append(version)
        self._sizes.append(len(positions))

    def settle(self) -> None:
        """Put the rows together, response by response."""
        if not self._owners:
            return
        owner, position, count = (np.array(c, np.int64) for c in (self._owners, self._positions, self._counts))
        version = np.repeat(np.array(self._versions, np.int64), self._sizes)
        ends_turn = np.zeros(len(owner), bool)
        ends_turn[list(self._finished)] = True
        at = np.cumsum(count) - count
        order = np.argsort(owner, kind="stable")  # in one response, rows stay in the order they came
        owner, position, count, version, at = (c[order] for c in (owner, position, count, version, at))
        begins = np.ones(len(owner), bool)
        begins[1:] = (
            (owner[1:] != owner[:-1]) | (version[1:] != version[:-1]) | (position[1:] != position[:-1] + count[:-1])
            | ends_turn[order[:-1]] | (position[1:] < 0)
        )  # fmt: skip
        end = np.cumsum(count)
        pick = np.repeat(at - (end - count), count) + np.arange(end[-1])
        tokens = np.frombuffer(self._tokens, "<u4")[pick].astype(np.uint32, copy=False)
        logprobs = np.frombuffer(self._logprobs, "<f4")[pick].astype(np.float32, copy=False)
        first = np.flatnonzero(begins)
        last = np.append(first[1:], len(owner)) - 1
        names = list(self._numbers)
        columns = (order[first], order[last], owner[first], position[first], version[first], (end - count)[first])
        for row, end_row, number, where, made_by, a, b in zip(
            *(c.tolist() for c in columns), end[last].tolist(), strict=True
        ):
            if number < 0:  # no handle of this life: nobody can say whose it is
                continue
            said = self._past.setdefault(names[number], [])
            if where < 0:
                said.append(self._judged[row])
                continue
            stretch = Stretch(
                position=where, tokens=array("I", tokens[a:b].tobytes()), logprobs=array("f", logprobs[a:b].tobytes()),
                version=made_by, finish=self._finished.get(end_row),
            )  # fmt: skip
            before = said[-1] if said else None
            if not (isinstance(before, Stretch) and before.grow(stretch)):
                said.append(stretch)
        self._clear()
