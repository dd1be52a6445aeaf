"""Moves the last responses of a step onto fewer workers while other jobs want the devices (docs/jobs.md). Pure: state
in, moves out.

A decode step with a few responses takes about as long as one with many, so a device that runs the last two responses of
a job is kept from other jobs for as long as one that runs twenty. If they continue on another worker, it is free. That
costs one prefill for each response, and longer steps for those that they join.

    device time of a worker   = prefill + fixed_s * longest response + each_s * tokens of all its responses
    time until it is done     = device time * (1 + contended) + round trip, if something moved there
    cost of a state           = workers * time until the last one is done + sum of contended * device time

The first term is what waiting for the end of the step costs this job, on all its devices; the second is what other jobs
lose. `contended` is the share of time in which another job wants the device (Member.contended). Alone, nothing moves.

Example: `a` and `b` have one response each with 1,000 tokens to come, in steps of 10 ms + 0.1 ms for each response.
Other jobs want both devices all the time. On `a` both take 10.2 s of device time instead of 20.2 s, and the step ends
0.2 s later. The prefill of 500 tokens takes 0.05 s:

    >>> from windfall.step_time import StepTime
    >>> profile = StepTime(fixed_s=0.01, each_s=0.0001)
    >>> loads = [WorkerLoad(worker=w, running=1, slots=9, profile=profile, contended=1.0) for w in ("a", "b")]
    >>> rows = {w: [Running(id=f"{w}/0", context=500, remaining=1000)] for w in ("a", "b")}
    >>> [move] = merge(loads, rows.__getitem__)
    >>> move.source, move.target, round(move.gain_s, 1), round(move.cost_s, 2)
    ('b', 'a', 9.2, 0.1)

- All responses of a worker move, or none does: a device is free only if nothing is left there.
- Each move lowers the cost of the state by at least what the move itself takes, and by twice as much each time that one
  of its responses has moved before.
- Responses move back to an idle worker (balance.py) only if that lowers the cost, too. So they do not move to and fro.
- A worker gets only what it has slots, and expected room in its KV cache, for.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Sequence

from windfall.controller.scheduling.balance import ROUND_TRIP_S, Held, Move, Running, WorkerLoad
from windfall.controller.scheduling.kv_room import SAFE

MOST = 8
"""Workers of each kind that are looked at in a round: targets that other jobs want, and targets that they do not."""


class _Tail:
    """What a worker still has to generate."""

    def __init__(self, load: WorkerLoad, rows: Iterable[Running] = (), joining: Iterable[Running] = ()) -> None:
        assert load.profile is not None
        self.load, self.profile, self.rows = load, load.profile, list[Running]()
        self.longest = self.total = 0.0
        self.kv_tokens = 0.0
        """Tokens in the KV cache if all were there at their ends."""
        self.prefill_s = self.round_trip_s = 0.0
        """Of what moves there."""
        for r in rows:
            self._add(r)
        for r in joining:
            self.join(r)

    def copy(self) -> _Tail:
        out = _Tail(self.load)
        out.rows, out.longest, out.total, out.kv_tokens = [*self.rows], self.longest, self.total, self.kv_tokens
        out.prefill_s, out.round_trip_s = self.prefill_s, self.round_trip_s
        return out

    def join(self, r: Running) -> None:
        """A response of another worker."""
        self._add(r)
        self.prefill_s += 0.0 if r.waiting else r.context * self.load.prefill_s
        self.round_trip_s = ROUND_TRIP_S

    def _add(self, r: Running) -> None:
        self.rows.append(r)
        self.longest, self.total = max(self.longest, r.remaining), self.total + r.remaining
        self.kv_tokens += r.context + r.remaining

    def has_room(self, r: Running) -> bool:
        load = self.load
        in_cache = not load.kv_tokens or self.kv_tokens + r.context + r.remaining <= SAFE * load.kv_tokens
        return in_cache and len(self.rows) < load.slots

    @property
    def device_s(self) -> float:
        return self.prefill_s + self.profile.fixed_s * self.longest + self.profile.each_s * self.total

    @property
    def done_s(self) -> float:
        """Time until all its responses have ended."""
        return self.device_s * (1 + self.load.contended) + self.round_trip_s

    @property
    def taken_s(self) -> float:
        """Device time that other jobs lose."""
        return self.device_s * self.load.contended


def merge(
    loads: Sequence[WorkerLoad], held: Held, *, fits: Callable[[str, str], bool] = lambda id, worker: True
) -> list[Move]:
    """The responses that should continue on another worker, so that theirs is free for other jobs. They go to workers
    that no other job wants, or also to one of the others: the one with which that is best. `fits(id, worker)`: whether
    a worker may get this response."""
    if not any(load.contended and load.running for load in loads) or any(load.profile is None for load in loads):
        return []
    tails = sorted((_Tail(load, held(load.worker)) for load in loads), key=lambda tail: tail.device_s)
    free = [tail for tail in tails if not tail.load.contended][:MOST]
    busy = [tail for tail in tails if tail.load.contended and tail.rows]
    idle = sorted((tail for tail in tails if tail.load.contended and not tail.rows), key=lambda t: t.load.contended)
    known = [tail for tail in busy if all(r.remaining > 0 for r in tail.rows)]
    best: list[Move] = []
    for more in ([], *([tail] for tail in (*busy[-MOST:], *idle[:1]))):
        moves = _emptied([tail for tail in known if tail not in more], [*free, *more], tails, fits)
        best = max(best, moves, key=lambda moves: sum(move.gain_s for move in moves))
    return best


def _emptied(
    sources: Sequence[_Tail], targets: Sequence[_Tail], tails: Sequence[_Tail], fits: Callable[[str, str], bool]
) -> list[Move]:
    """The moves from these sources to these targets that pay. `tails`: of all workers."""
    moves: list[Move] = []
    targets, others = list(targets), [tail for tail in tails if tail not in targets]
    done_s, taken_s = max(tail.done_s for tail in tails), sum(tail.taken_s for tail in targets)
    for source in sources if targets else ():
        after = [target.copy() for target in targets]
        placed = _spread(source.rows, after, fits)
        if len(placed) < len(source.rows):
            continue
        done_after_s = max(tail.done_s for tail in (*after, *(tail for tail in others if tail is not source)))
        taken_after_s = sum(target.taken_s for target in after)
        gain_s = len(tails) * (done_s - done_after_s) + taken_s + source.taken_s - taken_after_s
        costs = [ROUND_TRIP_S + (0.0 if r.waiting else r.context * target.load.prefill_s) for r, target in placed]
        if gain_s > sum(costs) * 2 ** max(r.moves for r in source.rows):
            names = {"source": source.load.worker, "gain_s": gain_s / len(placed)}
            moves += [
                Move(id=r.id, target=target.load.worker, cost_s=cost_s, **names)
                for (r, target), cost_s in zip(placed, costs, strict=True)
            ]
            targets, done_s, taken_s = after, done_after_s, taken_after_s
            others.remove(source)
    return moves


def _spread(
    rows: Sequence[Running], targets: Sequence[_Tail], fits: Callable[[str, str], bool]
) -> list[tuple[Running, _Tail]]:
    """Add each of these responses, the longest one first, to the target that is done first. Ends at the first one for
    which there is no room."""
    placed: list[tuple[Running, _Tail]] = []
    by_end = [(target.done_s, n) for n, target in enumerate(targets)]
    heapq.heapify(by_end)
    for r in sorted(rows, key=lambda r: -r.remaining):
        passed: list[tuple[float, int]] = []
        while by_end:
            target = targets[by_end[0][1]]
            if target.has_room(r) and fits(r.id, target.load.worker):
                target.join(r)
                heapq.heapreplace(by_end, (target.done_s, by_end[0][1]))
                placed.append((r, target))
                break
            passed.append(heapq.heappop(by_end))
        else:
            return placed
        for each in passed:
            heapq.heappush(by_end, each)
    return placed


def keep_merged(loads: Sequence[WorkerLoad], held: Held, moves: Sequence[Move]) -> list[Move]:
    """These moves without those to idle workers that other jobs want more than this one gains."""
    closed = {load.worker: load for load in loads if load.contended and not load.running}
    if not any(move.target in closed for move in moves):
        return list(moves)
    kept = [move for move in moves if move.target not in closed]
    for worker in closed:
        more = [*kept, *(move for move in moves if move.target == worker)]
        if state_cost_s(loads, held, more) < state_cost_s(loads, held, kept):
            kept = more
    return kept


def state_cost_s(loads: Sequence[WorkerLoad], held: Held, moves: Sequence[Move] = ()) -> float:
    """The cost of a state after these moves, in seconds of a device."""
    targets = {move.id: move.target for move in moves}
    rows = [(r, load.worker) for load in loads for r in held(load.worker)]
    tails = [
        _Tail(
            load,
            (r for r, worker in rows if worker == load.worker and r.id not in targets),
            (r for r, _ in rows if targets.get(r.id) == load.worker),
        )
        for load in loads
    ]
    return len(loads) * max(tail.done_s for tail in tails) + sum(tail.taken_s for tail in tails)
