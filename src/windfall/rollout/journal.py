"""What the ledger was told, on disk: the controller can be killed at any moment and goes on from here.

    journal/000010.wal     everything since the checkpoint of step 10

A record is its length, a checksum, and a msgpack array. What a killed process left half-written at the end is cut off
when the file is opened again. `flush` hands what was written to the operating system, where it outlives the process,
and is called before anything that depends on it: work given out, a turn judged, a group handed on. (It does not outlive
the machine: a power cut leaves the last checkpoint, which is synced.)

Rules: reading gives back, for every response since the last checkpoint, exactly what was accepted, in order. After a
write that failed there is no other: every later one fails as well, and `failed` has been told.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import BinaryIO

import msgspec
import xxhash

from windfall.errors import WindfallError
from windfall.link.messages import Tokens
from windfall.rollout.past import HEAD, Assigned, Began, Judged, Made, Past, Record, Stretch, read, records

__all__ = ["Found", "Journal", "Judged", "Past", "Stretch", "records"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Found:
    past: Past
    newest: int | None
    """The number of the newest file, to which is added."""
    good: int
    """How many bytes of it are whole records."""


class Journal:
    def __init__(self, folder: Path, settings: str) -> None:
        self.folder, self._settings = folder, settings
        self.failed: Callable[[WindfallError], None] = lambda e: None
        """Told of the first write that fails: whoever asked for it may not be the one who can end the run."""
        self._error: WindfallError | None = None
        self._file: BinaryIO | None = None
        self._step = 0
        self._encode = msgspec.msgpack.Encoder().encode
        with self._writing(folder):
            folder.mkdir(parents=True, exist_ok=True)

    def find(self) -> Found:
        """All that is known. Takes a while for a long journal; a thread may do it while the journal is closed."""
        past: Past = {}
        newest, good = None, 0
        for path in sorted(self.folder.glob("*.wal")):
            newest = int(path.stem)
            try:
                good = read(path, self._settings, past)
            except OSError as e:
                raise WindfallError(f"cannot read the journal: {e.strerror or e}", where=str(path)) from e
        return Found(past=past, newest=newest, good=good)

    def begin(self, step: int, found: Found | None = None) -> Past:
        """Go on after the checkpoint of `step`: what is known of later steps. Files of earlier checkpoints stay."""
        self.close()
        found = found or self.find()
        # Never before the newest: files are read in this order. A trainer that outlived the controller and then died
        # comes back with an earlier step than the file that was begun for it.
        if found.newest is not None and found.newest >= step:
            self._open(found.newest, found.good)
        else:
            self._open(step, 0)
        return found.past

    def rotate(self, step: int) -> None:
        """The checkpoint of `step` is on disk: nothing before it is needed any more."""
        if step > self._step:
            self.close()
            self._open(step, 0)
        files = sorted(self.folder.glob("*.wal"))
        with self._writing(self.folder):
            for path, following in pairwise(files):
                if int(following.stem) <= step:  # else it has something of a later step, from before a fall back
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
        if self._file is None:
            return
        if self._error is not None:
            raise self._error
        try:  # as in _write
            self._file.flush()
        except OSError as e:
            raise self._fail(self._path(self._step), e) from e

    def close(self) -> None:
        file, self._file = self._file, None
        if file is None:
            return
        if self._error is not None:  # what is still in memory was never relied on
            with contextlib.suppress(OSError):
                file.close()
            return
        with self._writing(self._path(self._step)):
            file.close()

    def abandon(self) -> None:
        """As if this process had been killed: what was not handed to the operating system yet never is."""
        file = self._file
        if file is not None:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, file.fileno())
            os.close(nowhere)

    def _path(self, step: int) -> Path:
        return self.folder / f"{step:06d}.wal"

    def _open(self, step: int, good: int) -> None:
        path = self._path(step)
        with self._writing(path):
            self._file, self._step = path.open("ab", buffering=1 << 18), step
            os.truncate(path, good)
            self._file.seek(0, os.SEEK_END)
        # Handles start from 1 again in every life of the controller, so every life begins with its own record.
        self._write(Began(settings=self._settings))

    def _write(self, record: Record) -> None:
        assert self._file is not None, "the journal is not open"
        payload = self._encode(record)
        if self._error is not None:
            raise self._error
        try:  # not _writing(): this is called for every frame
            self._file.write(HEAD.pack(len(payload), xxhash.xxh32_intdigest(payload)) + payload)
        except OSError as e:
            raise self._fail(self._path(self._step), e) from e

    @contextlib.contextmanager
    def _writing(self, path: Path) -> Iterator[None]:
        if self._error is not None:
            raise self._error
        try:
            yield
        except OSError as e:
            raise self._fail(path, e) from e

    def _fail(self, path: Path, e: OSError) -> WindfallError:
        fix = "Make room, or make it writable; then go on with `windfall resume`: nothing that counted is lost."
        self._error = WindfallError(f"cannot write the journal: {e.strerror or e}", where=str(path), fix=fix)
        self.failed(self._error)
        return self._error


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
