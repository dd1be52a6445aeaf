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

- All responses of a worker move to one other, or none does: a device is free only if nothing is left there.
- Each move lowers the cost of the state by at least what the move itself takes, and by twice as much each time that one
  of its responses has moved before.
- Responses move back to an idle worker (balance.py) only if that lowers the cost, too. So they do not move to and fro.
- A worker gets only what it has slots, and expected room in its KV cache, for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from windfall.controller.scheduling.balance import ROUND_TRIP_S, Held, Move, Running, WorkerLoad
from windfall.controller.scheduling.kv_room import SAFE

MOST = 64
"""Workers that are looked at in a round, as sources and as targets: each source is compared with each target."""


class _Tail:
    """What a worker still has to generate."""

    def __init__(self, load: WorkerLoad, rows: Sequence[Running]) -> None:
        assert load.profile is not None
        self.load, self.rows, self.profile = load, rows, load.profile
        self.count = len(rows)
        self.longest = max((r.remaining for r in rows), default=0.0)
        self.total = sum(r.remaining for r in rows)
        self.kv_tokens = self.total + sum(r.context for r in rows)
        """Tokens in the KV cache if all were there at their ends."""
        self.prefill_s = self.round_trip_s = 0.0
        """Seconds of prefill, and of the round trip, for responses that move there."""

    def joined_by(self, other: _Tail) -> _Tail:
        """With all responses of another worker."""
        out = _Tail(self.load, ())
        out.count, out.longest = self.count + other.count, max(self.longest, other.longest)
        out.total, out.kv_tokens = self.total + other.total, self.kv_tokens + other.kv_tokens
        prefill = sum(r.context for r in other.rows if not r.waiting)
        out.prefill_s, out.round_trip_s = self.prefill_s + self.load.prefill_s * prefill, ROUND_TRIP_S
        return out

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

    @property
    def fits(self) -> bool:
        """Whether the worker has room for all of it."""
        load = self.load
        return self.count <= load.slots and (not load.kv_tokens or self.kv_tokens <= SAFE * load.kv_tokens)


def merge(
    loads: Sequence[WorkerLoad], held: Held, *, fits: Callable[[str, str], bool] = lambda id, worker: True
) -> list[Move]:
    """The responses that should continue on another worker, so that theirs is free for other jobs. In one round they
    all move to the same one. `fits(id, worker)`: whether a worker may get this response."""
    if not any(load.contended and load.running for load in loads) or any(load.profile is None for load in loads):
        return []
    tails = [_Tail(load, held(load.worker)) for load in loads]
    busy = sorted((tail for tail in tails if tail.count), key=lambda tail: tail.device_s)
    idle = sorted((tail for tail in tails if not tail.count), key=lambda tail: tail.load.contended)
    known = [tail for tail in busy if tail.load.contended and all(r.remaining > 0 for r in tail.rows)]
    latest = sorted(((tail.done_s, tail.load.worker) for tail in busy), reverse=True)
    found = (
        _moves_to(target, [tail for tail in known[:MOST] if tail is not target], latest, len(loads), fits)
        for target in (*busy[-MOST:], *idle[:1])
    )
    return max(found, key=lambda moves: sum(move.gain_s for move in moves))


def _moves_to(
    target: _Tail, sources: Sequence[_Tail], latest: Sequence[tuple[float, str]], workers: int,
    fits: Callable[[str, str], bool],
) -> list[Move]:  # fmt: skip
    """The moves to this worker that pay. `sources`: that with least work first. `latest`: when each busy worker is
    done, the last one first."""
    name, moves, gone = target.load.worker, list[Move](), {target.load.worker}
    done_s = latest[0][0]
    for source in sources:
        after, worker = target.joined_by(source), source.load.worker
        if not after.fits or not all(fits(r.id, name) for r in source.rows):
            continue
        others_s = next((s for s, other in latest if other not in gone and other != worker), 0.0)
        gain_s = workers * (done_s - max(others_s, after.done_s)) + source.taken_s + target.taken_s - after.taken_s
        cost_s = ROUND_TRIP_S + after.prefill_s - target.prefill_s
        if gain_s > cost_s * 2 ** max(r.moves for r in source.rows):
            each = {"gain_s": gain_s / source.count, "cost_s": cost_s / source.count}
            moves += [Move(id=r.id, source=worker, target=name, **each) for r in source.rows]
            gone.add(worker)
            target, done_s = after, max(others_s, after.done_s)
    return moves


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
    tails = []
    for load in loads:
        tail = _Tail(load, [r for r, worker in rows if worker == load.worker and r.id not in targets])
        joining = [r for r, _ in rows if targets.get(r.id) == load.worker]
        tails.append(tail.joined_by(_Tail(load, joining)) if joining else tail)
    return len(loads) * max(tail.done_s for tail in tails) + sum(tail.taken_s for tail in tails)
