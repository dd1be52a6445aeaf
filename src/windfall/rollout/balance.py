"""Where a response goes, and which one should move. Pure: loads in, choices out.

A response goes where its next tokens come soonest: to the worker whose step, with one more in its batch, is shortest by
the profile learned of it (speed.py); equal workers get equal numbers, a slower one fewer, and none while a fast one has
room for all. Rules:
- in order of the queue, and never more than a worker has slots: what nobody has room for is held back rather than
  queued where it cannot be moved; so is the part of workers about to be ready;
- delayed dispatch: nothing goes to a worker so slow that those who are full now would be through with it sooner;
- siblings go together, and to a worker that holds pages of theirs when that makes the step at most NEAR longer;
- what runs is moved only when nothing is queued, to a worker with a shorter step, and when all responses together gain
  MARGIN times what the move costs. Each move makes the sum of all steps smaller, so moving ends; a response that has
  moved before must gain twice as much each time, so noise in what was measured does not send it to and fro.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from windfall.rollout.speed import UNKNOWN, Profile

NEAR = 0.1
KEEP = 0.95
"""A move to a worker that has work already must make the step shorter than this part of what it was."""
MARGIN = 1.5


@dataclass(frozen=True, kw_only=True, slots=True)
class Load:
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


@dataclass(frozen=True, kw_only=True, slots=True)
class Running:
    id: str
    context: int
    """Tokens to compute again after a move: prompt and all made so far."""
    left: float | None = None
    """Tokens it will still make, if known."""
    moves: int = 0
    waiting: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Move:
    """Gain and cost are in seconds, summed over all responses that it makes faster or slower."""

    id: str
    source: str
    target: str
    gain_s: float
    cost_s: float


def place(
    queued: Sequence[str], loads: Sequence[Load], *, behind: int = 0, coming: int = 0,
    holds: Mapping[str, Collection[str]] | None = None, meant: Mapping[str, str] | None = None,
) -> list[tuple[str, str]]:  # fmt: skip
    """(response, worker) for as many of `queued`, in order, as should go now. `behind`: responses that wait behind
    these; `coming`: workers about to be ready; `holds`: group to workers that have pages of it; `meant`: the worker
    that a response was moved for.

    >>> place(["1/0", "1/1", "2/0"], [Load(worker="a", running=0, slots=8), Load(worker="b", running=1, slots=8)])
    [('1/0', 'a'), ('1/1', 'a'), ('2/0', 'b')]
    """
    if not loads or not queued:
        return []
    fleet = _Fleet(loads, coming)
    fleet.fill(len(queued) + behind)
    fleet.hold_back(len(queued) + behind)
    more = fleet.more[: len(loads)].tolist()
    count = min(len(queued), sum(more))
    return _give(queued[:count], loads, more, fleet, holds or {}, meant or {})


class _Fleet:
    """Step times of workers as arrays. Those who are coming are like the typical one here, and have no work yet."""

    def __init__(self, loads: Sequence[Load], coming: int) -> None:
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
        level = levels[at] + (count - filled[at]) / slope[at] if at < len(levels) - 1 else levels[-1]
        # A hair below, so that rounding never takes one too many.
        level -= 1e-9 * abs(level)
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

    def hold_back(self, count: int) -> None:
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
            if not faster or s <= HOLD * (fast_s[0] + (left + 1) / rate[faster - 1]):
                return
            self.more[n] -= 1
            left += 1
            if self.more[n]:
                heapq.heapreplace(heap, (float(self.each[n]) - s, n))
            else:
                heapq.heappop(heap)


HOLD = 1.0


def _give(
    queued: Sequence[str], loads: Sequence[Load], more: list[int], fleet: _Fleet, holds: Mapping[str, Collection[str]],
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
    out: list[tuple[str, str]] = []
    at = 0
    while at < len(queued):
        group, target, end = queued[at].rpartition("/")[0], meant.get(queued[at]), at + 1
        while end < len(queued) and queued[end].rpartition("/")[0] == group and meant.get(queued[end]) == target:
            end += 1
        wanted = holds.get(group, ()) if target is None else (target,)
        for n in (number[name] for name in wanted if name in number):
            count = min(end - at, fits(n))
            if count > 0:
                out += [(id, names[n]) for id in queued[at : at + count]]
                taken[n] += count
                at += count
        while at < end:
            free, n = heap[0]
            if -free != more[n] - taken[n]:  # some went there for its pages
                _again(heap, more[n] - taken[n], n)
                continue
            count = min(end - at, -free)
            out += [(id, names[n]) for id in queued[at : at + count]]
            taken[n] += count
            at += count
            _again(heap, more[n] - taken[n], n)
    return out


def _again(heap: list[tuple[int, int]], free: int, n: int) -> None:
    if free > 0:
        heapq.heapreplace(heap, (-free, n))
    else:
        heapq.heappop(heap)


def rebalance(
    loads: Sequence[Load], held: Callable[[str], Sequence[Running]], *, typical: float, queued: int = 0,
    round_trip_s: float = 0.05, most: int = 1024,
) -> list[Move]:  # fmt: skip
    """What should go elsewhere, when nothing is queued. `held`: what a worker has, asked only of those with too much;
    `typical`: tokens that a response will still make where that is not known."""
    crews = [_Crew(load, load.profile) for load in loads if load.profile is not None and load.slots > 0]
    if queued or len(crews) < 2:
        return []
    givers = [(-crew.step_s(0), n) for n, crew in enumerate(crews) if crew.count]
    takers = [(crew.step_s(1), n) for n, crew in enumerate(crews) if crew.count < crew.load.slots]
    heapq.heapify(givers)
    heapq.heapify(takers)
    out: list[Move] = []
    while givers and takers and len(out) < most:
        giver, taker = crews[givers[0][1]], crews[takers[0][1]]
        if -givers[0][0] != giver.step_s(0):  # it has been given something since
            heapq.heapreplace(givers, (-giver.step_s(0), givers[0][1]))
            continue
        if takers[0][0] != taker.step_s(1):
            heapq.heapreplace(takers, (taker.step_s(1), takers[0][1]))
            continue
        move = giver.best(taker, held, typical, round_trip_s) if giver is not taker else None
        if move is None:
            heapq.heappop(givers)
            continue
        out.append(move)
        giver.count, taker.count = giver.count - 1, taker.count + 1
        _next(givers, giver.count > 0, -giver.step_s(0))
        _next(takers, taker.count < taker.load.slots, taker.step_s(1))
    return out


def _next(heap: list[tuple[float, int]], more: bool, key: float) -> None:
    if more:
        heapq.heapreplace(heap, (key, heap[0][1]))
    else:
        heapq.heappop(heap)


class _Crew:
    """A worker while moves are being chosen."""

    def __init__(self, load: Load, profile: Profile) -> None:
        self.load, self.profile, self.count = load, profile, load.running
        self.prefill_s = 1 / load.prefill_tok_per_s if load.prefill_tok_per_s > 0 else profile.each_s
        self._left: list[Running] | None = None
        """What may go, the best last."""

    def step_s(self, extra: int) -> float:
        return self.profile.step_s(self.count + extra)

    def best(
        self, taker: _Crew, held: Callable[[str], Sequence[Running]], typical: float, round_trip_s: float
    ) -> Move | None:
        here_s, there_s = self.step_s(0), taker.step_s(1)
        if there_s >= here_s * (KEEP if taker.count else 1.0):
            return None
        if self._left is None:
            shorter_s = here_s - there_s

            def worth(r: Running) -> float:
                return (typical if r.left is None else r.left) * shorter_s - r.context * taker.prefill_s

            self._left = sorted(held(self.load.worker), key=worth)
        if not self._left:
            return None
        r = self._left[-1]
        left = typical if r.left is None else r.left
        stay, go = self.profile.each_s * (self.count - 1), taker.profile.each_s * taker.count
        gain_s = left * (here_s - there_s) + typical * (stay - go)
        prefill_s = r.context * taker.prefill_s
        cost_s = round_trip_s + prefill_s * (1 + taker.count)
        if gain_s <= cost_s * MARGIN * 2**r.moves:
            return None
        self._left.pop()
        return Move(id=r.id, source=self.load.worker, target=taker.load.worker, gain_s=gain_s, cost_s=cost_s)


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
