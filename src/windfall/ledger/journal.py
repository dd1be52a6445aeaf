"""What the ledger was told, on disk: the controller can be killed at any moment and goes on from here.

    journal/000010.wal     everything since the checkpoint of step 10

It is begun when that checkpoint is on disk, and then replaces the file before it. A record is its length, a checksum,
and a msgpack array. What a killed process left half-written at the end is cut off when the file is opened again.
`flush` hands what was written to the operating system, where it outlives the process, and is called before anything
that depends on it: work given out, a turn judged, a group handed on. (It does not outlive the machine: a power cut
leaves the last checkpoint, which is synced.) What cannot be read any more is in `Found.lost`.

Rules: reading gives back, for every response since the last checkpoint, exactly what was accepted, in order. After a
write that failed there is no other: every later one fails as well, and `failed` has been told.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import BinaryIO

import msgspec
import xxhash

from windfall.errors import WindfallError
from windfall.ledger.journal_damage import Lost, known, look
from windfall.ledger.journal_reader import HEAD, Assigned, Began, Judged, Made, Past, Record, Stretch, read, records
from windfall.link.messages import Tokens

_NAME = re.compile(r"\d{6,}\.wal")

__all__ = ["Found", "Journal", "Judged", "Past", "Stretch", "records"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Found:
    past: Past
    files: list[tuple[int, int]]
    """The files that hold it: number, and how many bytes of it are used. Oldest first; the last is added to."""
    lost: Lost | None = None
    """What else was there and cannot be used."""
    strays: tuple[str, ...] = ()
    """What lies in the folder and is no journal file."""


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

    def find(self, step: int | None = None) -> Found:
        """What can be used after the checkpoint of `step`. Takes a while for a long journal; a thread may do it while
        the journal is closed."""
        numbers, strays = self._files()
        if step is not None:  # what is older than the file of this checkpoint is over
            begun = max((n for n in numbers if n <= step), default=0)
            numbers = [n for n in numbers if n >= begun]
        past: Past = {}
        files: list[tuple[int, int]] = []
        lost: Lost | None = None
        if step is not None and numbers and numbers[0] > step:
            lost = Lost(file=f"{step:06d}.wal", why=f"it is gone; the journal begins after step {numbers[0]}")
        for number in numbers:
            path = self._path(number)
            try:
                if lost is not None:
                    lost = self._without(lost, path)
                    continue
                file = read(path, self._settings, past)
                lost = look(path, file.good, file.handles, self._settings)
            except OSError as e:
                raise WindfallError(f"cannot read the journal: {e.strerror or e}", where=str(path)) from e
            if file.foreign and lost is None and number == numbers[-1]:
                lost = Lost(file=path.name, why="it was written with another recipe", bytes=file.foreign)
            if file.good:
                files.append((number, file.good))
        return Found(past=past, files=files, lost=lost, strays=strays)

    def _without(self, lost: Lost, path: Path) -> Lost:
        """`path` comes after what is lost, so it is lost as well."""
        past: Past = {}
        file = read(path, self._settings, past)
        rest = look(path, file.good, file.handles, self._settings)
        tokens = lost.plus(known(past))
        tokens = rest.plus(tokens) if rest else tokens
        return replace(lost, bytes=lost.bytes + path.stat().st_size, tokens=tokens)

    def _files(self) -> tuple[list[int], tuple[str, ...]]:
        """Numbers of the journal's files, oldest first; and names of what else is in the folder."""
        numbers, strays = list[int](), list[str]()
        for path in self.folder.iterdir():
            if _NAME.fullmatch(path.name) and path.is_file():
                numbers.append(int(path.stem))
            else:
                strays.append(path.name)
        return sorted(numbers), tuple(sorted(strays))

    def begin(self, step: int, found: Found | None = None) -> Past:
        """Go on after the checkpoint of `step`: what is known of later steps. What cannot be used is removed."""
        self.close()
        found = found or self.find(step)
        kept = dict(found.files)
        with self._writing(self.folder):
            for number in self._files()[0]:
                if number not in kept:
                    self._path(number).unlink()
        # Always to the newest file, also where a trainer has come back with an earlier step than it was begun for.
        self._open(*(found.files[-1] if found.files else (step, 0)))
        return found.past

    def rotate(self, step: int) -> None:
        """The checkpoint of `step` is on disk: nothing before it is needed any more."""
        if step > self._step:
            self.close()
            self._open(step, 0)
        with self._writing(self.folder):
            for number, following in pairwise(self._files()[0]):
                if following <= step:
                    self._path(number).unlink()

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

    @property
    def file(self) -> str:
        """The name of the file that is written to."""
        return self._path(self._step).name

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
        self.flush()  # from now on an empty file is one that somebody has emptied

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
