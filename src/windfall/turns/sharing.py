"""Who gets the next turn of a device: stride scheduling over jobs. Pure; the caller gives the time.

- A job's *pass* is the time (seconds) that it has used the device, divided by its share. The waiting job with the
  lowest pass is next, so over time jobs use the device in the ratio of their shares. A share that its job does not use
  goes to the others at once.
- Only jobs of the highest priority among those that wait are considered. Among them, a job that would miss its deadline
  goes first.
- A job that was idle gets no credit for that time: its pass rises as much as the lowest pass of the active jobs did. If
  it had used less than its share before, it keeps that claim, minus the time that it was idle.
- A rollout turn goes on while no other job should have the device. It lasts at least `slice_s`, unless the other job
  has a higher priority, or the trainer of the same job waits.
- A training turn is one piece of work and is not interrupted.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

Kind = Literal["rollout", "train"]
SLICE_S = 5.0
"""About as long as a short rollout, so that one job generates while another trains. With much shorter turns jobs end
their batches together, and then all wait for their trainers (docs/sim.md has the figures)."""


@dataclass(frozen=True, slots=True)
class Claim:
    """A turn that a process waits for, or has."""

    job: str
    kind: Kind
    since_s: float
    """When the process asked for it, or when it began."""


@dataclass(slots=True)
class _Job:
    share: float = 1.0
    priority: int = 0
    deadline_s: float = math.inf
    left_s: float = 0.0
    """Seconds of this device that the job still needs to end."""
    pass_s: float = 0.0
    idle_since_s: float | None = 0.0
    """None while it waits for the device or has it."""
    idle_from_s: float = 0.0
    """The lowest pass of the other active jobs when it became idle."""


class Sharing:
    """The jobs of one device.

    >>> sharing = Sharing()
    >>> sharing.set_terms("a", share=2.0); sharing.set_terms("b")
    >>> waiting = [Claim("a", "rollout", 0.0), Claim("b", "rollout", 0.0)]
    >>> for turn in waiting: sharing.begin(turn.job, 0.0)
    >>> order = ""
    >>> for _ in range(6):
    ...     turn = sharing.next(waiting, 0.0); order += turn.job; sharing.use(turn.job, 1.0)
    >>> order
    'abaaba'
    """

    def __init__(self, slice_s: float = SLICE_S) -> None:
        self.slice_s = slice_s
        self._jobs: dict[str, _Job] = {}
        self._last: dict[int, float] = {}
        """By priority, the highest pass that a job had while it used the device. It counts when no job is active."""

    def set_terms(
        self,
        job: str,
        *,
        share: float = 1.0,
        priority: int = 0,
        deadline_s: float = math.inf,
        left_s: float = 0.0,
    ) -> None:
        """Add a job, or change its terms. `left_s`: seconds of this device that it still needs; 0 if unknown."""
        assert share > 0, "a job without a share would never have a turn"
        known = self._jobs.setdefault(job, _Job())
        if priority != known.priority:
            known.pass_s = known.idle_from_s = self._lowest_pass(priority, job)
        known.share, known.priority, known.deadline_s, known.left_s = share, priority, deadline_s, left_s

    def forget(self, job: str) -> None:
        self._jobs.pop(job, None)

    def begin(self, job: str, now_s: float) -> None:
        """The job waits for the device from now on, unless it did already or has the device."""
        own = self._jobs[job]
        if own.idle_since_s is not None:
            lowest = self._lowest_pass(own.priority, job)
            missed_s = max(0.0, lowest - own.idle_from_s) + max(0.0, now_s - own.idle_since_s) / own.share
            own.pass_s = max(own.pass_s, min(own.pass_s + missed_s, lowest))
            own.idle_since_s = None

    def end(self, job: str, now_s: float) -> None:
        """The job neither waits for the device nor has it."""
        own = self._jobs[job]
        own.idle_since_s, own.idle_from_s = now_s, self._lowest_pass(own.priority, job)

    def use(self, job: str, seconds: float) -> None:
        """The job has used the device for this time."""
        own = self._jobs[job]
        self._last[own.priority] = max(self._last.get(own.priority, 0.0), own.pass_s)
        own.pass_s += seconds / own.share

    def next(self, waiting: Iterable[Claim], now_s: float) -> Claim | None:
        """Which of these turns begins next. Of one job, training comes before rollout, then what waits longest."""
        return min(waiting, key=lambda turn: self._order(turn, now_s), default=None)

    def yields_in_s(self, held: Claim, waiting: Iterable[Claim], now_s: float) -> float:
        """After how many seconds the process with this turn should give it to one of those that wait. Infinite
        if none of them should have it now."""
        first = self.next(waiting, now_s)
        if held.kind == "train" or first is None:
            return math.inf
        if first.job == held.job and first.kind == "train":
            return 0.0
        own, other = self._rank(held.job, now_s), self._rank(first.job, now_s)
        if other[0] < own[0]:
            return 0.0
        if other[:2] > own[:2]:
            return math.inf
        ahead_s = (other[2] - own[2]) * self._jobs[held.job].share if other[1] == own[1] else 0.0
        return max(0.0, held.since_s + self.slice_s - now_s, ahead_s)

    def late(self, job: str, now_s: float) -> bool:
        """Whether the job would miss its deadline with its share of the device. One that has passed counts no more."""
        own = self._jobs[job]
        if math.isinf(own.deadline_s) or own.deadline_s <= now_s:
            return False
        active = [j for j in self._jobs.values() if j.priority == own.priority and j.idle_since_s is None]
        part = own.share / max(own.share, sum(j.share for j in active))
        return now_s + own.left_s / part > own.deadline_s

    def _order(self, turn: Claim, now_s: float) -> tuple[int, bool, float, str, bool, float]:
        return *self._rank(turn.job, now_s), turn.job, turn.kind != "train", turn.since_s

    def _rank(self, job: str, now_s: float) -> tuple[int, bool, float]:
        return -self._jobs[job].priority, not self.late(job, now_s), self._jobs[job].pass_s

    def _lowest_pass(self, priority: int, but: str) -> float:
        """The lowest pass of the other active jobs of this priority, or where they stopped."""
        jobs = (j for name, j in self._jobs.items() if name != but and j.priority == priority)
        return min((j.pass_s for j in jobs if j.idle_since_s is None), default=self._last.get(priority, 0.0))
