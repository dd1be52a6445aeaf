"""Which slot holds which adapter. The owner of the slots loads what `using` says."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Iterator
from dataclasses import dataclass


@dataclass(slots=True)
class AdapterSlot:
    name: str
    key: str = ""
    """The adapter that it holds, or is given to; "" if it is empty."""
    users: int = 0
    used: int = 0
    """A number that grows with every use."""
    given: int = 0
    """The same number, of its first use by this adapter."""


class Slots:
    """Slots whose users wait until one is free. While an adapter waits for a slot, the one that has had a slot for
    longest gets no new users, so that its slot becomes free. It goes to the account that was given a slot least
    recently.

    >>> slots = Slots(["s0", "s1"])
    >>> [slots.take(key, "alice").name for key in ("a", "b", "a")]
    ['s0', 's1', 's0']
    >>> slots.release("b"); slots.take("c", "bob").name, slots.take("d", "bob")
    ('s1', None)
    """

    def __init__(self, names: Iterable[str]) -> None:
        self._slots = [AdapterSlot(name) for name in names]
        self._clock = 0
        self._freed = asyncio.Condition()
        self._wanted: Counter[tuple[str, str]] = Counter()
        """How many users of an account wait for an adapter, in the order in which they came."""
        self._given: dict[str, int] = {}
        """When each account was given a slot last, as in AdapterSlot."""

    @contextlib.asynccontextmanager
    async def using(self, key: str, account: str) -> AsyncIterator[AdapterSlot]:
        """A slot for the adapter with this key, until the context ends."""
        async with self._freed:
            self._wanted[account, key] += 1
            try:
                while self._must_wait(key) or (slot := self.take(key, account)) is None:
                    await self._freed.wait()
            finally:
                self._wanted[account, key] -= 1
                if not self._wanted[account, key]:
                    del self._wanted[account, key]
                self._freed.notify_all()
        try:
            yield slot
        finally:
            self.release(key)
            async with self._freed:
                self._freed.notify_all()

    def _must_wait(self, key: str) -> bool:
        """Whether a slot that is free, or has this adapter, is for another one that waits."""
        absent = [(account, wanted) for account, wanted in self._wanted if self.holding(wanted) is None]
        if self.holding(key) is None:
            _, following = min(absent, key=lambda each: self._given.get(each[0], 0))
            return following != key
        leaving = sorted(self._slots, key=lambda slot: slot.given)[: len({wanted for _, wanted in absent})]
        return any(slot.key == key for slot in leaving)

    def take(self, key: str, account: str) -> AdapterSlot | None:
        """Use an adapter in the slot that holds it, else in a free one, else in the least recently used idle one. None:
        every slot is in use by another one. Every `take` needs a `release`."""
        slot = self.holding(key)
        if slot is None:
            idle = [slot for slot in self._slots if not slot.users]
            slot = min(idle, key=lambda slot: (bool(slot.key), slot.used), default=None)
            if slot is None:
                return None
        self._clock += 1
        if slot.key != key:
            slot.key, slot.given = key, self._clock
            self._given[account] = self._clock
        slot.users, slot.used = slot.users + 1, self._clock
        return slot

    def release(self, key: str) -> None:
        slot = self.holding(key)
        assert slot is not None and slot.users, f"{key} is in no slot"
        slot.users -= 1

    def holding(self, key: str) -> AdapterSlot | None:
        return next((slot for slot in self._slots if slot.key == key), None)

    def forget(self, key: str) -> None:
        """The adapter is not needed any more."""
        slot = self.holding(key)
        if slot is not None and not slot.users:
            slot.key = ""

    def __iter__(self) -> Iterator[AdapterSlot]:
        return iter(self._slots)
