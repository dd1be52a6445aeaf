"""Advice to change the plan of a run, when the fleet, prices or lengths have changed. Pure: plans in, advice out.

A change costs time (drain, restart, pulls), and estimates are noisy. So advice is given only if the better plan is
ahead by GAIN in at least ROUNDS evaluations in a row, and pays its cost back within PAYBACK_S. After advice was
given, the next one must beat the plan that was advised.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

GAIN = 0.10
"""Smallest relative gain that is worth a change."""
KEEP_GAIN = 0.05
"""A candidate that was ahead stays a candidate above this gain."""
ROUNDS = 3
PAYBACK_S = 3600.0


class Candidate(NamedTuple):
    """A plan as far as advice is concerned."""

    name: str
    value: float
    """Higher is better: tokens per second, or tokens per dollar."""


class Advice(NamedTuple):
    plan: str
    gain: float
    """Relative gain over the current plan."""
    payback_s: float
    """Seconds after which the change has paid for itself."""

    def __str__(self) -> str:
        return f"{self.plan} would be {self.gain:.0%} better; the change pays for itself in {self.payback_s:,.0f} s"


@dataclass(slots=True)
class Replanner:
    """
    >>> advisor = Replanner(current="a")
    >>> better = [Candidate("a", 100.0), Candidate("b", 130.0)]
    >>> [advisor.observe(better, change_s=60.0) for _ in range(2)], str(advisor.observe(better, change_s=60.0))
    ([None, None], 'b would be 30% better; the change pays for itself in 260 s')
    """

    current: str
    _ahead: str = field(default="", repr=False)
    _rounds: int = field(default=0, repr=False)

    @property
    def undecided(self) -> bool:
        """A plan is ahead, but not for long enough."""
        return self._rounds > 0

    def observe(self, candidates: list[Candidate], *, change_s: float) -> Advice | None:
        """One evaluation of all plans under the conditions of now. `change_s`: seconds without progress that a change
        costs. A current plan that is no longer possible is not among the candidates."""
        if not candidates:
            return None
        best = max(candidates, key=lambda c: c.value)
        now = next((c.value for c in candidates if c.name == self.current), 0.0)
        if best.name == self.current or best.value <= 0:
            self._ahead, self._rounds = "", 0
            return None
        if now <= 0:  # the current plan cannot run any more: there is nothing to wait for
            return self._advise(best.name, float("inf"), 0.0)
        gain = best.value / now - 1
        kept = best.name == self._ahead
        if gain < (KEEP_GAIN if kept else GAIN):
            self._ahead, self._rounds = "", 0
            return None
        self._rounds = self._rounds + 1 if kept else 1
        self._ahead = best.name
        payback_s = change_s * (1 + gain) / gain
        if self._rounds < ROUNDS or gain < GAIN or payback_s > PAYBACK_S:
            return None
        return self._advise(best.name, gain, payback_s)

    def _advise(self, name: str, gain: float, payback_s: float) -> Advice:
        self.current, self._ahead, self._rounds = name, "", 0
        return Advice(name, gain, payback_s)
