"""Counts the open sessions of a stateful environment, and knows where each waits for its next turn.

A session is *busy* while it makes a step, and *idle* while it waits for the next turn of its response. The environment
holds something for both, such as a container, so their sum is limited. Rules:

- At the limit, a session can only be opened after another one has ended. Calls that open one wait, and that time counts
  against no time limit. Turns of open sessions never wait for this.
- While calls wait, the session that has been idle longest is closed once it has been idle for YIELD_S, if it can be
  replayed. Closing it at once would let two responses replay their sessions against each other, turn by turn.
- A session that is idle for IDLE_S is closed in any case: its response was lost.

Whoever uses this must close the sessions that `make_room` and `expire` return.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, Generic, TypeVar

Place = TypeVar("Place")
Key = tuple[Any, ...]
"""The number of the task, and the turns so far, each as (text, observation)."""

YIELD_S = 30.0
"""A session must be idle for this long before it is closed to make room for another one (seconds)."""
IDLE_S = 3600.0
"""A session that is idle for this long is closed (seconds)."""


class OpenSessions(Generic[Place]):
    """The idle sessions. `busy` tells how many others are open.

    >>> now, sessions = [0.0], OpenSessions(2, clock=lambda: now[0])
    >>> sessions.keep((7, ("north", "a wall")), "process 1")
    >>> sessions.has_room(busy=1), sessions.has_room(busy=0)
    (False, True)
    >>> sessions.make_room(busy=1)
    >>> now[0] = 60.0
    >>> sessions.make_room(busy=1)
    ((7, ('north', 'a wall')), 'process 1')
    >>> sessions.take((7, ("north", "a wall")))
    """

    def __init__(self, limit: int, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.limit = limit
        self.replayable = True
        self._clock = clock
        self._idle: OrderedDict[int, tuple[Key, Place, float]] = OrderedDict()
        """The longest idle first, and since when."""
        self._by_key: dict[Key, list[int]] = {}
        self._next = 0

    def __len__(self) -> int:
        return len(self._idle)

    def keep(self, key: Key, place: Place) -> None:
        """A session waits there for its next turn."""
        self._next += 1
        self._idle[self._next] = (key, place, self._clock())
        self._by_key.setdefault(key, []).append(self._next)

    def take(self, key: Key) -> Place | None:
        """Where a session with these turns waits. It is not idle any more."""
        return self._remove(self._by_key[key][-1])[1] if key in self._by_key else None

    def drop(self, place: Place) -> None:
        """All sessions there are gone."""
        for number in [number for number, (_, where, _) in self._idle.items() if where is place]:
            self._remove(number)

    def has_room(self, busy: int) -> bool:
        return len(self._idle) + busy < self.limit

    def make_room(self, busy: int) -> tuple[Key, Place] | None:
        """The session to close because a call waits for room, if there is one."""
        return None if self.has_room(busy) or not self.replayable else self.oldest(YIELD_S)

    def expire(self) -> tuple[Key, Place] | None:
        """A session that has been idle for too long."""
        return self.oldest(IDLE_S)

    def oldest(self, idle_s: float) -> tuple[Key, Place] | None:
        """The session that has been idle longest, if that is at least `idle_s`. It is not idle any more."""
        number, (_, _, since_s) = next(iter(self._idle.items()), (0, ((), None, self._clock())))
        return self._remove(number) if number and self._clock() - since_s >= idle_s else None

    def _remove(self, number: int) -> tuple[Key, Place]:
        key, place, _ = self._idle.pop(number)
        self._by_key[key].remove(number)
        if not self._by_key[key]:
            del self._by_key[key]
        return key, place
