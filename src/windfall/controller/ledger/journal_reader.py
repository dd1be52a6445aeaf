"""Reads a journal back, in one pass over its files:

    list the files since a checkpoint ──▶ read the records of each, in order ──▶ collect them by response (History)
                                              │
                                              └─ first damage: use nothing after it, count what is lost (Damage)

A journal has one row per response and engine step: millions of rows, which become a few token runs per response.
Therefore rows are collected in columns and merged by response, many at a time. Nothing here writes or keeps a file
open, so a thread may read while the event loop continues.

Rule: the history of every response is exactly what was accepted and graded, in order.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from windfall.controller.ledger.journal_damage import Damage, find_damage
from windfall.controller.ledger.journal_format import (
    Accepted,
    Assigned,
    Prompted,
    Started,
    Trained,
    TurnCut,
    TurnGraded,
    file_path,
    list_files,
    oldest_file,
    read_records,
)
from windfall.errors import WindfallError
from windfall.link.messages import Tokens
from windfall.types import Finish

_MIN_ROWS, _MAX_ROWS = 1 << 12, 1 << 18
"""Rows that are merged at once: enough that most responses have several, few enough to need little memory."""


@dataclass(kw_only=True, slots=True)
class TokenRun:
    """Consecutive accepted tokens of one response, all of one version."""

    position: int
    tokens: array[int]
    logprobs: array[float]
    version: int
    finish: Finish | None = None

    def extend(self, other: TokenRun) -> bool:
        """Append `other` if it follows this run; otherwise return False. This keeps a long journal small in memory."""
        new = self.position + len(self.tokens) - other.position
        if self.finish is not None or self.version != other.version or not 0 <= new <= len(other.tokens):
            return False
        self.tokens.extend(other.tokens[new:])  # if the runs overlap, only the tail is new
        self.logprobs.extend(other.logprobs[new:])
        self.finish = other.finish
        return True


History = dict[str, list[TokenRun | TurnGraded | Prompted | TurnCut]]
"""By response id, or by segment of an agent's response: what was accepted, graded, prompted and cut, in order."""


@dataclass(frozen=True, kw_only=True, slots=True)
class JournalContents:
    history: History
    files: list[tuple[int, int]]
    """The files that hold it, oldest first: step, and number of bytes used. New records are appended to the last."""
    trained: dict[int, tuple[int, ...]] = field(default_factory=dict)
    """By step: the tasks that it was trained on, in order."""
    damage: Damage | None = None
    """The part that cannot be used."""
    strays: tuple[str, ...] = ()
    """Names in the folder that are not journal files."""


def read_journal(folder: Path, settings: str, step: int, *, staleness: int = 0) -> JournalContents:
    """Read everything after the checkpoint of `step` that can be used. No later step trains on tokens from versions
    before `step - staleness`. A long journal takes seconds."""
    steps, strays = list_files(folder)
    # The last checkpoint covers older files. It may be older than `step`: a trainer can be ahead of it.
    saved = min(step, steps[-1]) if steps else step
    first = max((s for s in steps if s <= oldest_file(saved, staleness)), default=0)
    steps = [s for s in steps if s >= first]
    history: History = {}
    trained: dict[int, tuple[int, ...]] = {}
    files: list[tuple[int, int]] = []
    damage: Damage | None = None
    if steps and steps[0] > step:
        why = f"it is gone; the journal begins after step {steps[0]}"
        damage = Damage(file=file_path(folder, step).name, why=why)
    for file_step in steps:
        path = file_path(folder, file_step)
        try:
            if damage is not None:
                damage = _add_unused_file(damage, path, settings)
                continue
            file = _read_file(path, settings, history, trained)
            damage = find_damage(path, file.valid_bytes, file.handles, settings)
        except OSError as e:
            raise WindfallError(f"cannot read the journal: {e.strerror or e}", where=str(path)) from e
        if file.foreign_bytes and damage is None and file_step == steps[-1]:
            damage = Damage(file=path.name, why="it was written with another recipe", bytes=file.foreign_bytes)
        if file.valid_bytes:
            files.append((file_step, file.valid_bytes))
    return JournalContents(history=history, files=files, trained=trained, damage=damage, strays=strays)


def oldest_versions(history: History) -> dict[int, int]:
    """By training task: the oldest version among the tokens of its responses in the journal."""
    out: dict[int, int] = {}
    for id, past in history.items():
        versions = [e.version for e in past if isinstance(e, TokenRun)]
        if versions and ":" not in id:
            task = int(id.partition("/")[0])
            out[task] = min([*versions, out.get(task, versions[0])])
    return out


def count_tokens(history: History) -> dict[str, int]:
    """Number of tokens of each response in the journal."""
    return {id: sum(len(e.tokens) for e in past if isinstance(e, TokenRun)) for id, past in history.items()}


def _add_unused_file(damage: Damage, path: Path, settings: str) -> Damage:
    """Add a whole file that comes after the damage to the unused part."""
    history: History = {}
    file = _read_file(path, settings, history, {})
    rest = find_damage(path, file.valid_bytes, file.handles, settings)
    tokens = damage.merged_tokens(count_tokens(history))
    tokens = rest.merged_tokens(tokens) if rest else tokens
    return replace(damage, bytes=damage.bytes + path.stat().st_size, tokens=tokens)


@dataclass(frozen=True, kw_only=True, slots=True)
class _File:
    """What one file holds, apart from the history of responses."""

    valid_bytes: int
    """Number of bytes, from the beginning, that are valid records."""
    handles: dict[int, str]
    """Response ids by handle, of the last controller process in the file."""
    foreign_bytes: int
    """Bytes written by controller processes with other settings, if the last process is one of them; else 0."""


def _read_file(path: Path, settings: str, history: History, trained: dict[int, tuple[int, ...]]) -> _File:
    """Add the records of a file to `history` and `trained`."""
    rows, valid_bytes, ours, foreign_bytes = _Rows(history), 0, False, 0
    for end, record in read_records(path):
        match record:
            case Accepted() if ours:
                rows.add_tokens(record.frame)
                if rows.enough:
                    rows.merge()
            case TurnGraded() | Prompted() | TurnCut() if ours:
                rows.add_mark(record)
            case Assigned() if ours:
                rows.assign(record.handles)
            case Trained() if ours:
                trained[record.step] = record.tasks
            case Started():
                rows.forget_handles()
                ours = record.settings == settings
        foreign_bytes += 0 if ours else end - valid_bytes
        valid_bytes = end
    rows.merge()
    return _File(valid_bytes=valid_bytes, handles=rows.handles(), foreign_bytes=0 if ours else foreign_bytes)


class _Rows:
    """Rows in the order they were written. A mark (a grade, a prompt, a cut) is a row without tokens at position -1."""

    def __init__(self, history: History) -> None:
        self._history = history
        self._numbers: dict[str, int] = {}
        """From response id to a number, by which rows are sorted."""
        self._owner: dict[int, int] = {}
        """From handle to the number of its response."""
        self._clear()

    def _clear(self) -> None:
        self._owners: list[int] = []
        self._positions: list[int] = []
        self._counts: list[int] = []
        self._versions: list[int] = []
        self._version_rows: list[int] = []
        """For each item of `_versions`: the number of rows with that version."""
        self._tokens, self._logprobs = bytearray(), bytearray()
        self._finished: dict[int, Finish] = {}
        self._marks: dict[int, TurnGraded | Prompted | TurnCut] = {}

    @property
    def enough(self) -> bool:
        return len(self._owners) >= min(_MAX_ROWS, max(_MIN_ROWS, 16 * len(self._numbers)))

    def forget_handles(self) -> None:
        """Another controller process begins, and its handles start from 1."""
        self._owner.clear()

    def handles(self) -> dict[int, str]:
        names = list(self._numbers)
        return {handle: names[number] for handle, number in self._owner.items()}

    def assign(self, handles: dict[int, str]) -> None:
        numbers = self._numbers
        for handle, id in handles.items():
            self._owner[handle] = numbers.setdefault(id, len(numbers))

    def add_tokens(self, frame: Tokens) -> None:
        owner = self._owner
        for row, finish in frame.finished.items():
            self._finished[len(self._owners) + row] = finish
        self._owners += [owner.get(h, -1) for h in frame.handles]
        self._add(frame.positions, frame.counts or (1,) * len(frame.handles), frame.version)
        self._tokens += frame.tokens
        self._logprobs += frame.logprobs

    def add_mark(self, record: TurnGraded | Prompted | TurnCut) -> None:
        self._marks[len(self._owners)] = record
        self._owners.append(self._numbers.setdefault(record.id, len(self._numbers)))
        self._add((-1,), (0,), 0)

    def _add(self, positions: tuple[int, ...], counts: tuple[int, ...], version: int) -> None:
        self._positions += positions
        self._counts += counts
        self._versions.append(version)
        self._version_rows.append(len(positions))

    def merge(self) -> None:
        """Merge the rows into runs, response by response, and append them to the history."""
        if not self._owners:
            return
        owner, position, count = (np.array(c, np.int64) for c in (self._owners, self._positions, self._counts))
        version = np.repeat(np.array(self._versions, np.int64), self._version_rows)
        ends_turn = np.zeros(len(owner), bool)
        ends_turn[list(self._finished)] = True
        offset = np.cumsum(count) - count
        # Sort by response. The sort is stable: the rows of one response stay in the order they were written.
        order = np.argsort(owner, kind="stable")
        owner, position, count, version, offset = (c[order] for c in (owner, position, count, version, offset))
        begins = np.ones(len(owner), bool)
        begins[1:] = (
            (owner[1:] != owner[:-1])
            | (version[1:] != version[:-1])
            | (position[1:] != position[:-1] + count[:-1])
            | ends_turn[order[:-1]]
            | (position[1:] < 0)
        )
        end = np.cumsum(count)
        pick = np.repeat(offset - (end - count), count) + np.arange(end[-1])
        tokens = np.frombuffer(self._tokens, "<u4")[pick].astype(np.uint32, copy=False)
        logprobs = np.frombuffer(self._logprobs, "<f4")[pick].astype(np.float32, copy=False)
        first = np.flatnonzero(begins)
        last = np.append(first[1:], len(owner)) - 1
        names = list(self._numbers)
        columns = (order[first], order[last], owner[first], position[first], version[first], (end - count)[first])
        for row, last_row, number, run_position, run_version, a, b in zip(
            *(c.tolist() for c in columns), end[last].tolist(), strict=True
        ):
            if number < 0:  # a handle that this controller process never assigned: its response is unknown
                continue
            past = self._history.setdefault(names[number], [])
            if run_position < 0:
                past.append(self._marks[row])
                continue
            run = TokenRun(
                position=run_position,
                tokens=array("I", tokens[a:b].tobytes()),
                logprobs=array("f", logprobs[a:b].tobytes()),
                version=run_version,
                finish=self._finished.get(last_row),
            )
            before = past[-1] if past else None
            if not (isinstance(before, TokenRun) and before.extend(run)):
                past.append(run)
        self._clear()
