"""Simulated devices that several jobs share by turns. Who is next, how long a turn lasts and who is charged is decided
by the policies of real devices (windfall/turns/); this is what a turn server does with them, in virtual time.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterable

from windfall.sim.machines.turn import TurnTaker
from windfall.turns.accounts import DeviceAccounts
from windfall.turns.sharing import Claim, Kind, Sharing

CLOSE_S = 1e-9
"""Turns that should end in less than this end now."""


class JobTurn:
    """The turns of one worker or trainer on one device."""

    def __init__(self, device: SimDevice, job: str, kind: Kind, taker: TurnTaker) -> None:
        self.device, self.job, self.taker = device, job, taker
        self.kind: Kind = kind

    def take(self) -> bool:
        return self.device.take(self)

    def give(self) -> None:
        self.device.give(self)

    @property
    def contended_s(self) -> float:
        return self.device.contended_s(self.job)


class SimDevice:
    def __init__(self, name: str, jobs: Iterable[str], accounts: DeviceAccounts, slice_s: float) -> None:
        self.name, self._accounts, self._sharing = name, accounts, Sharing(slice_s)
        for job in jobs:
            self._sharing.set_terms(job)
        self._loop = asyncio.get_running_loop()
        self._waiting: dict[JobTurn, Claim] = {}
        self._holder: JobTurn | None = None
        self._held = Claim("", "rollout", 0.0)
        """The turn that the holder has."""
        self._used_s = 0.0
        """The time until which the present turn is part of what its job has used (loop time, seconds)."""
        self._contended_s = dict.fromkeys(jobs, 0.0)
        """By job: seconds in which another one waited for the device or had it, until `_counted_s`."""
        self._counted_s = self._loop.time()
        self._end: asyncio.TimerHandle | None = None
        """When the holder may have to give its turn."""

    def set_terms(self, job: str, *, share: float, priority: int) -> None:
        self._sharing.set_terms(job, share=share, priority=priority)

    def take(self, turn: JobTurn) -> bool:
        """True: it has the turn. False: it waits, and its taker is told when it has the turn."""
        if turn is not self._holder and turn not in self._waiting:
            self._count()
            now_s = self._loop.time()
            self._waiting[turn] = Claim(turn.job, turn.kind, now_s)
            self._sharing.begin(turn.job, now_s)
            if self._holder is None:
                self._grant(turn)
            else:
                self._ask_holder()
        return turn is self._holder

    def give(self, turn: JobTurn) -> None:
        """End this turn, or its waiting."""
        self._count()
        if self._waiting.pop(turn, None) is None and turn is not self._holder:
            return
        now_s = self._loop.time()
        if turn is self._holder:
            self._settle()
            self._accounts.hold(self.name, {}, round(now_s * 1e9))
            self._holder = None
        if all(other.job != turn.job for other in self._active()):
            self._sharing.end(turn.job, now_s)
        first = self._sharing.next(self._waiting.values(), now_s)
        if self._holder is None and first is not None:
            following = next(other for other, waits in self._waiting.items() if waits is first)
            self._grant(following)
            self._loop.call_soon(self._tell, following)
        else:
            self._ask_holder()

    def contended_s(self, job: str) -> float:
        self._count()
        return self._contended_s[job]

    def _count(self) -> None:
        now_s, jobs = self._loop.time(), {turn.job for turn in self._active()}
        for job in self._contended_s:
            if jobs - {job}:
                self._contended_s[job] += now_s - self._counted_s
        self._counted_s = now_s

    def _active(self) -> list[JobTurn]:
        return [*self._waiting] if self._holder is None else [*self._waiting, self._holder]

    def _grant(self, turn: JobTurn) -> None:
        now_s = self._loop.time()
        del self._waiting[turn]
        self._holder, self._held, self._used_s = turn, Claim(turn.job, turn.kind, now_s), now_s
        self._accounts.hold(self.name, {turn.job: 1.0}, round(now_s * 1e9))
        self._ask_holder()

    def _tell(self, turn: JobTurn) -> None:
        if turn is self._holder:  # otherwise it has given the turn meanwhile
            turn.taker.turn_granted()

    def _settle(self) -> None:
        now_s = self._loop.time()
        self._sharing.use(self._held.job, now_s - self._used_s)
        self._used_s = now_s

    def _ask_holder(self) -> None:
        """Ask the holder to give its turn, now or when it has had enough of the time."""
        if self._end is not None:
            self._end.cancel()
            self._end = None
        if self._holder is None or not self._waiting:
            return
        self._settle()
        now_s = self._loop.time()
        in_s = self._sharing.yields_in_s(self._held, self._waiting.values(), now_s)
        if in_s <= CLOSE_S:
            self._holder.taker.turn_wanted()
        elif math.isfinite(in_s):
            self._end = self._loop.call_at(now_s + in_s, self._ask_holder)
