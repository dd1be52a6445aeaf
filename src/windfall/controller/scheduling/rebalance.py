"""Chooses running responses that should continue on another worker, when the queue is empty. Pure: loads in, moves out.

Responses that wait at a worker with full slots or pages go to a worker where none waits. Running responses go from the
worker with the longest engine step to the one with the shortest; after that, more go to workers that are still idle.

Example: `a` runs one response, with steps of 40.4 ms; `b` runs two, and would have steps of 10.3 ms with a third. About
1,000 tokens are left, so moving the response of `a` to `b` saves 30 s. It costs 0.2 s: a round trip of 0.05 s and 500
tokens of prefill, which stop `b`:

    >>> slow, fast = StepTime(fixed_s=0.04, each_s=0.0004), StepTime(fixed_s=0.01, each_s=0.0001)
    >>> loads = [
    ...     WorkerLoad(worker="a", running=1, slots=9, profile=slow),
    ...     WorkerLoad(worker="b", running=2, slots=9, profile=fast),
    ... ]
    >>> [move] = rebalance(loads, lambda worker: [Running(id="1/0", context=500)], typical=1000)
    >>> move.source, move.target, round(move.gain_s), round(move.cost_s, 2)
    ('a', 'b', 30, 0.2)

Rules:
- The predicted gain of every move is at least MARGIN times its cost. Both are in seconds, summed over all responses
  that become faster or slower. The cost is the round trip, and the prefill, which stops every response at the target.
  The gain is the time that shorter steps save for the response and for those it leaves, minus the time that longer
  steps cost those it joins.
- Even after a running response has joined, the target's step is shorter than the source's was before the move. So each
  move reduces the predicted total time, and the moves come to an end.
- Measurements are never exact. A busy worker is worth joining only if its step is shorter than MAX_STEP_RATIO times the
  source's step, and a response that has moved before must gain twice as much each time.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

from windfall.controller.scheduling.balance import ROUND_TRIP_S, WorkerLoad
from windfall.step_time import StepTime

MAX_STEP_RATIO = 0.85
"""A busy worker is joined only if its step is shorter than this share of the source's step."""
MARGIN = 2.0
REMAINING = 0.5
"""Share of a batch that is still running, averaged over the rest of a response: other responses end meanwhile, at the
source and at the target."""


class Running(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A response that may move. A Struct, not a dataclass, because very many are created."""

    id: str
    context: int
    """Tokens to prefill again after a move: the prompt and everything generated so far."""
    moves: int = 0
    waiting: bool = False
    """Assigned to the worker, but its engine does not run it yet."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Move:
    id: str
    source: str
    target: str
    gain_s: float
    cost_s: float


Held = Callable[[str], Sequence[Running]]
"""The responses that a worker has."""


def rebalance(
    loads: Sequence[WorkerLoad], held: Held, *, typical: float, round_trip_s: float = ROUND_TRIP_S,
    max_moves: int = 256, least_context: Callable[[str], int] = lambda worker: 0,
) -> list[Move]:  # fmt: skip
    """At most `max_moves` moves. `held` is called only for possible sources. `typical`: tokens that a response will
    still generate. If lengths are about log-normal, this is the mean length, however long a response already is.
    `least_context`: a lower bound for the context of any response that a worker has."""
    if typical <= 0 or _is_balanced(loads):
        return []
    workers = [_Worker(n, load, load.profile) for n, load in enumerate(loads) if load.profile is not None]
    if len(workers) < 2:
        return []
    planner = _Planner(held, least_context, typical, round_trip_s, max_moves)
    if any(w.waiting for w in workers):
        planner.move([w for w in workers if w.waiting], [w for w in workers if not w.waiting], waiting=True)
    if not any(w.waiting for w in workers):
        planner.move(workers, workers)
        # Idle workers may have been passed over: a busy one had a shorter step, but was not worth joining.
        planner.move(workers, [w for w in workers if not w.count])
    return planner.moves


def _is_balanced(loads: Sequence[WorkerLoad]) -> bool:
    """Whether no response waits at a worker, no worker is idle, and no step is much shorter than another: then nothing
    moves. This is so in most rounds of a large fleet, and quick to see."""
    longest_s, shortest_s = 0.0, math.inf
    for load in loads:
        profile, running = load.profile, load.running
        if profile is None:
            continue
        if load.waiting or (not running and load.slots):
            return False
        if running < load.slots:
            shortest_s = min(shortest_s, profile.fixed_s + profile.each_s * (running + 1))
        if running:
            longest_s = max(longest_s, profile.fixed_s + profile.each_s * running)
    return shortest_s >= MAX_STEP_RATIO * longest_s


class _Worker:
    """A worker while moves are being chosen."""

    __slots__ = ("candidates", "count", "n", "name", "prefill_s", "profile", "slots", "waiting")

    def __init__(self, n: int, load: WorkerLoad, profile: StepTime) -> None:
        self.n, self.name, self.slots, self.profile = n, load.worker, load.slots, profile
        self.count, self.waiting = load.running, load.waiting
        self.prefill_s = 1 / load.prefill_tok_per_s if load.prefill_tok_per_s > 0 else profile.each_s
        """Seconds to prefill one token."""
        self.candidates: dict[bool, list[Running]] = {}
        """Waiting (True) and running (False) responses; the best one to move is last."""

    def step_s(self, more: int = 0) -> float:
        """Step time with `more` additional responses."""
        return self.profile.step_s(self.count - self.waiting + more)


class _Planner:
    def __init__(
        self, held: Held, least_context: Callable[[str], int], typical: float, round_trip_s: float, max_moves: int
    ) -> None:
        self.held, self.least_context, self.typical = held, least_context, typical
        self.round_trip_s, self.max_moves = round_trip_s, max_moves
        self.moves: list[Move] = []

    def move(self, sources: Sequence[_Worker], targets: Sequence[_Worker], waiting: bool = False) -> None:
        """Moves responses from the worker with the longest step to the one with the shortest, while that gains enough.
        `waiting`: move waiting responses, not running ones."""
        workers = {w.n: w for w in (*sources, *targets)}
        longest = [(-w.step_s(), w.n) for w in sources if w.count]
        shortest = [(w.step_s(1), w.n) for w in targets if w.count < w.slots]
        heapq.heapify(longest)
        heapq.heapify(shortest)
        while longest and shortest and len(self.moves) < self.max_moves:
            source, target = workers[longest[0][1]], workers[shortest[0][1]]
            if -longest[0][0] != source.step_s():  # it has received a response since
                heapq.heapreplace(longest, (-source.step_s(), source.n))
                continue
            if shortest[0][0] != target.step_s(1):  # it has given up a response since
                heapq.heapreplace(shortest, (target.step_s(1), target.n))
                continue
            # No other worker has a longer step, and this target would be too slow for all of them.
            if not waiting and target.step_s(1) >= (MAX_STEP_RATIO if target.count else 1.0) * source.step_s():
                return
            move = self._best_move(source, target, waiting) if source is not target else None
            if move is None:
                heapq.heappop(longest)
                continue
            self.moves.append(move)
            source.count, source.waiting, target.count = source.count - 1, source.waiting - waiting, target.count + 1
            if not (source.waiting if waiting else source.count):
                heapq.heappop(longest)
            if target.count >= target.slots:
                heapq.heappop(shortest)

    def _best_move(self, source: _Worker, target: _Worker, waiting: bool) -> Move | None:
        """The move of the best candidate; None if it does not gain enough."""
        shorter_s = source.step_s() - target.step_s(1)
        fixed_s = source.profile.fixed_s - target.profile.fixed_s
        gain_s = self.typical * (fixed_s + REMAINING * (shorter_s - fixed_s))
        gain_s -= REMAINING * self.typical * target.profile.each_s * target.count
        if waiting:
            # At the source, the response and each one ahead of it must wait for a running response to end.
            gain_s += self.typical * source.step_s() * source.waiting / max(1, source.count - source.waiting)
        else:
            gain_s += REMAINING * self.typical * source.profile.each_s * (source.count - 1)
        if gain_s <= self._cost_s(self.least_context(source.name), target, waiting) * MARGIN:
            return None
        if waiting not in source.candidates:  # the fewer tokens to prefill, the better
            candidates = (r for r in self.held(source.name) if r.waiting == waiting)
            source.candidates[waiting] = sorted(candidates, key=lambda r: -r.context)
        if not source.candidates[waiting]:
            return None
        r = source.candidates[waiting][-1]
        cost_s = self._cost_s(r.context, target, waiting)
        if gain_s <= cost_s * MARGIN * 2**r.moves:
            return None
        source.candidates[waiting].pop()
        return Move(id=r.id, source=source.name, target=target.name, gain_s=gain_s, cost_s=cost_s)

    def _cost_s(self, context: int, target: _Worker, waiting: bool) -> float:
        """Seconds that a response with this context loses by a move, together with those at the target. A waiting
        response is prefilled at either worker, so its prefill is no cost of the move."""
        prefill_s = 0.0 if waiting else context * target.prefill_s * (1 + target.count)
        return self.round_trip_s + prefill_s
