"""Reports which parts of its journal a resumed run has lost. What was in them is generated again."""

from __future__ import annotations

from collections.abc import Collection

from windfall.controller.ledger.journal_format import Damage, JournalContents
from windfall.events.log import Event, EventLog


class JournalDamage:
    def __init__(self, events: EventLog) -> None:
        """Call `observe` with every event of the log."""
        self._events = events
        self._last_step = 0
        """The last step that is in the log. If a person removed a later checkpoint, it is trained again."""
        self._file = ""
        """The journal file that the log named last."""

    def report_journal(self, contents: JournalContents, *, step: int) -> None:
        """Log the part of the journal that cannot be used. The run continues after `step`."""
        damage = contents.damage
        if damage is None and self._file and (not contents.files or _step_of(self._file) > contents.files[-1][0]):
            damage = Damage(file=self._file, why="it is gone")
        if damage is not None:
            self._events.instant("journal_lost", step=step, file=damage.file, why=damage.why, bytes=damage.bytes)

    def observe(self, event: Event) -> None:
        """Learn from an event of the log."""
        match event["kind"], event["name"]:
            case "scalar", "step":
                self._last_step = max(self._last_step, event["step"])
            case "instant", "journal":
                self._file = event["file"]

    def saved(self, step: int) -> bool:
        """The checkpoint of `step` is on disk. Returns whether the journal may be rotated: after a fallback, only once
        all its steps have been trained again."""
        return step >= self._last_step


def needed(id: str, next_task: int, open_tasks: Collection[int] = ()) -> bool:
    """Whether a response may still be needed: not if its step is trained. Ids of evaluation responses have a scope."""
    return ":" in id or (task := int(id.partition("/")[0])) >= next_task or task in open_tasks


def _step_of(file: str) -> int:
    return int(file.partition(".")[0])
