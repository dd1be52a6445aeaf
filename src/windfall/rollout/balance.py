"""Where a response goes. Pure: loads in, choices out.

Join the shortest queue: a response goes to the worker with the smallest share of its slots taken, siblings together as
far as that allows, since they share their prompt's pages. A worker gets no more than its part of what is open while
others are about to be ready, or have room for theirs; what nobody has room for is held back rather than queued where it
cannot be moved.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace


@dataclass(frozen=True, kw_only=True, slots=True)
class Load:
    worker: str
    running: int
    slots: int


def place(queued: Sequence[str], loads: Sequence[Load], *, behind: int = 0, coming: int = 0) -> list[tuple[str, str]]:
    """(response, worker) for as many of `queued`, in order, as there is room for. `behind`: responses that wait behind
    these; `coming`: workers about to be ready.

    >>> place(["1/0", "1/1", "2/0"], [Load(worker="a", running=0, slots=8), Load(worker="b", running=1, slots=8)])
    [('1/0', 'a'), ('1/1', 'a'), ('2/0', 'b')]
    """
    if not loads or not queued:
        return []
    total = len(queued) + behind + sum(load.running for load in loads)
    out = _fill(queued, loads, -(-total // (len(loads) + coming)))
    if len(out) < len(queued) and not coming:  # some have too few slots for their part: those who have more take it
        more = Counter(worker for _, worker in out)
        loads = [replace(load, running=load.running + more[load.worker]) for load in loads]
        out += _fill(queued[len(out) :], loads, total)
    return out


def _fill(queued: Sequence[str], loads: Sequence[Load], most: int) -> list[tuple[str, str]]:
    """No worker gets to more than `most`."""
    room = {load.worker: min(load.slots, most) - load.running for load in loads}
    slots = {load.worker: load.slots for load in loads}
    heap = [(load.running / load.slots, n, load.worker) for n, load in enumerate(loads) if room[load.worker] > 0]
    heapq.heapify(heap)
    out: list[tuple[str, str]] = []
    at = 0
    while heap and at < len(queued):
        share, n, worker = heapq.heappop(heap)
        group = queued[at].rpartition("/")[0]
        taken = 0
        while at < len(queued) and room[worker] > 0 and queued[at].rpartition("/")[0] == group:
            out.append((queued[at], worker))
            room[worker] -= 1
            at += 1
            taken += 1
        if room[worker] > 0:
            heapq.heappush(heap, (share + taken / slots[worker], n, worker))
    return out


def even(loads: Sequence[Load]) -> list[tuple[str, int]]:
    """(worker, how many it should give back), when nothing is queued and somebody stands idle.

    >>> even([Load(worker="a", running=9, slots=16), Load(worker="b", running=0, slots=16)])
    [('a', 4)]
    """
    idle = [load for load in loads if load.running == 0]
    if not idle:
        return []
    fair = -(-sum(load.running for load in loads) // len(loads))
    room = sum(max(0, min(load.slots, fair) - load.running) for load in loads)
    out = []
    for load in loads:
        count = min(load.running - fair, room)  # more would only come back to where it was
        if count > 0:
            out.append((load.worker, count))
            room -= count
    return out
