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
    longest gets no new users, so that its slot becomes free.

    >>> slots = Slots(["s0", "s1"])
    >>> [slots.take(key).name for key in ("a", "b", "a")]
    ['s0', 's1', 's0']
    >>> slots.release("b"); slots.take("c").name, slots.take("d")
    ('s1', None)
    """

    def __init__(self, names: Iterable[str]) -> None:
        self._slots = [AdapterSlot(name) for name in names]
        self._clock = 0
        self._freed = asyncio.Condition()
        self._wanted: Counter[str] = Counter()
        """How many users wait for each adapter, in the order in which they came."""

    @contextlib.asynccontextmanager
    async def using(self, key: str) -> AsyncIterator[AdapterSlot]:
        """A slot for the adapter with this key, until the context ends."""
        async with self._freed:
            self._wanted[key] += 1
            try:
                while self._must_wait(key) or (slot := self.take(key)) is None:
                    await self._freed.wait()
            finally:
                self._wanted[key] -= 1
                if not self._wanted[key]:
                    del self._wanted[key]
                self._freed.notify_all()
        try:
            yield slot
        finally:
            self.release(key)
            async with self._freed:
                self._freed.notify_all()

    def _must_wait(self, key: str) -> bool:
        """Whether a slot that is free, or has this adapter, is for one that came before."""
        absent = [wanted for wanted in self._wanted if self.holding(wanted) is None]
        if key in absent:
            return absent[0] != key
        leaving = sorted(self._slots, key=lambda slot: slot.given)[: len(absent)]
        return any(slot.key == key for slot in leaving)

    def take(self, key: str) -> AdapterSlot | None:
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
