"""Which base each worker has, if the policies of a run are on several bases. Pure: the caller gives figures and time.

A worker has one base at a time. It gets one when it joins, and may be asked to join again with another one, which costs
a load of the weights, and often a new engine.

    Example: 60 responses of `solver` are on 3 workers, and 60 of `verifier` on 1. A worker that joins gets `verifier`:
    60 responses per worker there, 20 here. If none joins, one of `solver` switches: then there are 30 per worker on
    both sides.

    >>> solver = BaseDemand(name="solver", responses=60, workers=3)
    >>> verifier = BaseDemand(name="verifier", responses=60, workers=1)
    >>> holding = HeldBases()
    >>> holding.choose([solver, verifier])
    'verifier'
    >>> [holding.switch([solver, verifier], now_s, join_s=30.0) for now_s in (0.0, 10.0, 20.0)]
    [None, None, ('solver', 'verifier')]

Rules:
- A worker that joins gets the base with the most responses per worker, and one without a worker first.
- One worker switches if its new base has at least as many responses per worker as its old one after the switch, or if
  its new base has responses and no worker, and its old one keeps a worker.
- The last worker of a base goes only to one that has none.
- Demand swings within a step: first all responses are of one base, then all of another. So the same switch must be
  wanted at LOOKS looks in a row, LOOK_S apart, and none may have begun for JOINS times what a worker needs from its
  joining until it is ready.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

LOOKS = 3
LOOK_S = 10.0
"""Seconds between two looks."""
JOINS = 4.0


@dataclass(frozen=True, kw_only=True, slots=True)
class BaseDemand:
    """What the policies on a base need."""

    name: str
    responses: int
    """Responses that are queued or run."""
    workers: int
    """Workers that have this base, or are about to."""

    def per_worker(self, more: int = 0) -> float:
        """Responses per worker, with `more` workers than it has. Infinite if responses have no worker."""
        workers = self.workers + more
        return self.responses / workers if workers > 0 else math.inf if self.responses else 0.0


class HeldBases:
    def __init__(self) -> None:
        self._looked_s = self._switched_s = -math.inf
        self._wanted: tuple[str, str] | None = None
        """The switch that the last looks wanted."""
        self._looks = 0
        """How many looks in a row wanted it."""

    def choose(self, demands: Sequence[BaseDemand]) -> str:
        """The base for a worker that joins. Equal ones: the first."""
        return max(demands, key=lambda base: (base.workers == 0, base.responses / max(1, base.workers))).name

    def due(self, now_s: float) -> bool:
        """Whether it is time for the next look."""
        return now_s - self._looked_s >= LOOK_S

    def switch(self, demands: Sequence[BaseDemand], now_s: float, join_s: float) -> tuple[str, str] | None:
        """(base that gives up one worker, base that gets it), if one should switch now. `join_s`: seconds that a worker
        needs from its joining until it is ready."""
        if not self.due(now_s):
            return None
        self._looked_s = now_s
        wanted = _wanted(demands)
        self._looks = self._looks + 1 if wanted == self._wanted else 1
        self._wanted = wanted
        if wanted is None or self._looks < LOOKS or now_s - self._switched_s < JOINS * join_s:
            return None
        self._switched_s, self._wanted, self._looks = now_s, None, 0
        return wanted


def _wanted(demands: Sequence[BaseDemand]) -> tuple[str, str] | None:
    """The switch that brings the most, if any brings something."""
    target = max(demands, key=lambda base: (base.workers == 0 and base.responses > 0, base.per_worker(1)))
    spare = 1 if target.workers else 0  # who speaks next may be the base that has no responses now
    sources = [base for base in demands if base is not target and base.workers > spare]
    if not sources or not target.responses:
        return None
    source = min(sources, key=lambda base: (base.workers == 1 and base.responses > 0, base.per_worker(-1)))
    keeps_one = target.workers == 0 and source.workers > 1
    return (source.name, target.name) if keeps_one or target.per_worker(1) >= source.per_worker(-1) else None
