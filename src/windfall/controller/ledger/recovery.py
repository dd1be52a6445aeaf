"""Reports which parts of its journal a resumed run has lost.

The journal is compared with the event log, so a lost part of a completed step is always noticed: every response of a
step after the checkpoint must be in the journal with all its tokens, and the step's event has the length of each. For
the current step there is nothing to compare the journal with.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Collection
from itertools import count
from typing import Any

from windfall.controller.ledger.journal_format import Damage, JournalContents, count_tokens
from windfall.events.log import Event, EventLog


class Recovery:
    def __init__(self, events: EventLog, *, checkpoints: int = 1) -> None:
        """`checkpoints`: how many checkpoints a run keeps, which is how far a person may let it fall back. Call
        `observe` with every event of the log."""
        self._events = events
        self._saved: deque[int] = deque(maxlen=checkpoints + 1)
        """Steps of the last checkpoints. Steps before the oldest are forgotten: a long log must not fill memory."""
        self._lengths: dict[int, tuple[list[int] | None, list[list[int]]]] = {}
        """By step since the last checkpoint: the tasks that it used (None: the next ones), and for each task the number
        of tokens of each response."""
        self._file = ""
        """The journal file that the log named last."""

    def report_journal(self, contents: JournalContents, *, step: int, next_task: int) -> None:
        """Log the lost parts of the journal."""
        lost = self.lost(contents, step=step, next_task=next_task)
        if lost is not None:
            self._events.instant("journal_lost", step=step, **lost)

    def observe(self, event: Event) -> None:
        """Learn from an event of the log."""
        match event["kind"], event["name"]:
            case "scalar", "step":
                self._lengths[event["step"]] = (event.get("tasks"), event.get("lengths") or [])
            case "span", "checkpoint":
                self._saved.append(event.get("step", 0))
                if len(self._saved) == self._saved.maxlen:
                    self._forget(min(self._saved))
            case "instant", "journal":
                self._file = event["file"]

    def saved(self, step: int) -> bool:
        """The checkpoint of `step` is on disk. Returns whether the journal may be rotated: after a fallback, only once
        all its steps have been trained again."""
        self._forget(step)
        return not self._lengths

    def _forget(self, step: int) -> None:
        """Forget the steps up to this one."""
        self._lengths = {s: rows for s, rows in self._lengths.items() if s > step}

    def lost(self, contents: JournalContents, *, step: int, next_task: int) -> dict[str, Any] | None:
        """What must be generated again because the journal lost it, as fields of an event; None if nothing. The run
        continues after `step`, and its next task in order is `next_task`."""
        missing, damage = self._missing_tokens(contents, step, next_task), contents.damage
        if damage is None and self._file and (not contents.files or _step_of(self._file) > contents.files[-1][0]):
            damage = Damage(file=self._file, why="it is gone")
        if damage is None and missing:
            damage = Damage(file=self._file, why="it ends too early")
        if damage is None:
            return None
        return {
            "file": damage.file,
            "why": damage.why,
            "bytes": damage.bytes,
            "responses": len(missing),
            "tokens": sum(missing.values()),
        }

    def _missing_tokens(self, contents: JournalContents, step: int, next_task: int) -> dict[str, int]:
        """By response of a completed step: number of its tokens that are not in the journal."""
        have, missing = Counter[str](), dict[str, int]()
        for id, tokens in count_tokens(contents.history).items():
            have[id.partition("+")[0]] += tokens  # an agent's response may have several segments
        for later in count(step + 1):
            if later not in self._lengths:
                return missing
            tasks, rows = self._lengths[later]
            for index, row in zip(count(next_task) if tasks is None else tasks, rows, strict=False):
                for sibling, tokens in enumerate(row):
                    id = f"{index}/{sibling}"
                    if have[id] < tokens:
                        missing[id] = tokens - have[id]
            next_task += len(rows)
        return missing


def needed(id: str, next_task: int, open_tasks: Collection[int] = ()) -> bool:
    """Whether a response may still be needed: not if its step is trained. Ids of evaluation responses have a scope."""
    return ":" in id or (task := int(id.partition("/")[0])) >= next_task or task in open_tasks


def _step_of(file: str) -> int:
    return int(file.partition(".")[0])
