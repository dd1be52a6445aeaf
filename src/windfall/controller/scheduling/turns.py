"""Responses with several turns: which worker has their tokens in its prefix cache, and where the next turn goes.
Pure.

    ended ──▶ (the environment works) ──▶ returned ──▶ assigned ──▶ ended ──▶ ... ──▶ over

A turn is worth most on the worker that still has its tokens in the KV cache, but not at any price (`route`). The cost
of a worker is in seconds, summed over the turn and the responses that it delays (as in balance.py):

    prefill of the tokens that the worker does not have, which also stops its running responses
    + decode of a turn of usual length, and what one more response in the batch costs the others
    + the wait for a free slot, if it has none

In this order (ROSE's):
1. the worker that has the tokens, if no other is cheaper; if it has no free slot and is still cheapest, the turn waits;
2. a reserved worker, or a borrowed one within the SLO of its owner, with a free slot, whose cost is within NEAR of the
   cheapest: a spot worker may be lost, with all that it keeps. Reserved workers come before borrowed ones, and of those
   the one whose owner has used it least recently;
3. the cheapest worker with a free slot;
4. otherwise the turn stays in the queue.
A stalled worker gets no turn, not even those whose tokens it has. No turn waits for a worker without slots: a lender
that the run has given back, or that reports none because its owner's SLO would be at risk.

Example: `a` has the 4,000 tokens of the turn and runs eight responses, `b` is idle. Prefill on `b` would take 0.4 s;
the longer steps on `a` cost less. With 200 tokens, prefill takes 20 ms, and `b` is cheaper:

    >>> from windfall.step_time import StepTime
    >>> profile = StepTime(fixed_s=0.01, each_s=0.0002)
    >>> loads = [
    ...     WorkerLoad(worker=w, running=n, slots=9, profile=profile, prefill_tok_per_s=10_000)
    ...     for w, n in (("a", 8), ("b", 0))
    ... ]
    >>> route([NextTurn(id="1/0", context=4_100, holder="a", kept=4_000)], loads, typical=100).placed
    [('1/0', 'a')]
    >>> route([NextTurn(id="1/0", context=200, holder="a", kept=190)], loads, typical=100).placed
    [('1/0', 'b')]
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from windfall.controller.scheduling.balance import NEAR, WorkerLoad, profiles

TYPICAL = 64.0
"""Tokens of a turn, before any turn has ended."""


@dataclass(slots=True)
class TurnCounts:
    sessions: int = 0
    """Number of responses that have ended, with one turn or with several."""
    turns: int = 0
    """Turns of these responses."""
    routed: int = 0
    """Next turns that were assigned to a worker."""
    to_holder: int = 0
    """Those that went to the worker that has their tokens."""


@dataclass(slots=True)
class _Session:
    turns: int = 0
    holder: str = ""
    kept: int = 0


class Turns:
    def __init__(self) -> None:
        self.several = False
        """Whether responses have several turns."""
        self.counts = TurnCounts()
        self.queued: dict[str, None] = {}
        """Next turns in the queue, in order of arrival."""
        self._sessions: dict[str, _Session] = {}
        """Open responses that have ended a turn."""
        self._held: dict[str, set[str]] = {}
        """By worker: the responses whose tokens it has."""
        self._turns = self._tokens = 0

    @property
    def typical(self) -> float:
        """Mean number of sampled tokens in a turn; 0: not known."""
        return self._tokens / self._turns if self._turns else 0.0

    def ended(self, id: str, worker: str, *, context: int, sampled: int) -> None:
        """A turn with `sampled` tokens has ended on a worker that has all `context` tokens of the response."""
        session = self._sessions.setdefault(id, _Session())
        session.turns += 1
        self._turns += 1
        self._tokens += sampled
        self._set_holder(id, session, worker, context)

    def returned(self, id: str) -> None:
        """The environment has answered with an observation: the next turn is queued."""
        self.queued[id] = None
        self.several = self.several or id in self._sessions

    def holder(self, id: str) -> tuple[str, int]:
        """The worker that has tokens of this response, and how many; ("", 0) if there is none."""
        session = self._sessions.get(id)
        return (session.holder, session.kept) if session is not None else ("", 0)

    def assigned(self, id: str, worker: str) -> None:
        """The response continues on this worker."""
        session = self._sessions.get(id)
        if self.queued.pop(id, 0) is None:
            self.counts.routed += 1
            self.counts.to_holder += session is not None and session.holder == worker
        if session is not None:
            self._set_holder(id, session, "", 0)

    def over(self, id: str, *, withdrawn: bool = False) -> None:
        """The response has no further turn."""
        self.queued.pop(id, None)
        session = self._sessions.pop(id, None)
        if session is None:
            return
        if not withdrawn:
            self.counts.sessions += 1
            self.counts.turns += session.turns
        self._set_holder(id, session, "", 0)

    def cleared(self, worker: str) -> None:
        """The worker has dropped everything: it has other weights now, or it is gone."""
        for id in list(self._held.get(worker, ())):
            self._set_holder(id, self._sessions[id], "", 0)

    def take_counts(self) -> TurnCounts:
        """The counts since the last call."""
        counts, self.counts = self.counts, TurnCounts()
        return counts

    def _set_holder(self, id: str, session: _Session, worker: str, kept: int) -> None:
        if session.holder:
            held = self._held.get(session.holder, set())
            held.discard(id)
            if not held:
                self._held.pop(session.holder, None)
        session.holder, session.kept = worker, kept
        if worker:
            self._held.setdefault(worker, set()).add(id)


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
    out, usable = Routes(), [load for load in loads if not load.stalled]
    if not turns or not usable:
        return out
    fleet = _TurnCosts(usable, typical or TYPICAL, longest or {})
    for turn in turns:
        n, waits = fleet.choose(turn)
        if waits:
            out.waiting.add(turn.id)
            fleet.queued[n] += 1
        elif n >= 0:
            out.placed.append((turn.id, usable[n].worker))
            fleet.running[n] += 1
    return out


class _TurnCosts:
    def __init__(self, loads: Sequence[WorkerLoad], typical: float, longest: Mapping[str, float]) -> None:
        known, measured = profiles(loads)
        self._index = {load.worker: n for n, load in enumerate(loads)}
        self._typical = typical
        self._fixed = np.array([p.fixed_s for p in known])
        self._each = np.array([p.each_s for p in known])
        rates = [load.prefill_tok_per_s if measured else 0.0 for load in loads]
        self._prefill = np.array([1 / r if r else p.each_s for r, p in zip(rates, known, strict=True)])
        self._slots = np.array([load.slots for load in loads])
        self._preference = np.array([load.turn_preference for load in loads])
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
        near = np.flatnonzero(open_s <= (1 + NEAR) * open_s[best])
        chosen = int(near[np.lexsort((open_s[near], self._preference[near]))[0]])
        return (chosen if math.isfinite(self._preference[chosen]) else best), False
