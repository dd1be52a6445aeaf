"""Which lenders a run borrows from at the moment. Pure: the caller gives the figures and the time.

A lender costs nothing, but what runs on it takes time from a machine that belongs to another service, and may come
back at any time. So the run borrows what the step needs now, and no more than `fleet.borrowed_max` lenders:

    by backlog   lenders until every response that runs or waits in the queue has a slot
    by speed     lenders until no engine has more than the number of responses at which its steps become longer

A rollout begins with a backlog, and needs many lenders; at its end few responses are left, which own machines run as
fast, and the lenders are given back. Own machines come first, because they are paid for in any case. How many of them
to rent is decided once per step, with the lenders' throughput taken into account (rollout/advisor.py).

Rules:
- Lenders with the lowest recent use by their owners come first. One that is in use stays, unless another has been used
  less by `STICKY`. A lender that reports no slots is not used.
- The number grows at once. It falls only to the highest number that was wanted within `HOLD_S`.
- A lender that is given back gets no new responses. It finishes those that it has, unless they move (rebalance.py).

Example: 40 responses, and one machine of the run with 16 slots. Steps take 10 ms and 0.1 ms for each response, so a
batch of 25 makes them a quarter longer; a backlog of 24 responses needs two lenders with 16 slots each:

    >>> need = Need(responses=40, own_workers=1, own_slots=16, knee=knee([Profile(fixed_s=0.01, each_s=0.0001)]))
    >>> lenders = [LenderCapacity(id=id, slots=16, use=use) for id, use in (("a", 0.6), ("b", 0.1), ("c", 0.3))]
    >>> choose(need, lenders, most=8)
    ['b', 'c']
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass

from windfall.scheduling.members import Member
from windfall.scheduling.worker_speed import Profile

LONGER = 0.25
"""Lenders are borrowed until the responses of a batch make its steps longer by at most this share."""
STICKY = 0.1
HOLD_S = 10.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Need:
    responses: int
    """Responses that run, or wait for a slot."""
    own_workers: int
    """Workers that are ready and not borrowed."""
    own_slots: int
    """Their slots."""
    knee: float = 1.0
    """Most responses that an engine should have for the sake of speed, if lenders are available."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LenderCapacity:
    id: str
    slots: int
    """Responses that it can run now."""
    use: float = 0.0
    """Share of its memory that its owner has used recently."""
    in_use: bool = False


def knee(profiles: Iterable[Profile | None]) -> float:
    """The batch at which steps are longer by the share `LONGER`, for the median of these workers; 1 if none is
    measured."""
    batches = sorted(LONGER * p.fixed_s / p.each_s for p in profiles if p is not None and p.each_s > 0)
    return max(1.0, batches[len(batches) // 2]) if batches else 1.0


def choose(need: Need, lenders: Sequence[LenderCapacity], *, most: int, least: int = 0) -> list[str]:
    """The lenders to use, best first: at least `least` and at most `most`, as far as there are lenders with slots."""
    able = sorted(
        (c for c in lenders if c.slots > 0), key=lambda c: (c.use - (STICKY if c.in_use else 0.0), not c.in_use, c.id)
    )
    wanted = max(least, math.ceil(need.responses / max(1.0, need.knee)) - need.own_workers)
    backlog, count = need.responses - need.own_slots, 0
    while count < min(most, len(able)) and (count < wanted or backlog > 0):
        backlog -= able[count].slots
        count += 1
    return [c.id for c in able[:count]]


class Borrowing:
    """The lenders in use over time."""

    def __init__(self, most: int) -> None:
        self.most = most
        self._wanted: deque[tuple[float, int]] = deque()
        """(time, number of lenders wanted) of the last `HOLD_S`, the number falling."""
        self._used: set[str] = set()

    def update(
        self, ready: Collection[Member], queued: int, running: Callable[[str], int],
        profile: Callable[[str], Profile | None], now_s: float,
    ) -> None:  # fmt: skip
        """Sets `in_use` of the lenders among the workers that may get work."""
        lenders = [w for w in ready if w.lease.kind == "borrowed"]
        if not lenders:
            return
        own = [w for w in ready if w.lease.kind != "borrowed"]
        need = Need(
            responses=queued + sum(running(w.id) for w in ready), own_workers=len(own),
            own_slots=sum(w.slots for w in own), knee=knee(profile(w.id) for w in ready),
        )  # fmt: skip
        views = [
            LenderCapacity(id=w.id, slots=w.lendable, use=w.capacity.use if w.capacity else 0.0, in_use=w.in_use)
            for w in lenders
        ]
        wanted = len(choose(need, views, most=self.most))
        while self._wanted and self._wanted[-1][1] <= wanted:
            self._wanted.pop()
        while self._wanted and self._wanted[0][0] < now_s - HOLD_S:
            self._wanted.popleft()
        self._wanted.append((now_s, wanted))
        chosen = set(choose(need, views, most=self.most, least=min(self.most, self._wanted[0][1])))
        for w in lenders:
            w.in_use = w.id in chosen
        self._used |= chosen

    def take_used(self) -> set[str]:
        """The lenders that were in use at any time since the last call."""
        used, self._used = self._used, set()
        return used
