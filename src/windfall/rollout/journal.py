"""What the ledger was told, on disk: the controller can be killed at any moment and goes on from here.

    journal/000010.wal     everything since the checkpoint of step 10

A record is its length, a checksum, and a msgpack array. What a killed process left half-written at the end is cut off
when the file is opened again. A write reaches the operating system before the event loop goes on to anything that
depends on it, so it outlives the process. (Not the machine: a power cut leaves the last checkpoint, which is synced.)

Rule: reading gives back, for every response since the last checkpoint, exactly what was accepted, in order.
"""

from __future__ import annotations

import os
import struct
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import msgspec
import xxhash

from windfall.link.messages import Tokens, columns
from windfall.types import Finish

_HEAD = struct.Struct("<II")
_MOST = 64 << 20


class Began(msgspec.Struct, frozen=True, kw_only=True, array_like=True, tag=1):
    """The file's first record. Responses of a run with other settings are not this run's."""

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


class Journal:
    def __init__(self, folder: Path, settings: str) -> None:
        self.folder, self._settings = folder, settings
        self._file: BinaryIO | None = None
        self._encode = msgspec.msgpack.Encoder().encode
        folder.mkdir(parents=True, exist_ok=True)

    def begin(self, step: int) -> Past:
        """Go on after the checkpoint of `step`: what is known of later steps. Files of earlier checkpoints stay."""
        self.close()
        past: Past = {}
        files = sorted(self.folder.glob("*.wal"))
        for path in files:
            _read(path, self._settings, past)
        # Never before the newest: files are read in this order. A trainer that outlived the controller and then died
        # comes back with an earlier step than the file that was begun for it.
        self._open(max(step, int(files[-1].stem)) if files else step)
        return past

    def rotate(self, step: int) -> None:
        """The checkpoint of `step` is on disk: nothing before it is needed any more."""
        old = [p for p in self.folder.glob("*.wal") if p != self._path(step)]
        self.close()
        self._open(step)
        for path in old:
            path.unlink()

    def assigned(self, handles: dict[int, str]) -> None:
        self._write(Assigned(handles=handles))

    def made(self, frame: Tokens, rows: list[int] | None = None) -> None:
        """A frame that was accepted; `rows`: only these rows of it were."""
        self._write(Made(frame=frame if rows is None else _only(frame, rows)))

    def judged(self, id: str, reward: float | None, observation: str | None, error: str) -> None:
        self._write(Judged(id=id, reward=reward, observation=observation, error=error))

    def flush(self) -> None:
        """To the operating system. Call before anything that depends on what was written."""
        if self._file is not None:
            self._file.flush()

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _path(self, step: int) -> Path:
        return self.folder / f"{step:06d}.wal"

    def _open(self, step: int) -> None:
        path = self._path(step)
        good = _good(path)
        self._file = path.open("ab", buffering=1 << 18)
        os.truncate(path, good)
        self._file.seek(0, os.SEEK_END)
        # Handles start from 1 again in every life of the controller, so every life begins with its own record.
        self._write(Began(settings=self._settings))

    def _write(self, record: Record) -> None:
        assert self._file is not None, "the journal is not open"
        payload = self._encode(record)
        self._file.write(_HEAD.pack(len(payload), xxhash.xxh32_intdigest(payload)) + payload)


def _only(frame: Tokens, rows: list[int]) -> Tokens:
    counts = frame.counts or (1,) * len(frame.handles)
    starts = [0]
    for count in counts:
        starts.append(starts[-1] + count)
    cut = lambda data: b"".join(data[4 * starts[r] : 4 * starts[r + 1]] for r in rows)  # noqa: E731
    return Tokens(
        version=frame.version, handles=tuple(frame.handles[r] for r in rows), counts=tuple(counts[r] for r in rows),
        positions=tuple(frame.positions[r] for r in rows), tokens=cut(frame.tokens), logprobs=cut(frame.logprobs),
        finished={n: frame.finished[r] for n, r in enumerate(rows) if r in frame.finished},
    )  # fmt: skip


def records(path: Path) -> Iterator[tuple[int, Record]]:
    """Whole records, each with the offset behind it, up to the first that is torn."""
    decode = msgspec.msgpack.Decoder(Record).decode
    with path.open("rb") as file:
        at = 0
        while len(head := file.read(_HEAD.size)) == _HEAD.size:
            length, checksum = _HEAD.unpack(head)
            payload = file.read(length) if length <= _MOST else b""
            if len(payload) != length or xxhash.xxh32_intdigest(payload) != checksum:
                return
            at += _HEAD.size + length
            yield at, decode(payload)


def _good(path: Path) -> int:
    """How many bytes of it are whole records."""
    end = 0
    if path.is_file():
        for end, _ in records(path):  # noqa: B007
            pass
    return end


def _read(path: Path, settings: str, past: Past) -> None:
    names: dict[int, str] = {}
    ours = False
    for _, record in records(path):
        match record:
            case Began():
                names, ours = {}, record.settings == settings
            case Assigned() if ours:
                names |= record.handles
            case Made(frame=frame) if ours:
                _unfold(frame, names, past)
            case Judged() if ours:
                past.setdefault(record.id, []).append(record)


def _unfold(frame: Tokens, names: dict[int, str], past: Past) -> None:
    tokens, logprobs = columns(frame)
    at = 0
    for row, handle in enumerate(frame.handles):
        end = at + (frame.counts[row] if frame.counts else 1)
        stretch = Stretch(
            position=frame.positions[row], tokens=tokens[at:end], logprobs=logprobs[at:end], version=frame.version,
            finish=frame.finished.get(row),
        )  # fmt: skip
        said = past.setdefault(names[handle], [])
        last = said[-1] if said else None
        if not (isinstance(last, Stretch) and last.grow(stretch)):
            said.append(stretch)
        at = end
