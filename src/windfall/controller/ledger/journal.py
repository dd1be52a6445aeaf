"""Everything that the ledger accepted, on disk: a controller can be killed at any moment and continues from here.

    journal/000010.wal     everything since the checkpoint of step 10

A new file is begun when a checkpoint is on disk. Its number is the step of the checkpoint; with several policies, the
sum of their last saved steps. It begins with the ids of the running responses, and with the first task that no earlier
file has tokens of. So the files before it are removed once the last checkpoints of all policies need only later tasks.
All policies have one journal, because a response may have tokens of several. If a killed process left a half-written
record at the end, it is cut off when the file is opened again. `flush` hands everything to the operating system, where
it outlives the process. Call it before anything that depends on what was written: assigning work, grading a turn,
handing on a group. (It does not outlive the machine: after a power failure, the run continues from the last checkpoint,
which is synced.) `JournalContents.damage` describes what can no longer be read.

Rules: reading returns, for every response since the last checkpoint, exactly what was accepted, in order. After the
first failed write every later write fails too, and `failed` has been called.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import BinaryIO

import msgspec
import numpy as np

from windfall.controller.ledger import journal_format as records
from windfall.controller.ledger.journal_format import History, JournalContents, file_path, list_files
from windfall.errors import WindfallError, unwritable
from windfall.link.messages import Tokens, expert_columns


class Journal:
    def __init__(self, folder: Path, settings: str) -> None:
        self.folder = folder
        self._settings = settings
        self.failed: Callable[[WindfallError], None] = lambda e: None
        """Called with the first write error, because the code that writes may not be able to end the run."""
        self._error: WindfallError | None = None
        self._file: BinaryIO | None = None
        self._number = 0
        self._encode = msgspec.msgpack.Encoder().encode
        with self._writing(folder):
            folder.mkdir(parents=True, exist_ok=True)

    @property
    def is_open(self) -> bool:
        return self._file is not None

    def read(self, number: int, lowest: int = 0) -> JournalContents:
        """Read what can be used of the task `lowest` and later ones, to continue from the state with this number. A
        long journal takes seconds; a thread may read it, also while records are written."""
        return records.read_journal(self.folder, self._settings, number, lowest)

    def open(self, number: int, contents: JournalContents | None = None) -> History:
        """Continue from the state with this number, and return the history. Unusable parts are removed."""
        self.close()
        contents = contents or self.read(number)
        first, kept = min((n for n, _ in contents.files), default=0), dict(contents.files)
        with self._writing(self.folder):
            for file_number in list_files(self.folder):
                if file_number not in kept and (file_number > first or not kept):
                    file_path(self.folder, file_number).unlink()
        # Always append to the newest file, even if a trainer returned with an earlier step than that of the file.
        self._open_file(*(contents.files[-1] if contents.files else (number, 0)))
        return contents.history

    def rotate(
        self, number: int, running: dict[int, str], policies: dict[int, str], *, next_task: int, lowest: int
    ) -> None:
        """A checkpoint is on disk: begin a new file and remove what is no longer needed. `running`, `policies`: ids of
        the running responses and their policies, by handle. `next_task`: no token of this task or a later one was
        accepted yet. `lowest`: no checkpoint needs an earlier task."""
        if number > self._number:
            self.close()
            self._open_file(number, 0, next_task=next_task)
            if running:
                self.write_assigned(running, policies)
        with self._writing(self.folder):
            needed = records.needed_files(self.folder, lowest)
            for file_number in list_files(self.folder):
                if file_number not in needed:
                    file_path(self.folder, file_number).unlink()

    def write_assigned(self, handles: dict[int, str], policies: dict[int, str] | None = None) -> None:
        """`policies`: by handle, for policies with a name."""
        self._write(records.Assigned(handles=handles, policies=policies or {}))

    def write_tokens(self, frame: Tokens, rows: list[int] | None = None) -> None:
        """Write an accepted frame; `rows`: only these rows of it were accepted."""
        self._write(records.Accepted(frame=frame if rows is None else _select_rows(frame, rows)))

    def write_grade(self, graded: records.TurnGraded) -> None:
        self._write(graded)

    def write_prompt(self, id: str, position: int, tokens: Iterable[int], role: str = "") -> None:
        """Write the ids before a turn of a segment; `position` -1: they are its prompt."""
        data = np.fromiter(tokens, "<u4").tobytes()
        self._write(records.Prompted(id=id, position=position, tokens=data, role=role))

    def write_cut(self, id: str, length: int) -> None:
        self._write(records.TurnCut(id=id, length=length))

    def write_trained(self, step: int, tasks: tuple[int, ...], policy: str = "") -> None:
        self._write(records.Trained(step=step, tasks=tasks, policy=policy))

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
        return file_path(self.folder, self._number)

    def _open_file(self, number: int, valid_bytes: int, *, next_task: int = -1) -> None:
        path = file_path(self.folder, number)
        with self._writing(path):
            self._file, self._number = path.open("ab", buffering=1 << 18), number
            os.truncate(path, valid_bytes)
            self._file.seek(0, os.SEEK_END)
        # Handles start from 1 again in every controller process, so each process begins with a record of its own.
        self._write(records.Started(settings=self._settings, next_task=next_task, format=records.FORMAT))
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
    experts = expert_columns(frame)[1] if frame.experts else []
    return Tokens(
        version=frame.version,
        versions=frame.versions,
        handles=tuple(frame.handles[r] for r in rows),
        counts=tuple(counts[r] for r in rows),
        positions=tuple(frame.positions[r] for r in rows),
        tokens=cut(frame.tokens),
        logprobs=cut(frame.logprobs),
        finished={n: frame.finished[r] for n, r in enumerate(rows) if r in frame.finished},
        experts=b"".join(experts[r][1] for r in rows if experts),
        expert_counts=tuple(frame.expert_counts[r] for r in rows if frame.expert_counts),
    )
