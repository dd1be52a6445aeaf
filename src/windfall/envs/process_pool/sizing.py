"""Decides from measured call times how many child processes an environment needs, and how many calls each may queue."""

from __future__ import annotations

from dataclasses import dataclass, field

MAX_CHILDREN = 32
AHEAD_S = 0.01
"""Seconds of work that are queued at a child in advance. More would wait there while other children are idle."""
MIN_START_S = 1.0
"""Lower bound for the time that the start of a child takes (seconds)."""
NEW_WEIGHT = 0.1
"""Weight of a new measurement in a running mean."""


@dataclass(kw_only=True)
class Sizing:
    """The measurements and the decisions.

    >>> sleeps, computes = Sizing(cores=2), Sizing(cores=2)
    >>> for _ in range(100):
    ...     sleeps.learn("feedback", took_s=0.1, slept_s=0.099)
    ...     computes.learn("feedback", took_s=0.1, slept_s=0.0)
    >>> sleeps.children_to_start("feedback", pending=4000, children=8, running_s=0.0)
    8
    >>> computes.children_to_start("feedback", pending=4000, children=1, running_s=0.0)
    1
    """

    cores: int
    limit: int = MAX_CHILDREN
    """Largest number of children."""
    start_s: float = MIN_START_S
    """Seconds that the last child took to become ready."""
    _took_s: dict[str, float] = field(default_factory=dict)
    _sleeping: float = 0.0
    """The share of the call time during which the process sleeps, so that its core could run more calls."""

    def learn(self, what: str, took_s: float, slept_s: float) -> None:
        """Record a call that blocked its child for `took_s` seconds."""
        self._took_s[what] = (1 - NEW_WEIGHT) * self._took_s.get(what, took_s) + NEW_WEIGHT * took_s
        if took_s > 1e-3:
            self._sleeping = (1 - NEW_WEIGHT) * self._sleeping + NEW_WEIGHT * min(1.0, slept_s / took_s)

    def queue_limit(self, what: str) -> int:
        """Maximum number of calls at a child that are running or have not begun."""
        return 1 + int(AHEAD_S / max(1e-4, self._took_s.get(what, 2 * AHEAD_S)))

    def children_to_start(self, what: str, pending: int, children: int, running_s: float) -> int:
        """Number of children to start: those that would get more work than their start takes, up to one per core for
        calls that compute, and more for calls that sleep. `running_s`: how long the longest call has been running."""
        start_s = max(MIN_START_S, self.start_s)
        each_s = max(self._took_s.get(what, 0.0), running_s if running_s > start_s else 0.0)
        useful = int(pending * each_s / start_s)
        limit = min(self.limit, int(self.cores / max(1e-3, 1.0 - self._sleeping)))
        return max(0, min(useful, limit - children, max(2, children)))
