"""Which responses should go on elsewhere, when nothing is queued. Pure: loads in, moves out.

What waits at a worker whose slots or pages are full goes to one where nothing waits. What runs goes from the worker
with the longest step to the one with the shortest, then to whoever is idle. Rules:
- every move gains MARGIN times what it costs, by its own figures, in seconds summed over all it makes faster or slower.
  Cost: the round trip, and the prefill, which stops everybody at its target. Gain: shorter steps for what is left of
  the response, for those it leaves, less what it takes from those it joins;
- the target's step, with it, is shorter than its own was. So each move makes the sum of all steps smaller, and moving
  comes to rest;
- what was measured is never exact: a worker with work must be faster by KEEP to be worth joining, and a response that
  has moved before must gain twice as much each time.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

from windfall.scheduling.balance import ROUND_TRIP_S, WorkerLoad
from windfall.scheduling.worker_speed import Profile

KEEP = 0.85
MARGIN = 2.0
CROWD = 0.5
"""What is left of a crowd, on average, while a response goes on: others end, here and there."""


class Running(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A response that may move. Many are made, hence no dataclass."""

    id: str
    context: int
    """Tokens to compute again after a move: prompt and all made so far."""
    left: float | None = None
    """Tokens it will still make, if known."""
    moves: int = 0
    waiting: bool = False
    """Given to the worker, but its engine makes steps without it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Move:
    id: str
    source: str
    target: str
    gain_s: float
    cost_s: float


Held = Callable[[str], Sequence[Running]]


def rebalance(
    loads: Sequence[WorkerLoad], held: Held, *, typical: float, queued: int = 0, round_trip_s: float = ROUND_TRIP_S,
    most: int = 256,
) -> list[Move]:  # fmt: skip
    """At most `most` moves. `held`: what a worker has, asked only of those that may give. `typical`: tokens that a
    response will still make where that is not known: the mean length of finished ones is right whatever it has made,
    as long as lengths are about log-normal.

    >>> slow, fast = Profile(fixed_s=0.04, each_s=0.0004), Profile(fixed_s=0.01, each_s=0.0001)
    >>> loads = [WorkerLoad(worker="a", running=1, slots=9, profile=slow), Load(worker="b", running=2, slots=9, profile=fast)]
    >>> [move] = rebalance(loads, lambda worker: [Running(id="1/0", context=500)], typical=1000)
    >>> move.source, move.target, round(move.gain_s), round(move.cost_s, 2)
    ('a', 'b', 30, 0.2)
    """
    crews = [_Crew(n, load, load.profile) for n, load in enumerate(loads) if load.profile is not None]
    if queued or len(crews) < 2 or typical <= 0:
        return []
    choice = _Choice(held, typical, round_trip_s, most)
    if any(crew.waiting for crew in crews):
        choice.match([c for c in crews if c.waiting], [c for c in crews if not c.waiting], waiting=True)
    if not any(crew.waiting for crew in crews):
        choice.match(crews, crews)
        choice.match(crews, [c for c in crews if not c.count])  # slower than the one that was not worth joining
    return choice.moves


class _Crew:
    """A worker while moves are being chosen."""

    def __init__(self, n: int, load: WorkerLoad, profile: Profile) -> None:
        self.n, self.name, self.slots, self.profile = n, load.worker, load.slots, profile
        self.count, self.waiting = load.running, load.waiting
        self.prefill_s = 1 / load.prefill_tok_per_s if load.prefill_tok_per_s > 0 else profile.each_s
        self.may_go: dict[bool, list[Running]] = {}
        """By whether they wait: the one to go first is last."""

    def step_s(self, more: int = 0) -> float:
        return self.profile.step_s(self.count - self.waiting + more)


class _Choice:
    def __init__(self, held: Held, typical: float, round_trip_s: float, most: int) -> None:
        self.held, self.typical, self.round_trip_s, self.most = held, typical, round_trip_s, most
        self.moves: list[Move] = []

    def match(self, givers: Sequence[_Crew], takers: Sequence[_Crew], waiting: bool = False) -> None:
        """From the longest step to the shortest, until nobody gains enough."""
        crews = {crew.n: crew for crew in (*givers, *takers)}
        giving = [(-crew.step_s(), crew.n) for crew in givers if crew.count]
        taking = [(crew.step_s(1), crew.n) for crew in takers if crew.count < crew.slots]
        heapq.heapify(giving)
        heapq.heapify(taking)
        while giving and taking and len(self.moves) < self.most:
            giver, taker = crews[giving[0][1]], crews[taking[0][1]]
            if -giving[0][0] != giver.step_s():  # it was given something since
                heapq.heapreplace(giving, (-giver.step_s(), giver.n))
                continue
            if taking[0][0] != taker.step_s(1):  # it gave something since
                heapq.heapreplace(taking, (taker.step_s(1), taker.n))
                continue
            if not waiting and taker.step_s(1) >= giver.step_s():
                return
            move = self._best(giver, taker, waiting) if giver is not taker else None
            if move is None:
                heapq.heappop(giving)
                continue
            self.moves.append(move)
            giver.count, giver.waiting, taker.count = giver.count - 1, giver.waiting - waiting, taker.count + 1
            if not (giver.waiting if waiting else giver.count):
                heapq.heappop(giving)
            if taker.count >= taker.slots:
                heapq.heappop(taking)

    def _best(self, giver: _Crew, taker: _Crew, waiting: bool) -> Move | None:
        shorter_s = giver.step_s() - taker.step_s(1)
        if not waiting and taker.count and taker.step_s(1) >= KEEP * giver.step_s():
            return None
        if waiting not in giver.may_go:

            def worth(r: Running) -> float:
                return self._left(r) * shorter_s - r.context * taker.prefill_s

            mine = (r for r in self.held(giver.name) if r.waiting == waiting)
            giver.may_go[waiting] = sorted(mine, key=worth)
        if not giver.may_go[waiting]:
            return None
        r = giver.may_go[waiting][-1]
        fixed_s = giver.profile.fixed_s - taker.profile.fixed_s
        gain_s = self._left(r) * (fixed_s + CROWD * (shorter_s - fixed_s))
        gain_s -= CROWD * self.typical * taker.profile.each_s * taker.count
        cost_s = self.round_trip_s
        if waiting:  # until one of those that run has ended, for it and for everybody before it; prefilled anyhow
            gain_s += self.typical * giver.step_s() * giver.waiting / max(1, giver.count - giver.waiting)
        else:
            gain_s += CROWD * self.typical * giver.profile.each_s * (giver.count - 1)
            cost_s += r.context * taker.prefill_s * (1 + taker.count)
        if gain_s <= cost_s * MARGIN * 2**r.moves:
            return None
        giver.may_go[waiting].pop()
        return Move(id=r.id, source=giver.name, target=taker.name, gain_s=gain_s, cost_s=cost_s)

    def _left(self, r: Running) -> float:
        return self.typical if r.left is None else r.left
