"""Which slot holds which adapter. Pure.

    take(key)      a slot for an adapter: the one that holds it, else a free one, else the least recently used idle one
    release(key)   until then, the slot is not given to another adapter
    forget(key)    the adapter needs no slot any more

The owner of the slots loads what `take` says.
"""

from __future__ import annotations

from collections.abc import Iterable
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
    """
    >>> slots = Slots(["s0", "s1"])
    >>> [slots.take(key).name for key in ("a", "b", "a")]
    ['s0', 's1', 's0']
    >>> slots.release("b"); slots.take("c").name, slots.take("d")
    ('s1', None)
    """

    def __init__(self, names: Iterable[str]) -> None:
        self._slots = [AdapterSlot(name) for name in names]
        self._clock = 0

    def take(self, key: str) -> AdapterSlot | None:
        """Use the adapter in a slot. None: every slot is in use by another one. Every `take` needs a `release`."""
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

    def must_leave(self, key: str, wanted: int) -> bool:
        """Whether an adapter gives up its slot so that `wanted` others get one: those that got theirs first do.

        >>> slots = Slots(["s0", "s1"])
        >>> _ = slots.take("a"), slots.take("b"), slots.take("a")
        >>> [slots.must_leave(key, 1) for key in ("a", "b", "c")]
        [True, False, False]
        """
        leaving = sorted(self._slots, key=lambda slot: slot.given)[:wanted]
        return any(slot.key == key for slot in leaving)

    def forget(self, key: str) -> None:
        """The adapter is not needed any more."""
        slot = self.holding(key)
        if slot is not None and not slot.users:
            slot.key = ""

    def __iter__(self):
        return iter(self._slots)
