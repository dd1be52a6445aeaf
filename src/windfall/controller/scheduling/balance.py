"""Chooses a worker for each queued response. Pure: loads in, choices out. rebalance.py moves running responses.

A response goes to the worker on which its next tokens come soonest: the one whose engine step, with one more response
in the batch, is shortest by its learned speed profile (worker_speed.py). Equal workers get equal numbers of responses,
a slower worker gets fewer, and it gets none while a fast worker with free slots is still faster.

Example: `a` has steps of 10 ms + 1 ms per response, `b` of 13 ms + 2 ms per response. With ten responses queued, `a`
gets eight and `b` two, and their steps are about equally long (18 ms and 17 ms):

    >>> from collections import Counter
    >>> fast, slow = StepTime(fixed_s=0.010, each_s=0.001), StepTime(fixed_s=0.013, each_s=0.002)
    >>> def workers(slots):
    ...     return [WorkerLoad(worker=w, running=0, slots=slots, profile=p) for w, p in (("a", fast), ("b", slow))]
    >>> queued = [f"{n}/0" for n in range(10)]
    >>> Counter(worker for _, worker in place(queued, workers(slots=16)))
    Counter({'a': 8, 'b': 2})

With four slots each, `a` has no free slots after four responses. `b` gets four, and two stay in the queue:

    >>> Counter(worker for _, worker in place(queued, workers(slots=4), typical=1000))
    Counter({'a': 4, 'b': 4})

Rules:
- Responses are placed in the order of the queue, and no worker gets more than its free slots. A response for which
  there is no free slot stays in the queue, because from there it can still go anywhere. So does the share of workers
  that are about to be ready.
- Delayed dispatch: a response waits instead of starting on a slow worker if a fast worker that is now full would finish
  it sooner, and will be free so soon that starting on the slow one and moving later is not worthwhile.
- Responses of one group stay together. They go to a worker that has their prompt in its prefix cache, unless that makes
  the longest step longer by more than the share NEAR.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Collection, Mapping, Sequence
from itertools import groupby, repeat

import msgspec
import numpy as np

from windfall.controller.scheduling.worker_speed import UNKNOWN
from windfall.step_time import StepTime

NEAR = 0.1
"""The longest step may become longer by this share if that makes use of a cached prefix."""
MIN_ROUND_TRIPS = 4.0
"""Start on a slow worker at once if that saves more than this number of round trips."""
ROUND_TRIP_S = 0.05
"""Seconds that a move takes, apart from prefill."""


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


def place(
    queued: Sequence[str], loads: Sequence[WorkerLoad], *, backlog: int = 0, coming: int = 0,
    prefix_holders: Mapping[str, Collection[str]] | None = None, move_targets: Mapping[str, str] | None = None,
    typical: float = 0.0, round_trip_s: float = ROUND_TRIP_S,
) -> list[tuple[str, str]]:  # fmt: skip
    """(response, worker) for each response of `queued` that should start now, in order.

    `backlog`: number of responses in the queue after `queued`. `coming`: number of workers about to be ready.
    `prefix_holders`: the workers that have a group's prompt in their prefix cache. `move_targets`: the worker to which
    a response is being moved. `typical`: mean length of a response in tokens; 0: not known.

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
    fleet.hold_back(len(queued) + backlog, typical, round_trip_s)
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
        known, self.measured = profiles(loads)
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

    def hold_back(self, count: int, typical: float, round_trip_s: float) -> None:
        """Delayed dispatch: takes responses back from the slowest workers if full, faster workers would finish them
        sooner. `count`: responses in the whole queue."""
        now_s = self.step_s()
        batch = self.running + self.new
        full = np.flatnonzero((batch >= self.slots) & (batch > 0))  # a lender may have no slots at all
        if not self.measured or not len(full):
            return
        full = full[np.argsort(now_s[full], kind="stable")]
        full_s = now_s[full]
        # Slots that become free per unit of time. The unit is the duration of one response on a worker with steps of
        # one second; response lengths cancel out, because all durations are proportional to them.
        freed = np.cumsum((self.running + self.new)[full] / full_s)
        backlog = count - int(self.new.sum())
        slowest = [(-s, n) for n, s in enumerate(now_s.tolist()) if self.new[n]]
        heapq.heapify(slowest)
        while slowest:
            step_s, n = -slowest[0][0], slowest[0][1]
            faster = int(np.searchsorted(full_s, step_s * (1 - 1e-9)))
            if not faster:
                return
            wait = (backlog + 1) / freed[faster - 1]
            if step_s <= full_s[0] + wait or typical * wait * full_s[0] / step_s > MIN_ROUND_TRIPS * round_trip_s:
                return
            self.new[n] -= 1
            backlog += 1
            if self.new[n]:
                heapq.heapreplace(slowest, (float(self.each[n]) - step_s, n))
            else:
                heapq.heappop(slowest)


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
            # For a cached prefix a worker may get more than new[n], up to a step of near_s.
            in_step = int((near_s - fleet.fixed[n]) / fleet.each[n])
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
