"""Reports which parts of its journal a resumed run has lost. What was in them is generated again."""

from __future__ import annotations

from windfall.controller.ledger.journal_format import Damage, JournalContents
from windfall.events.log import Event, EventLog


class JournalDamage:
    def __init__(self, events: EventLog) -> None:
        """Call `observe` with every event of the log."""
        self._events = events
        self._last_step: dict[str, int] = {}
        """By policy: its last step that is in the log. If a person removed a later checkpoint, it is trained again."""
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
                policy = event.get("policy", "")
                self._last_step[policy] = max(self._last_step.get(policy, 0), event["step"])
            case "instant", "journal":
                self._file = event["file"]

    def saved(self, step: int, policy: str = "") -> bool:
        """The checkpoint of `step` is on disk. Returns whether the journal may be rotated: after a fallback, only once
        all its steps have been trained again."""
        return step >= self._last_step.get(policy, 0)


def _step_of(file: str) -> int:
    return int(file.partition(".")[0])
