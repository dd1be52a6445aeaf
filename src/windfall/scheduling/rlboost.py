"""RLBoost's Algorithm 2 as published: where a response goes, and what moves. Pure. For comparison: balance.py and
rebalance.py are windfall's own. `techniques.balancing = "algorithm2"` chooses it.

    select    among workers with fewer than THETA pending, the one with the fewest; else the response is held back
    balance   one worker has none pending and another some: one moves from whoever has most. None has any and one is
              idle: of the busiest, all that is above B, the batch at which it makes nearly what it ever would

What the paper leaves open, and how it is here:
- pending is what a worker's engine has and makes no steps with. No worker is given more than its slots, so mostly none
  is, and equal numbers of pending are told apart by how full they are: executing over slots. So the trainer's machine,
  that stands for several of the paper's instances, gets its part;
- THETA is 8: of 1, 8 and 32 it was best or equal in benchmarks/balance.py;
- B is the knee of the profile that was measured of that worker (speed.py).
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping, Sequence

from windfall.scheduling.balance import WorkerLoad
from windfall.scheduling.rebalance import Held, Move, Running

THETA = 8


def select(
    queued: Sequence[str], loads: Sequence[WorkerLoad], *, coming: int = 0, meant: Mapping[str, str] | None = None
) -> list[tuple[str, str]]:
    """(response, worker) for as many, in order, as somebody has room for. `meant`: whom a response was moved for.
    `coming`: workers about to be ready, whose part is held back.

    >>> select(["1/0", "1/1"], [WorkerLoad(worker="a", running=3, slots=8), Load(worker="b", running=1, slots=8)])
    [('1/0', 'b'), ('1/1', 'b')]
    """
    meant, number = meant or {}, {load.worker: n for n, load in enumerate(loads)}
    if coming and loads:
        slots = min(load.slots for load in loads)
        loads = [*loads, *(WorkerLoad(worker="", running=0, slots=slots) for _ in range(coming))]
    running = [load.running for load in loads]

    def rank(n: int) -> tuple[int, float, int]:
        return loads[n].waiting, running[n] / loads[n].slots, n

    heap = [rank(n) for n, load in enumerate(loads) if load.waiting < THETA and load.running < load.slots]
    heapq.heapify(heap)
    out: list[tuple[str, str]] = []
    held_back = 0
    while len(out) + held_back < len(queued):
        id = queued[len(out)]
        n = number.get(meant.get(id, ""), -1)
        if n < 0 or running[n] >= loads[n].slots:
            while heap and heap[0] != rank(heap[0][2]):  # it was given something since
                n = heapq.heappop(heap)[2]
                if running[n] < loads[n].slots:
                    heapq.heappush(heap, rank(n))
            if not heap:
                break
            n = heap[0][2]
        running[n] += 1
        if loads[n].worker:
            out.append((id, loads[n].worker))
        else:
            held_back += 1
    return out


def balance(loads: Sequence[WorkerLoad], held: Held) -> list[Move]:
    """
    >>> from windfall.scheduling.worker_speed import Profile
    >>> profile = Profile(fixed_s=0.004, each_s=0.002)
    >>> loads = [WorkerLoad(worker=w, running=n, slots=99, profile=profile) for w, n in (("a", 10), ("b", 0))]
    >>> profile.knee, [m.id for m in balance(loads, lambda w: [Running(id=f"{i}/0", context=5) for i in range(10)])]
    (8, ['0/0', '1/0'])
    """
    if len(loads) < 2:
        return []
    most = max(loads, key=lambda load: load.waiting)
    if most.waiting:
        target = next((x for x in loads if not x.waiting and x.running < x.slots and x is not most), None)
        return _moves(most, target, 1, lambda r: r.waiting, held) if target is not None else []
    idle = next((load for load in loads if not load.running), None)
    busiest = max(loads, key=lambda load: load.running)
    if idle is None or busiest.profile is None:
        return []
    above = max(0, busiest.running - busiest.profile.knee)
    return _moves(busiest, idle, min(above, idle.slots), lambda r: True, held)


def _moves(
    source: WorkerLoad, target: WorkerLoad, count: int, may: Callable[[Running], bool], held: Held
) -> list[Move]:
    chosen = [r for r in held(source.worker) if may(r)][:count]
    return [Move(id=r.id, source=source.worker, target=target.worker, gain_s=0.0, cost_s=0.0) for r in chosen]
