"""Who is next: accounts share the trainer and the workers, whatever number of models and calls each has.

    TrainerTurns     one account at a time has the trainer; next is who used it least of late
    OpenResponses    most responses that workers have at once; next is who has fewest open

Within an account, who came first is next. An account with thousands of calls waits for itself: the few calls of another
one pass it.

Short calls, which are updates and saves, pass long ones: their client can sample then, while the trainer works for
another one. In the order of arrival all clients would end their steps together, so that the trainer waited for workers
and workers for the trainer. An account is ahead of the others by at most AHEAD_S in this way.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter, OrderedDict
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

AHEAD_S = 2.0
"""Seconds of the trainer that short calls of an account may use before it is the turn of the account."""
HALF_LIFE_S = 60.0
"""Seconds after which use of the trainer counts half."""
LEAST_OPEN = 16
"""Responses that may be open at once without any worker."""
PER_SLOT = 2
"""Open responses for each slot of a worker: slots that become free have work at once."""
T = TypeVar("T")


class Queues(Generic[T]):
    """Who waits, by account, and for what."""

    def __init__(self) -> None:
        self._waiting: dict[tuple[str, bool], OrderedDict[asyncio.Future[None], T]] = {}
        """By account, and whether it is for short calls."""

    async def wait(self, account: str, item: T, undo: Callable[[], None], *, short: bool = False) -> None:
        """Wait until `pop` returns this item. `undo`: called if it has been returned, but the caller is canceled."""
        key, mine = (account, short), asyncio.get_running_loop().create_future()
        queue = self._waiting.setdefault(key, OrderedDict())
        queue[mine] = item
        try:
            await mine
        except asyncio.CancelledError:
            if mine.done() and not mine.cancelled():
                undo()
            raise
        finally:
            queue.pop(mine, None)
            if not queue and self._waiting.get(key) is queue:
                del self._waiting[key]

    def pop(self, used: Callable[[str], float]) -> tuple[str, T] | None:
        """Who is next: the first of the account that has used least, with AHEAD_S for short calls. None: nobody
        waits."""
        while True:
            queues = (key for key, queue in self._waiting.items() if queue)
            key = min(queues, key=lambda key: used(key[0]) - AHEAD_S * key[1], default=None)
            if key is None:
                return None
            waiting, item = self._waiting[key].popitem(last=False)
            if not waiting.done():  # otherwise it was canceled, and has not run since
                waiting.set_result(None)
                return key[0], item


@dataclass(eq=False)
class AccountTurn:
    """The time in which an account has the trainer."""

    account: str
    _end: Callable[[AccountTurn], None]
    counted_s: float = 0.0
    """Its seconds are counted until then (monotonic clock)."""

    def end(self) -> None:
        """The trainer has done its work."""
        self._end(self)


class TrainerTurns:
    def __init__(self) -> None:
        self._queues = Queues[AccountTurn]()
        self._turn: AccountTurn | None = None
        self._recent: dict[str, tuple[float, float]] = {}
        """The seconds that each account used of late, and when that was computed."""
        self._used: dict[str, float] = {}
        """The seconds that each account has used since `take`."""

    @contextlib.asynccontextmanager
    async def turn(self, account: str, *, short: bool = False) -> AsyncIterator[AccountTurn]:
        """Have the trainer, until the turn is ended or this is left. `short`: for milliseconds."""
        turn = AccountTurn(account, self._ended)
        try:
            if self._turn is None:
                self._begin(turn)
            else:
                await self._queues.wait(account, turn, turn.end, short=short)
            yield turn
        finally:
            turn.end()

    def _begin(self, turn: AccountTurn) -> None:
        self._turn, turn.counted_s = turn, time.monotonic()

    def _ended(self, turn: AccountTurn) -> None:
        if self._turn is not turn:  # it has ended before, or never began
            return
        self._count()
        self._turn = None
        if (following := self._queues.pop(self.recent_s)) is not None:
            self._begin(following[1])

    def _count(self) -> None:
        """Count what the present turn has used so far."""
        turn, now = self._turn, time.monotonic()
        if turn is not None:
            used = now - turn.counted_s
            self._used[turn.account] = self._used.get(turn.account, 0.0) + used
            self._recent[turn.account] = self.recent_s(turn.account) + used, now
            turn.counted_s = now

    @contextlib.contextmanager
    def paid_by(self, account: str) -> Iterator[None]:
        """The present turn does work for this account meanwhile."""
        if (turn := self._turn) is None:
            yield
            return
        self._count()
        before, turn.account = turn.account, account
        try:
            yield
        finally:
            if self._turn is turn:
                self._count()
            turn.account = before

    def recent_s(self, account: str) -> float:
        """Seconds that an account used of late; those of a minute ago count half."""
        s, at = self._recent.get(account, (0.0, 0.0))
        return s * 0.5 ** ((time.monotonic() - at) / HALF_LIFE_S) if s else 0.0

    def take(self) -> dict[str, float]:
        """Seconds by account since the last call."""
        self._count()
        used, self._used = self._used, {}
        return used


class OpenResponses:
    def __init__(self, slots: Callable[[], int]) -> None:
        """`slots`: of all workers together."""
        self._slots = slots
        self._queues = Queues[None]()
        self.open = Counter[str]()
        """How many responses of each account are open."""

    @contextlib.asynccontextmanager
    async def opened(self, account: str) -> AsyncIterator[None]:
        """Open a response when it is the turn of the account, until the context ends."""
        self.look()
        if self._room():
            self.open[account] += 1
        else:
            await self._queues.wait(account, None, lambda: self._ended(account))
        try:
            yield
        finally:
            self._ended(account)

    def _room(self) -> bool:
        return self.open.total() < max(LEAST_OPEN, PER_SLOT * self._slots())

    def _ended(self, account: str) -> None:
        self.open[account] -= 1
        self.look()

    def look(self) -> None:
        """Open those that are next while there is room: a response has ended, or a worker has joined."""
        while self._room() and (found := self._queues.pop(lambda account: self.open[account])) is not None:
            self.open[found[0]] += 1
