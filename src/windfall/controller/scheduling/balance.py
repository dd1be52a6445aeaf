"""Chooses a worker for each queued response (`place`) and, when the queue is empty, running responses that should
continue on another worker (`rebalance`). Pure: loads in, choices out.

`place`: a response goes to the worker on which its next tokens come soonest: the one whose engine step, with one more
response in the batch, is shortest by its learned speed profile (worker_speed.py). Equal workers get equal numbers of
responses, a slower worker gets fewer, and it gets none while a fast worker with free slots is still faster.

Example: `a` has steps of 10 ms + 1 ms per response, `b` of 13 ms + 2 ms per response. With ten responses queued, `a`
gets eight and `b` two, and their steps are about equally long (18 ms and 17 ms):

    >>> from collections import Counter
    >>> fast, slow = StepTime(fixed_s=0.010, each_s=0.001), StepTime(fixed_s=0.013, each_s=0.002)
    >>> loads = [WorkerLoad(worker=w, running=0, slots=16, profile=p) for w, p in (("a", fast), ("b", slow))]
    >>> Counter(worker for _, worker in place([f"{n}/0" for n in range(10)], loads))
    Counter({'a': 8, 'b': 2})

- Responses are placed in the order of the queue, and no worker gets more than its free slots. A response for which
  there is no free slot stays in the queue, because from there it can still go anywhere. So does the share of workers
  that are about to be ready.
- Responses of one group stay together. They go to a worker that has their prompt in its prefix cache, unless that makes
  the longest step longer by more than the share NEAR.

`rebalance`: responses that wait at a worker with full slots or pages go to a worker where none waits. Running responses
go from the worker with the longest engine step to the one with the shortest; after that, more go to workers that are
still idle.

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
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, repeat

import msgspec
import numpy as np

from windfall.controller.workers.worker_speed import UNKNOWN
from windfall.step_time import StepTime

NEAR = 0.1
"""The longest step may become longer by this share if that makes use of a cached prefix."""
ROUND_TRIP_S = 0.05
"""Seconds that a move takes, apart from prefill."""
MAX_STEP_RATIO = 0.85
"""A busy worker is joined only if its step is shorter than this share of the source's step."""
MARGIN = 2.0
REMAINING = 0.5
"""Share of a batch that is still running, averaged over the rest of a response: other responses end meanwhile, at the
source and at the target."""


class WorkerLoad(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """The current load of a worker. A Struct, not a dataclass, because very many are created."""

    worker: str
    running: int
    """Responses assigned to the worker, including those that wait there."""
    slots: int
    """Responses that the worker can run at once."""
    profile: StepTime | None = None
    """Its speed; None: no worker has been measured yet."""
    waiting: int = 0
    """Assigned responses that its engine does not run yet."""
    turn_preference: float = math.inf
    """Next turns go to workers with a low value if their costs are about equal: -1 for a reserved worker, for a lender
    the share of its memory that its owner has used recently, infinite for a spot worker."""
    stalled: bool = False
    """It has work, but its engine has made no step for a while."""
    prefill_tok_per_s: float = 0.0
    """0: not known. A prefilled token is then assumed to cost as much time as a response adds to a step."""
    kv_tokens: int = 0
    """Tokens for which its KV cache has room; 0: not known."""
    contended: float = 0.0
    """Share of the time in which another job wants its device."""

    @property
    def prefill_s(self) -> float:
        """Seconds to prefill one token, if anything was measured."""
        if self.prefill_tok_per_s > 0:
            return 1 / self.prefill_tok_per_s
        return self.profile.each_s if self.profile is not None else 0.0


def place(
    queued: Sequence[str], loads: Sequence[WorkerLoad], *, backlog: int = 0, coming: int = 0,
    prefix_holders: Mapping[str, Collection[str]] | None = None, move_targets: Mapping[str, str] | None = None,
) -> list[tuple[str, str]]:  # fmt: skip
    """(response, worker) for each response of `queued` that should start now, in order.

    `backlog`: number of responses in the queue after `queued`. `coming`: number of workers about to be ready.
    `prefix_holders`: the workers that have a group's prompt in their prefix cache. `move_targets`: the worker to which
    a response is being moved.

    >>> place(["1/0", "1/1", "2/0"], [WorkerLoad(worker=w, running=n, slots=8) for w, n in (("a", 0), ("b", 1))])
    [('1/0', 'a'), ('1/1', 'a'), ('2/0', 'b')]
    """
    if not loads or not queued:
        return []
    fleet = _Fleet(loads, coming)
    fleet.fill(len(queued) + backlog)
    if fleet.new[: len(loads)].sum() > len(queued):  # more would fit: place only these
        fleet = _Fleet(loads, 0)
        fleet.fill(len(queued))
    new = fleet.new[: len(loads)].tolist()
    return _match(queued[: sum(new)], loads, new, fleet, prefix_holders or {}, move_targets or {})


def profiles(loads: Sequence[WorkerLoad]) -> tuple[list[StepTime], bool]:
    """The profile of every worker, and whether all are measured. If not, all count as unknown: measured seconds cannot
    be compared with an unmeasured worker."""
    known = [load.profile for load in loads if load.profile is not None]
    measured = len(known) == len(loads)
    return (known if measured else [UNKNOWN] * len(loads)), measured


class _Fleet:
    """The workers as arrays. A worker that is coming is assumed to be idle and as fast as the median worker."""

    def __init__(self, loads: Sequence[WorkerLoad], coming: int) -> None:
        known, _ = profiles(loads)
        middle = len(loads) // 2
        self.fixed = np.array([p.fixed_s for p in known])
        self.each = np.array([p.each_s for p in known])
        self.running = np.array([load.running for load in loads])
        self.slots = np.array([load.slots for load in loads])
        if coming:
            self.fixed = np.append(self.fixed, np.repeat(np.sort(self.fixed)[middle], coming))
            self.each = np.append(self.each, np.repeat(np.sort(self.each)[middle], coming))
            self.running = np.append(self.running, np.zeros(coming, dtype=int))
            self.slots = np.append(self.slots, np.repeat(self.slots.max(), coming))
        self.new = np.zeros(len(self.running), dtype=int)
        """Responses to be placed on each worker."""

    def step_s(self, extra: int = 0) -> np.ndarray:
        """Step time of each worker with its new responses and `extra` more."""
        return self.fixed + self.each * (self.running + self.new + extra)

    def fill(self, count: int) -> None:
        """Places `count` responses, each on the worker whose step would be shortest.

        Placing them one by one would be slow. Instead, every worker is filled up to a common step time ("level"); then
        the few responses lost to rounding are placed one by one."""
        free = np.maximum(self.slots - self.running, 0)
        count = min(count, int(free.sum()))
        start_s = self.fixed + self.each * self.running
        level_s = self._level_s(count, start_s, self.fixed + self.each * (self.running + free))
        self.new = np.clip(np.floor((level_s - start_s) / self.each), 0, free).astype(int)
        heap = [(s, n) for n, s in enumerate(self.step_s(1).tolist()) if self.new[n] < free[n]]
        heapq.heapify(heap)
        for _ in range(count - int(self.new.sum())):
            s, n = heap[0]
            self.new[n] += 1
            if self.new[n] < free[n]:
                heapq.heapreplace(heap, (s + float(self.each[n]), n))
            else:
                heapq.heappop(heap)

    def _level_s(self, count: int, start_s: np.ndarray, full_s: np.ndarray) -> float:
        """The step time to which all workers must be filled to place `count` responses, or a little less.

        A worker takes 1 / each_s responses per second of level, from its present step time `start_s` until its slots
        are full at `full_s`. So the number of placed responses is piecewise linear in the level."""
        levels = np.concatenate([start_s, full_s])
        order = np.argsort(levels, kind="stable")
        slope = np.cumsum(np.concatenate([1 / self.each, -1 / self.each])[order])
        levels = levels[order]
        placed = np.concatenate([[0.0], np.cumsum(slope[:-1] * np.diff(levels))])
        at = max(0, int(np.searchsorted(placed, count, side="right")) - 1)
        level = levels[-1]
        if at < len(levels) - 1:
            level = min(levels[at + 1], levels[at] + (count - placed[at]) / slope[at])
        return level * (1 - 1e-9)  # rounding must never place one response too many


def _match(
    queued: Sequence[str], loads: Sequence[WorkerLoad], new: list[int], fleet: _Fleet,
    prefix_holders: Mapping[str, Collection[str]], move_targets: Mapping[str, str],
) -> list[tuple[str, str]]:  # fmt: skip
    """Chooses a worker for each response, about `new[n]` for worker n. Groups go together, to their cached prefix."""
    names = [load.worker for load in loads]
    index = {name: n for n, name in enumerate(names)}
    steps = fleet.step_s()[: len(loads)][np.array(new) > 0]
    near_s = (1 + NEAR) * float(steps.max()) if len(steps) else 0.0
    taken = [0] * len(loads)
    groups = [id.rpartition("/")[0] for id in queued]
    runs = list(zip(groups, map(move_targets.get, queued), strict=True)) if move_targets else groups
    most_free = [(-count, n) for n, count in enumerate(new) if count]
    heapq.heapify(most_free)
    out: list[tuple[str, str]] = []
    at = 0

    def take(n: int, count: int) -> None:
        nonlocal at
        out.extend(zip(queued[at : at + count], repeat(names[n])))
        taken[n] += count
        at += count

    for _, run in groupby(runs):
        end = at + len(list(run))
        target = move_targets.get(queued[at])
        wanted = prefix_holders.get(groups[at], ()) if target is None else (target,)
        for n in (index[name] for name in wanted if name in index):
            # For a cached prefix a worker may get more than new[n], up to a step of near_s. A move has been decided.
            in_step = int((near_s - fleet.fixed[n]) / fleet.each[n]) if target is None else loads[n].slots
            free = max(new[n], min(in_step, loads[n].slots) - loads[n].running) - taken[n]
            take(n, max(0, min(end - at, free)))
        while at < end:
            free, n = -most_free[0][0], most_free[0][1]
            if free == new[n] - taken[n]:  # the entry is current
                take(n, min(end - at, free))
            if new[n] > taken[n]:
                heapq.heapreplace(most_free, (taken[n] - new[n], n))
            else:
                heapq.heappop(most_free)
    return out


class Running(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A response that may move. A Struct, not a dataclass, because very many are created."""

    id: str
    context: int
    """Tokens to prefill again after a move: the prompt and everything generated so far."""
    moves: int = 0
    waiting: bool = False
    """Assigned to the worker, but its engine does not run it yet."""
    remaining: float = 0.0
    """Tokens that it is expected to generate from now on (lengths.py)."""


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
    What is predicted of each response is not used: those that are longest would move, with the longest contexts, and
    simulated rollouts took 2 % longer. `least_context`: a lower bound for the context of any response that a worker
    has."""
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


def busy_s(loads: Sequence[WorkerLoad], held: Held, moves: Sequence[Move] = ()) -> dict[str, float]:
    """By worker that has responses after these moves: seconds until the last of them is expected to end. Every response
    continues at the step time of its worker with the responses that it then has. A moved one is delayed by the round
    trip, and the prefill of what moves to a worker stops all its responses.

    >>> profile = StepTime(fixed_s=0.01, each_s=0.01)
    >>> loads = [WorkerLoad(worker=w, running=n, slots=9, profile=profile) for w, n in (("a", 2), ("b", 0))]
    >>> rows = {"a": [Running(id=f"{n}/0", context=5, remaining=100) for n in range(2)], "b": []}
    >>> move = Move(id="0/0", source="a", target="b", gain_s=1.0, cost_s=0.1)
    >>> before, after = busy_s(loads, rows.__getitem__), busy_s(loads, rows.__getitem__, [move])
    >>> before, {worker: round(s, 3) for worker, s in after.items()}
    ({'a': 3.0}, {'a': 2.0, 'b': 2.1})
    """
    targets, here = {move.id: move.target for move in moves}, dict[str, list[tuple[float, float]]]()
    prefill = dict.fromkeys((load.worker for load in loads), 0)
    for load in loads:
        for r in held(load.worker):
            target = targets.get(r.id)
            here.setdefault(target or load.worker, []).append((r.remaining, ROUND_TRIP_S if target else 0.0))
            if target and not r.waiting:
                prefill[target] += r.context
    return {
        load.worker: prefill[load.worker] * load.prefill_s
        + max(delay_s + remaining * load.profile.step_s(len(rows)) for remaining, delay_s in rows)
        for load in loads
        if load.profile is not None and (rows := here.get(load.worker))
    }


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
        self.prefill_s = load.prefill_s
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
