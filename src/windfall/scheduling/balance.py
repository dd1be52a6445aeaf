"""Where a queued response goes. Pure: loads in, choices out. Which running one should move is in rebalance.py.

A response goes where its next tokens come soonest: to the worker whose step, with one more in its batch, is shortest by
the profile learned of it (speed.py). Equal workers get equal numbers, a slower one fewer, and none while a fast one
with room is still the faster. Rules:
- in order of the queue, and never more than a worker has slots: what nobody has room for is held back rather than
  queued where it cannot be moved; so is the part of workers about to be ready;
- delayed dispatch: a response is held back from a worker so slow that one who is full now would be through with it
  sooner, when that one is free so soon that a start on the slow one is not worth the move that would follow;
- siblings go together, and to a worker that holds pages of theirs when that makes the longest step at most NEAR longer.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Mapping, Sequence
from itertools import groupby, repeat

import msgspec
import numpy as np

from windfall.scheduling.worker_speed import UNKNOWN, Profile

NEAR = 0.1
PAYS = 4.0
"""A start elsewhere must save so many round trips."""
ROUND_TRIP_S = 0.05


class WorkerLoad(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A worker as it is now. Many are made, hence no dataclass."""

    worker: str
    running: int
    """All it was given, also what waits there."""
    slots: int
    profile: Profile | None = None
    """None: nobody has been measured yet."""
    waiting: int = 0
    """Of those running: given to it, but its engine makes steps without them."""
    prefill_tok_per_s: float = 0.0
    """0: not known. A token of a prefill is then taken to cost what a response adds to a step."""


def place(
    queued: Sequence[str], loads: Sequence[WorkerLoad], *, behind: int = 0, coming: int = 0,
    holds: Mapping[str, Collection[str]] | None = None, meant: Mapping[str, str] | None = None,
    typical: float = 0.0, round_trip_s: float = ROUND_TRIP_S,
) -> list[tuple[str, str]]:  # fmt: skip
    """(response, worker) for as many of `queued`, in order, as should go now. `behind`: responses that wait behind
    these; `coming`: workers about to be ready; `holds`: group to workers that have pages of it; `meant`: the worker
    that a response was moved for.

    >>> place(["1/0", "1/1", "2/0"], [WorkerLoad(worker="a", running=0, slots=8), Load(worker="b", running=1, slots=8)])
    [('1/0', 'a'), ('1/1', 'a'), ('2/0', 'b')]
    """
    if not loads or not queued:
        return []
    fleet = _Fleet(loads, coming)
    fleet.fill(len(queued) + behind)
    if fleet.more[: len(loads)].sum() > len(queued):  # the rest of these places are for those behind
        fleet = _Fleet(loads, 0)
        fleet.fill(len(queued))
    fleet.hold_back(len(queued) + behind, typical, round_trip_s)
    more = fleet.more[: len(loads)].tolist()
    return _give(queued[: sum(more)], loads, more, fleet, holds or {}, meant or {})


class _Fleet:
    """Step times of workers as arrays. Those who are coming are like the typical one here, and have no work yet."""

    def __init__(self, loads: Sequence[WorkerLoad], coming: int) -> None:
        profiles = [load.profile or UNKNOWN for load in loads]
        self.measured = all(load.profile is not None for load in loads)
        if not self.measured:
            profiles = [UNKNOWN] * len(loads)  # seconds beside no seconds say nothing
        middle = len(loads) // 2
        self.fixed = np.array([p.fixed_s for p in profiles])
        self.each = np.array([p.each_s for p in profiles])
        self.start = np.array([load.running for load in loads])
        self.slots = np.array([load.slots for load in loads])
        if coming:
            self.fixed = np.append(self.fixed, np.repeat(np.sort(self.fixed)[middle], coming))
            self.each = np.append(self.each, np.repeat(np.sort(self.each)[middle], coming))
            self.start = np.append(self.start, np.zeros(coming, dtype=int))
            self.slots = np.append(self.slots, np.repeat(self.slots.max(), coming))
        self.more = np.zeros(len(self.start), dtype=int)

    def step_s(self, extra: int = 0) -> np.ndarray:
        return self.fixed + self.each * (self.start + self.more + extra)

    def fill(self, count: int) -> None:
        """`count` more, one by one to the shortest step: all at once up to a common level, then the last few."""
        room = np.maximum(self.slots - self.start, 0)
        count = min(count, int(room.sum()))
        enter, leave = self.fixed + self.each * self.start, self.fixed + self.each * (self.start + room)
        levels = np.concatenate([enter, leave])
        order = np.argsort(levels, kind="stable")
        slope = np.cumsum(np.concatenate([1 / self.each, -1 / self.each])[order])
        levels = levels[order]
        filled = np.concatenate([[0.0], np.cumsum(slope[:-1] * np.diff(levels))])
        at = max(0, int(np.searchsorted(filled, count, side="right")) - 1)
        level = levels[-1]
        if at < len(levels) - 1:
            level = min(levels[at + 1], levels[at] + (count - filled[at]) / slope[at])
        level *= 1 - 1e-9  # so that rounding never takes one too many
        self.more = np.clip(np.floor((level - enter) / self.each), 0, room).astype(int)
        heap = [(s, n) for n, s in enumerate(self.step_s(1).tolist()) if self.more[n] < room[n]]
        heapq.heapify(heap)
        for _ in range(count - int(self.more.sum())):
            s, n = heap[0]
            self.more[n] += 1
            if self.more[n] < room[n]:
                heapq.heapreplace(heap, (s + float(self.each[n]), n))
            else:
                heapq.heappop(heap)

    def hold_back(self, count: int, typical: float, round_trip_s: float) -> None:
        """Take back from the slowest what those who are full by then would have finished sooner."""
        now = self.step_s()
        full = np.flatnonzero(self.start + self.more >= self.slots)
        if not self.measured or not len(full):
            return
        full = full[np.argsort(now[full], kind="stable")]
        fast_s = now[full]
        # In responses of the usual length per time that one of its tokens takes: the length cancels out.
        rate = np.cumsum((self.start + self.more)[full] / fast_s)
        left = count - int(self.more.sum())
        heap = [(-s, n) for n, s in enumerate(now.tolist()) if self.more[n]]
        heapq.heapify(heap)
        while heap:
            s, n = -heap[0][0], heap[0][1]
            faster = int(np.searchsorted(fast_s, s * (1 - 1e-9)))
            if not faster:
                return
            wait = (left + 1) / rate[faster - 1]
            if s <= fast_s[0] + wait or typical * wait * fast_s[0] / s > PAYS * round_trip_s:
                return
            self.more[n] -= 1
            left += 1
            if self.more[n]:
                heapq.heapreplace(heap, (float(self.each[n]) - s, n))
            else:
                heapq.heappop(heap)


def _give(
    queued: Sequence[str], loads: Sequence[WorkerLoad], more: list[int], fleet: _Fleet, holds: Mapping[str, Collection[str]],
    meant: Mapping[str, str],
) -> list[tuple[str, str]]:  # fmt: skip
    """Who of `queued` goes where, when worker n may have `more[n]`: siblings together, and where their pages are."""
    names = [load.worker for load in loads]
    number = {name: n for n, name in enumerate(names)}
    steps = fleet.step_s()[: len(loads)][np.array(more) > 0]
    near_s = (1 + NEAR) * float(steps.max()) if len(steps) else 0.0
    taken = [0] * len(loads)

    def fits(n: int) -> int:
        """How many more it may have for the sake of pages it holds."""
        in_step = int((near_s - fleet.fixed[n]) / fleet.each[n])
        return max(more[n], min(in_step, loads[n].slots) - loads[n].running) - taken[n]

    heap = [(-m, n) for n, m in enumerate(more) if m]
    heapq.heapify(heap)
    groups = [id.rpartition("/")[0] for id in queued]
    runs = list(zip(groups, map(meant.get, queued), strict=True)) if meant else groups
    out: list[tuple[str, str]] = []
    at = 0
    for _, run in groupby(runs):
        end = at + len(list(run))
        target = meant.get(queued[at])
        wanted = holds.get(groups[at], ()) if target is None else (target,)
        for n in (number[name] for name in wanted if name in number):
            count = max(0, min(end - at, fits(n)))
            out += zip(queued[at : at + count], repeat(names[n]))
            taken[n] += count
            at += count
        while at < end:
            free, n = heap[0]
            if -free == more[n] - taken[n]:  # else some went there for its pages
                count = min(end - at, -free)
                out += zip(queued[at : at + count], repeat(names[n]))
                taken[n] += count
                at += count
            if more[n] > taken[n]:
                heapq.heapreplace(heap, (taken[n] - more[n], n))
            else:
                heapq.heappop(heap)
    return out
