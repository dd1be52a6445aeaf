"""Chooses a worker for the next turn of each response. Pure: turns and loads in, choices out.

A turn is worth most on the worker that still has its tokens in the KV cache, but not at any price. The cost of a worker
is in seconds, summed over the turn and the responses that it delays (as in rebalance.py):

    prefill of the tokens that the worker does not have, which also stops its running responses
    + decode of a turn of usual length, and what one more response in the batch costs the others
    + the wait for a free slot, if it has none

In this order:
1. the worker that has the tokens, if no other is cheaper; if it has no free slot and is still cheapest, the turn waits;
2. a reserved worker, or a borrowed one within the SLO of its owner, with a free slot, whose cost is within NEAR of the
   cheapest: a spot worker may be lost, with all that it keeps. Of several, the one whose owner has used it least
   recently, and reserved ones before borrowed ones;
3. the cheapest worker with a free slot;
4. otherwise the turn stays in the queue.
A borrowed worker counts only while it `admits` turns: while the SLO of its owner holds. A stalled worker gets no turn,
not even those whose tokens it has, and no turn waits for a worker without slots: a lender that the run has given back.

Example: `a` has the 4,000 tokens of the turn and runs eight responses, `b` is idle. Prefill on `b` would take 0.4 s;
the longer steps on `a` cost less:

    >>> profile = StepTime(fixed_s=0.01, each_s=0.0002)
    >>> loads = [
    ...     WorkerLoad(worker=w, running=n, slots=9, profile=profile, prefill_tok_per_s=10_000)
    ...     for w, n in (("a", 8), ("b", 0))
    ... ]
    >>> turn = NextTurn(id="1/0", context=4_100, holder="a", kept=4_000)
    >>> route([turn], loads, typical=100).placed
    [('1/0', 'a')]

With 200 tokens, prefill takes 20 ms, and `b` is cheaper:

    >>> route([NextTurn(id="1/0", context=200, holder="a", kept=190)], loads, typical=100).placed
    [('1/0', 'b')]
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from windfall.controller.scheduling.balance import NEAR, WorkerLoad
from windfall.controller.scheduling.worker_speed import UNKNOWN
from windfall.step_time import StepTime

TYPICAL = 64.0
"""Tokens of a turn, before any turn has ended."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NextTurn:
    id: str
    context: int
    """Tokens that must be in the KV cache: the prompt and everything after it."""
    holder: str = ""
    """The worker that has some of them; empty if there is none."""
    kept: int = 0
    """How many it has."""
    room: int = 0
    """Tokens that a worker must have room for."""


@dataclass(frozen=True, slots=True)
class Routes:
    placed: list[tuple[str, str]] = field(default_factory=list)
    """(response, worker), in the order of the turns."""
    waiting: set[str] = field(default_factory=set)
    """Turns that wait for the worker that has their tokens."""


def route(
    turns: Sequence[NextTurn], loads: Sequence[WorkerLoad], *, typical: float = 0.0,
    longest: Mapping[str, float] | None = None,
) -> Routes:  # fmt: skip
    """`typical`: mean number of sampled tokens in a turn; 0: not known. `longest`: the most tokens for which a worker
    has room, where known."""
    out, usable = Routes(), [load for load in loads if load.admits and not load.stalled]
    if not turns or not usable:
        return out
    fleet = _Fleet(usable, typical or TYPICAL, longest or {})
    for turn in turns:
        n, waits = fleet.choose(turn)
        if waits:
            out.waiting.add(turn.id)
            fleet.queued[n] += 1
        elif n >= 0:
            out.placed.append((turn.id, usable[n].worker))
            fleet.running[n] += 1
    return out


class _Fleet:
    def __init__(self, loads: Sequence[WorkerLoad], typical: float, longest: Mapping[str, float]) -> None:
        measured = all(load.profile is not None for load in loads)
        profiles: list[StepTime] = [load.profile if measured and load.profile else UNKNOWN for load in loads]
        self._index = {load.worker: n for n, load in enumerate(loads)}
        self._typical = typical
        self._fixed = np.array([p.fixed_s for p in profiles])
        self._each = np.array([p.each_s for p in profiles])
        rates = [load.prefill_tok_per_s if measured else 0.0 for load in loads]
        self._prefill = np.array([1 / r if r else p.each_s for r, p in zip(rates, profiles, strict=True)])
        self._slots = np.array([load.slots for load in loads])
        self._preferred = np.array([load.reserved or load.borrowed for load in loads])
        self._use = np.array([load.use if load.borrowed else -1.0 for load in loads])
        self._longest = np.array([longest.get(load.worker, math.inf) for load in loads])
        self.running = np.array([load.running for load in loads])
        self.queued: Counter[int] = Counter()
        """By worker: turns that wait for it."""

    def choose(self, turn: NextTurn) -> tuple[int, bool]:
        """The index of the worker, and whether the turn waits for it; -1: no worker has a free slot."""
        holder = self._index.get(turn.holder, -1)
        missing = np.full(len(self.running), turn.context)
        if holder >= 0:
            missing[holder] -= turn.kept
        cost_s = missing * self._prefill * (1 + self.running)
        cost_s += self._typical * (self._fixed + self._each * (2 * self.running + 1))
        free = (self.running < self._slots) & (turn.room <= self._longest)
        wait_s = 0.0
        if holder >= 0 and self._slots[holder] and turn.room <= self._longest[holder] and not free[holder]:
            step_s = self._fixed[holder] + self._each[holder] * self.running[holder]
            wait_s = self._typical * step_s * (1 + self.queued[holder]) / max(1, self.running[holder])
        open_s = np.where(free, cost_s, math.inf)
        best = int(np.argmin(open_s))
        if holder >= 0 and (free[holder] or wait_s) and cost_s[holder] + wait_s <= open_s[best]:
            return holder, not free[holder]
        if not free[best]:
            return -1, False
        near = np.flatnonzero(self._preferred & (open_s <= (1 + NEAR) * open_s[best]))
        if not len(near):
            return best, False
        return int(near[np.lexsort((open_s[near], self._use[near]))[0]]), False
