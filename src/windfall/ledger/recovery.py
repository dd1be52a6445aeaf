"""What a run that goes on has lost, and says so: damaged checkpoints, and parts of its journal.

What the journal must hold by the event log is compared with what it holds, so a lost part is always noticed.

A step that was completed after the checkpoint has every response in the journal, with all its tokens, and its event has
the length of each. What was made of the step under way is known from the journal alone.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Mapping
from itertools import count
from typing import Any

from windfall.events.log import Event, EventLog
from windfall.ledger.journal import Found
from windfall.ledger.journal_damage import UNKNOWN, Lost, known

_FILE = re.compile(r"[0-9]{6,}\.wal")
NOTES = ("checkpoint_damaged", "checkpoint_unchecked")
"""Facts of a trainer, and the events that they become."""


class Recovery:
    def __init__(self, events: EventLog, *, checkpoints: int = 1) -> None:
        """Hears what the log will say; whoever reads what it has said calls `hear` with each event.

        `checkpoints`: how many a run keeps, and so how far it may have to go back.
        """
        self._events = events
        self._saved: deque[int] = deque(maxlen=checkpoints + 1)
        """Steps of the last checkpoints. What lies before the oldest is forgotten: a long log must not fill memory."""
        self._told: set[tuple[str, str]] = set()
        """What trainers found wrong with checkpoints: said once, however many of them find it, and dial."""
        self._lengths: dict[int, list[list[int]]] = {}
        """By step since the last checkpoint: for every task drawn, the tokens of each response."""
        self._file = ""
        """The journal's file as it was last named."""
        events.attach(self.hear)

    def say_checkpoints(self, step: int, facts: Mapping[str, Any]) -> None:
        """What a trainer that has `step` says of the checkpoints it found."""
        for name in NOTES:
            if name in facts and (name, facts[name]) not in self._told:
                self._events.instant(name, step=step, pid=facts["pid"], what=facts[name])

    def say_journal(self, found: Found, *, step: int, next_task: int) -> None:
        lost = self.lost(found, step=step, next_task=next_task)
        if lost is not None:
            self._events.instant("journal_lost", step=step, **lost)
        if found.strays:
            self._events.instant("journal_strays", files=list(found.strays))

    def hear(self, event: Event) -> None:
        """Fields that are not of the shape that windfall writes are somebody else's, and are not believed."""
        match event["kind"], event["name"]:
            case "scalar", "step":
                lengths = event.get("lengths") or []
                if _are_lengths(lengths):
                    self._lengths[event.get("step", 0)] = lengths
            case "span", "checkpoint":
                self._saved.append(event.get("step", 0))
                if len(self._saved) == self._saved.maxlen:
                    self._lengths = {s: rows for s, rows in self._lengths.items() if s > min(self._saved)}
            case "instant", "journal":
                file = event.get("file")
                if isinstance(file, str) and _FILE.fullmatch(file):
                    self._file = file
            case "instant", name if name in NOTES:
                self._told.add((name, str(event.get("what", ""))))

    def saved(self, step: int) -> bool:
        """The checkpoint of `step` is on disk. May the journal begin anew? Not after a fall back, as long as it has
        responses of steps that are still to be done again."""
        self._lengths = {s: rows for s, rows in self._lengths.items() if s > step}
        return not self._lengths

    def lost(self, found: Found, *, step: int, next_task: int) -> dict[str, Any] | None:
        """What is to be generated again though it was in the journal, as fields of an event; None: nothing is.

        The run goes on after `step`; tasks before `next_task` are trained.
        """
        missing, lost = self._missing(found, step, next_task), found.lost
        if lost is None and self._file and (not found.files or _number(self._file) > found.files[-1][0]):
            lost = Lost(file=self._file, why="it is gone")
        if lost is None and missing:
            lost = Lost(file=self._file, why="it ends too early")
        if lost is None:
            return None
        # One of which only the judgement is lost is not generated again.
        tokens = {id: n for id, n in lost.plus(missing).items() if n and (id == UNKNOWN or wanted(id, next_task))}
        return {
            "file": lost.file, "why": lost.why, "bytes": lost.bytes, "responses": len(tokens.keys() - {UNKNOWN}),
            "tokens": sum(tokens.values()),
        }  # fmt: skip

    def _missing(self, found: Found, step: int, next_task: int) -> dict[str, int]:
        """Of completed steps: how many tokens of a response are not there."""
        have, out, task = known(found.past), dict[str, int](), next_task
        for later in count(step + 1):
            rows = self._lengths.get(later)
            if rows is None:
                return out
            for row in rows:
                for sibling, tokens in enumerate(row):
                    id = f"{task}/{sibling}"
                    if have.get(id, 0) < tokens:
                        out[id] = tokens - have.get(id, 0)
                task += 1
        return out


def wanted(id: str, next_task: int) -> bool:
    """Whether somebody may still ask for a response: not if it is of a step that is trained."""
    return ":" in id or int(id.partition("/")[0]) >= next_task


def _are_lengths(value: Any) -> bool:
    """Rows of token counts?"""
    return isinstance(value, list) and all(
        isinstance(row, list) and all(type(tokens) is int for tokens in row) for row in value
    )


def _number(file: str) -> int:
    return int(file.partition(".")[0])
