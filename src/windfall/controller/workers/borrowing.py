"""Which lenders a run borrows from at the moment. Pure: the caller gives the figures and the time.

A lender costs nothing, but what runs on it takes time from a machine that belongs to another service, and may come
back at any time. So the run borrows what the step needs now, and no more than `fleet.borrowed_max` lenders:

    by backlog   lenders until every response that runs or waits in the queue has a slot
    by speed     lenders until no engine has more than the number of responses at which its steps become longer

A rollout begins with a backlog, and needs many lenders; at its end few responses are left, which own machines run as
fast, and the lenders are given back. Own machines come first, because they are paid for in any case. How many of them
to rent is decided once per step, with the lenders' throughput taken into account (worker_value.py).

Rules:
- Lenders with the lowest recent use by their owners come first. One that is in use stays, unless another has been used
  less by `STICKY`. A lender that reports no slots is not used.
- The number grows at once. It falls only to the highest number that was wanted within `HOLD_S`.
- A lender that is given back gets no new responses. It finishes those that it has, unless they move (balance.py).
  Until then it counts: responses are never on more than `fleet.borrowed_max` lenders.
- A response that fits on no machine of the run needs a lender on which it fits.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass

from windfall.controller.ledger.episode import Malformed
from windfall.controller.workers.members import Member
from windfall.link.messages import Capacity
from windfall.step_time import StepTime

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
    room: int = 0
    """Tokens of a queued response that fits on no machine of the run; 0: all fit."""


def knee(profiles: Iterable[StepTime | None]) -> float:
    """The batch at which steps are longer by the share `LONGER`, for the median of these workers; 1 if none is
    measured."""
    batches = sorted(LONGER * p.fixed_s / p.each_s for p in profiles if p is not None and p.each_s > 0)
    return max(1.0, batches[len(batches) // 2]) if batches else 1.0


def choose(need: Need, lenders: Iterable[Member], *, most: int, least: int = 0) -> list[Member]:
    """The lenders to use, best first: at least `least` and at most `most`, as far as there are lenders with slots."""
    able = sorted((w for w in lenders if w.lendable), key=lambda w: (w.longest < need.room, *_order(w)))
    wanted = max(least, math.ceil(need.responses / max(1.0, need.knee)) - need.own_workers, need.room > 0)
    backlog, count = need.responses - need.own_slots, 0
    while count < min(most, len(able)) and (count < wanted or backlog > 0):
        backlog -= able[count].lendable
        count += 1
    return able[:count]


def _order(lender: Member) -> tuple[float, bool, str]:
    use = lender.capacity.use if lender.capacity else 0.0
    return use - (STICKY if lender.in_use else 0.0), not lender.in_use, lender.id


class Borrowing:
    """The lenders in use over time."""

    def __init__(self, most: int) -> None:
        self.most = most
        self._wanted: deque[tuple[float, int]] = deque()
        """(time, number of lenders wanted) of the last `HOLD_S`, the number falling."""
        self._used: set[str] = set()

    def update(
        self,
        here: Collection[Member],
        ready: Collection[Member],
        queued: int,
        running: Callable[[str], int],
        profile: Callable[[str], StepTime | None],
        now_s: float,
        *,
        room: int = 0,
    ) -> None:
        """Sets `in_use` of all lenders. `ready`: workers that may get work now. `room`: as in Need."""
        lenders = [w for w in here if w.lends]
        if not lenders:
            return
        own = [w for w in ready if not w.lends]
        need = Need(
            responses=queued + sum(running(w.id) for w in ready),
            own_workers=len(own),
            own_slots=sum(w.slots for w in own),
            knee=knee(profile(w.id) for w in ready),
            room=room,
        )
        able = [w for w in ready if w.lends]
        wanted = len(choose(need, able, most=self.most))
        while self._wanted and self._wanted[-1][1] <= wanted:
            self._wanted.pop()
        while self._wanted and self._wanted[0][0] < now_s - HOLD_S:
            self._wanted.popleft()
        self._wanted.append((now_s, wanted))
        chosen = choose(need, able, most=self.most, least=min(self.most, self._wanted[0][1]))
        busy = {w.id for w in lenders if running(w.id)}
        free = max(0, self.most - len(busy))
        in_use = {w.id for w in chosen if w.id in busy} | {w.id for w in [w for w in chosen if w.id not in busy][:free]}
        for w in lenders:
            w.in_use = w.id in in_use
        self._used |= in_use

    def usable(self, members: Iterable[Member], now_s: float) -> list[Member]:
        """The workers that can take part in a step: of the lenders, those that have had slots within `HOLD_S` or are
        starting, and no more than the run may use."""
        all = list(members)
        able = [w for w in all if w.lends and (w.lendable or not w.booted or now_s - w.able_s <= HOLD_S)]
        best = {w.id for w in sorted(able, key=_order)[: self.most]}
        return [w for w in all if not w.lends or w.id in best]

    @staticmethod
    def report(member: Member, capacity: Capacity, now_s: float) -> bool:
        """A lender has reported its capacity. Returns whether it takes more than before."""
        c = capacity
        if not member.lends:
            raise Malformed("a capacity from a worker that does not lend")
        if c.slots < 0 or not 0 <= c.use <= 1 or not 0 <= c.lent <= 1 or not math.isfinite(c.slack_s or 0.0):
            raise Malformed(
                f"a capacity of {c.slots} slots, {c.use} in use, {c.lent} lent and a slack of {c.slack_s} s"
            )
        before, member.capacity = member.open_slots, c
        if c.slots:
            member.able_s = now_s
        return member.open_slots > before

    def take_used(self) -> set[str]:
        """The lenders that were in use at any time since the last call."""
        used, self._used = self._used, set()
        return used
