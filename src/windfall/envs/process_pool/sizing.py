"""How many child processes an environment is worth, and how much work each gets ahead. Decided from what calls took."""

from __future__ import annotations

from dataclasses import dataclass, field

MOST_CHILDREN = 32
AHEAD_S = 0.01
"""Work that is sent to a child ahead of its turn. More would wait there while other children are idle."""
LEAST_START_S = 1.0
SLOWLY = 0.1
"""Weight of a new measurement in a running mean."""


@dataclass(kw_only=True)
class Sizing:
    """
    >>> sleeps, computes = Sizing(cores=2), Sizing(cores=2)
    >>> for _ in range(100):
    ...     sleeps.learn("feedback", took_s=0.1, slept_s=0.099)
    ...     computes.learn("feedback", took_s=0.1, slept_s=0.0)
    >>> sleeps.more("feedback", pending=4000, there=8, running_s=0.0), computes.more("feedback", 4000, 1, 0.0)
    (8, 1)
    """

    cores: int
    most: int = MOST_CHILDREN
    start_s: float = LEAST_START_S
    """How long the last child took to be ready."""
    _took_s: dict[str, float] = field(default_factory=dict)
    _sleeping: float = 0.0
    """The share of their time in which calls leave their process asleep: a core could run more of them."""

    def learn(self, what: str, took_s: float, slept_s: float) -> None:
        """A call held up its child for so long."""
        self._took_s[what] = (1 - SLOWLY) * self._took_s.get(what, took_s) + SLOWLY * took_s
        if took_s > 1e-3:
            self._sleeping = (1 - SLOWLY) * self._sleeping + SLOWLY * min(1.0, slept_s / took_s)

    def ahead(self, what: str) -> int:
        """How many calls a child may have that have not begun to run, or are running."""
        return 1 + int(AHEAD_S / max(1e-4, self._took_s.get(what, 2 * AHEAD_S)))

    def more(self, what: str, pending: int, there: int, running_s: float) -> int:
        """How many children to start: so many as have more to do than their start takes, up to one per core for calls
        that compute and more for calls that sleep. `running_s`: for how long a call has been running by now."""
        least_s = max(LEAST_START_S, self.start_s)
        each_s = max(self._took_s.get(what, 0.0), running_s if running_s > least_s else 0.0)
        useful = int(pending * each_s / least_s)
        most = min(self.most, MOST_CHILDREN, int(self.cores / max(1e-3, 1.0 - self._sleeping)))
        return max(0, min(useful, most - there, max(2, there)))
