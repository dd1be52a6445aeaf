"""The rows of the timeline: what every worker did and when, in a few bytes per change. Pure.

A row is a sorted list of changes. A change is one unsigned 32-bit number: tenths of a second since the start of the
run, times 16, plus a state. A state lasts until the next change, and the last one until `Timeline.end`.

Rules: a row has at most MAX_CHANGES changes. When it would have more, its resolution is halved: of the states that
begin in a slice of time, only the one that lasted longest remains, or a loss. There are at most MAX_ROWS rows: when a
new worker needs a row, the row whose worker has been gone longest is dropped and counted. So memory and the size of
the page do not depend on the length of the run.
"""

from __future__ import annotations

import re
from array import array
from dataclasses import dataclass, field
from itertools import groupby, pairwise
from typing import Any

STATES = (
    "absent", "booting", "pulling", "generating", "prefill again", "waiting", "paused", "draining", "lost",
    "training", "evaluating", "saving", "silent", "ready",
)  # fmt: skip
"""Names of the states, in the order of their numbers. "ready": it has weights, and the log does not say if it works."""
CODE = {name: n for n, name in enumerate(STATES)} | {"": 0, "prefill_again": 4}
ABSENT, LOST, READY = CODE["absent"], CODE["lost"], CODE["ready"]
MAX_CHANGES = 8192
MAX_ROWS = 1024
MAX_NAME = 80
"""Characters of the name of a row."""
TRAINER = "trainer"
"""Name of the trainer's row. All its ranks share it, because they work in lockstep. With several policies, each has a
row, such as "trainer solver"."""
TENTHS = 10
MAX_TENTHS = (1 << 28) - 1
_RESTARTED = re.compile(r"(?<=.)[.#]\d+$")


def clean(value: Any, limit: int) -> str:
    """The beginning of a text, without the halves of surrogate pairs that a log may contain and UTF-8 cannot."""
    return str(value)[:limit].encode("utf-8", "replace").decode()


def row_name(worker: str) -> str:
    """The row of a worker. A machine of a trace that comes back as "n1.2" continues the row "n1".

    >>> row_name("n1.2"), row_name("gpu-0#3"), row_name("local")
    ('n1', 'gpu-0', 'local')
    """
    return clean(_RESTARTED.sub("", worker.partition("#")[0]), MAX_NAME)


@dataclass(slots=True)
class TimelineRow:
    name: str
    facts: dict[str, Any] = field(default_factory=dict)
    """Lease, device and price of its newest worker."""
    changes: array[int] = field(default_factory=lambda: array("I"))
    slice: int = 1
    """Resolution in tenths of a second."""
    worker: str = ""
    """Id of its newest worker."""
    changed: int = 0
    """First change that a viewer may not have (`RunHistory.changes`); more than there are if nothing is new."""

    @property
    def state(self) -> int:
        return self.changes[-1] & 15 if self.changes else ABSENT

    def put(self, tenths: int, state: int) -> None:
        """The row has this state from this time on. What it had from then on before is replaced."""
        start, changes = min(max(tenths, 0), MAX_TENTHS) << 4, self.changes
        while changes and changes[-1] >= start:
            changes.pop()
        if len(changes) < self.changed:
            self.changed = len(changes)
        if (changes[-1] & 15 if changes else ABSENT) != state:
            changes.append(start | state)
        if len(changes) > MAX_CHANGES:
            self._coarsen()
            self.changed = 0

    def describe(self, facts: dict[str, Any]) -> None:
        """Set its facts."""
        if facts != self.facts:
            self.facts, self.changed = facts, min(self.changed, len(self.changes))

    def paint(self, start: int, end: int, state: int) -> None:
        """The row had this state in this time, which lies in the past, and what it had before continues after it."""
        start = max(start, 0)
        after = self.state
        self.put(start, state)
        if end > start:
            self.put(end, after)

    def _coarsen(self) -> None:
        self.changes = _resampled(self.changes, self.slice)  # what is newer than the last time has full resolution
        while len(self.changes) > MAX_CHANGES // 2:
            self.slice *= 2
            self.changes = _resampled(self.changes, self.slice)


def _resampled(changes: array[int], slice: int) -> array[int]:
    """At most one change per slice of time.

    >>> [(c >> 4, STATES[c & 15]) for c in _resampled(array("I", [0 << 4 | 3, 5 << 4 | 5, 6 << 4 | 3, 17 << 4]), 4)]
    [(0, 'generating'), (16, 'absent')]
    """

    def importance(span: tuple[int, int]) -> tuple[bool, int]:
        change, end = span
        return change & 15 == LOST, (end >> 4) - (change >> 4)

    out: array[int] = array("I")
    spans = pairwise([*changes, changes[-1] + (slice << 4)])
    for cell, group in groupby(spans, key=lambda span: (span[0] >> 4) // slice):
        state = max(group, key=importance)[0] & 15
        if (out[-1] & 15 if out else ABSENT) != state:
            out.append(cell * slice << 4 | state)
    return out


class Timeline:
    def __init__(self) -> None:
        self.rows: dict[str, TimelineRow] = {}
        self.dropped = 0
        """Rows that were dropped because there were too many."""

    def row(self, worker: str, newest: str = "") -> TimelineRow:
        """The row of this worker. `newest`: its id, if it has just joined."""
        name = row_name(worker)
        row = self.rows.get(name)
        if row is None:
            if len(self.rows) >= MAX_ROWS:
                self._drop_one()
            row = self.rows[name] = TimelineRow(name)
        if newest:
            row.worker = newest
        return row

    def _drop_one(self) -> None:
        workers = [r for r in self.rows.values() if not r.name.startswith(TRAINER)]
        gone = [r for r in workers if r.state == ABSENT] or workers
        oldest = min(gone, key=lambda r: r.changes[-1] if r.changes else 0)
        del self.rows[oldest.name]
        self.dropped += 1

    def absent(self, tenths: int) -> None:
        """All workers are gone from this time on: the controller that saw them has ended. What rows have after that
        time, from the next controller, remains."""
        for row in self.rows.values():
            first = len(row.changes)
            while first and row.changes[first - 1] >> 4 > tenths:
                first -= 1
            later = row.changes[first:]
            row.put(tenths, ABSENT)
            for change in later:
                row.put(change >> 4, change & 15)
