"""Everything that the ledger accepted, on disk: a controller can be killed at any moment and continues from here.

    journal/000010.wal     everything since the checkpoint of step 10

A new file is begun when its checkpoint is on disk; it replaces the files whose tokens no later step can train on. With
staleness 0, these are all older files. With a higher bound eta, generation goes on while a checkpoint is written, so
the first tokens of version v are in a file that begins before step v. Therefore the last file that begins eta + 1 or
more steps earlier is kept, and all files after it. Every file starts with the ids of the running responses. If a killed
process left a half-written record at the end, it is cut off when the file is opened again. `flush` hands everything to
the operating system, where it outlives the process. Call it before anything that depends on what was written: assigning
work, grading a turn, handing on a group. (It does not outlive the machine: after a power failure, the run continues
from the last checkpoint, which is synced.) `JournalContents.damage` describes what can no longer be read.

Rules: reading returns, for every response since the last checkpoint, exactly what was accepted, in order. After the
first failed write every later write fails too, and `failed` has been called.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import BinaryIO

import msgspec
import numpy as np

from windfall.controller.ledger import journal_format as records
from windfall.controller.ledger.journal_format import History, JournalContents, file_path, list_files
from windfall.errors import WindfallError, unwritable
from windfall.link.messages import Tokens


class Journal:
    def __init__(self, folder: Path, settings: str, *, staleness: int = 0) -> None:
        self.folder = folder
        self._settings = settings
        self._staleness = staleness
        self.failed: Callable[[WindfallError], None] = lambda e: None
        """Called with the first write error, because the code that writes may not be able to end the run."""
        self._error: WindfallError | None = None
        self._file: BinaryIO | None = None
        self._step = 0
        self._encode = msgspec.msgpack.Encoder().encode
        with self._writing(folder):
            folder.mkdir(parents=True, exist_ok=True)

    def read(self, step: int) -> JournalContents:
        """Read what can be used after the checkpoint of `step`. A long journal takes seconds; a thread may read it
        while the journal is closed."""
        return records.read_journal(self.folder, self._settings, step, staleness=self._staleness)

    def open(self, step: int, contents: JournalContents | None = None) -> History:
        """Continue after the checkpoint of `step` and return the history of later steps. Unusable parts are removed."""
        self.close()
        contents = contents or self.read(step)
        kept = dict(contents.files)
        with self._writing(self.folder):
            for file_step in list_files(self.folder):
                if file_step not in kept:
                    file_path(self.folder, file_step).unlink()
        # Always append to the newest file, even if a trainer returned with an earlier step than that of the file.
        self._open_file(*(contents.files[-1] if contents.files else (step, 0)))
        return contents.history

    def rotate(self, step: int, running: dict[int, str]) -> None:
        """The checkpoint of `step` is on disk: begin a new file and remove what is no longer needed. `running`: ids of
        the running responses, by handle."""
        if step > self._step:
            self.close()
            self._open_file(step, 0)
            if running:
                self.write_assigned(running)
        with self._writing(self.folder):
            for file_step, next_step in pairwise(list_files(self.folder)):
                if next_step <= records.oldest_file(step, self._staleness):
                    file_path(self.folder, file_step).unlink()

    def write_assigned(self, handles: dict[int, str], policies: dict[int, str] | None = None) -> None:
        """Responses by handle, and their policies as far as these have names."""
        self._write(records.Assigned(handles=handles, policies=policies or {}))

    def write_tokens(self, frame: Tokens, rows: list[int] | None = None) -> None:
        """Write an accepted frame; `rows`: only these rows of it were accepted."""
        self._write(records.Accepted(frame=frame if rows is None else _select_rows(frame, rows)))

    def write_grade(
        self,
        id: str,
        reward: float | None,
        observation: str | None,
        error: str,
        segments: tuple[tuple[int, int], ...] = (),
    ) -> None:
        self._write(records.TurnGraded(id=id, reward=reward, observation=observation, error=error, segments=segments))

    def write_prompt(self, id: str, position: int, tokens: Iterable[int]) -> None:
        """Write the ids before a turn of a segment; `position` -1: they are its prompt."""
        self._write(records.Prompted(id=id, position=position, tokens=np.fromiter(tokens, "<u4").tobytes()))

    def write_cut(self, id: str, length: int) -> None:
        self._write(records.TurnCut(id=id, length=length))

    def write_trained(self, step: int, tasks: tuple[int, ...]) -> None:
        self._write(records.Trained(step=step, tasks=tasks))

    def flush(self) -> None:
        """Hand everything to the operating system. Call this before anything that depends on what was written."""
        if self._file is None:
            return
        if self._error is not None:
            raise self._error
        try:  # not _writing(): this is called as often as _write
            self._file.flush()
        except OSError as e:
            raise self._fail(self._path, e) from e

    def close(self) -> None:
        file, self._file = self._file, None
        if file is None:
            return
        if self._error is not None:  # nothing depends on the records that are still in memory
            with contextlib.suppress(OSError):
                file.close()
            return
        with self._writing(self._path):
            file.close()

    @property
    def file(self) -> str:
        """The name of the file that is written to."""
        return self._path.name

    @property
    def _path(self) -> Path:
        return file_path(self.folder, self._step)

    def _open_file(self, step: int, valid_bytes: int) -> None:
        path = file_path(self.folder, step)
        with self._writing(path):
            self._file, self._step = path.open("ab", buffering=1 << 18), step
            os.truncate(path, valid_bytes)
            self._file.seek(0, os.SEEK_END)
        # Handles start from 1 again in every controller process, so each process begins with a record of its own.
        self._write(records.Started(settings=self._settings))
        self.flush()  # from now on an empty file means that its contents were lost

    def _write(self, record: msgspec.Struct) -> None:
        assert self._file is not None, "the journal is not open"
        payload = self._encode(record)
        if self._error is not None:
            raise self._error
        try:  # not _writing(): this is called for every frame
            self._file.write(records.encode_record(payload))
        except OSError as e:
            raise self._fail(self._path, e) from e

    @contextlib.contextmanager
    def _writing(self, path: Path) -> Iterator[None]:
        if self._error is not None:
            raise self._error
        try:
            yield
        except OSError as e:
            raise self._fail(path, e) from e

    def _fail(self, path: Path, e: OSError) -> WindfallError:
        fix = "Free disk space or make it writable, then run `windfall resume`. Nothing the run depends on is lost."
        self._error = unwritable("the journal", path, e, fix)
        self.failed(self._error)
        return self._error


def _select_rows(frame: Tokens, rows: list[int]) -> Tokens:
    counts = frame.counts or (1,) * len(frame.handles)
    starts = [0]
    for count in counts:
        starts.append(starts[-1] + count)
    cut = lambda data: b"".join(data[4 * starts[r] : 4 * starts[r + 1]] for r in rows)  # noqa: E731
    return Tokens(
        version=frame.version,
        handles=tuple(frame.handles[r] for r in rows),
        counts=tuple(counts[r] for r in rows),
        positions=tuple(frame.positions[r] for r in rows),
        tokens=cut(frame.tokens),
        logprobs=cut(frame.logprobs),
        finished={n: frame.finished[r] for n, r in enumerate(rows) if r in frame.finished},
    )
