"""An event loop in virtual time that can be looked at, and disturbed, between any two of its callbacks.

Waiting takes no time, what belongs in a thread is done at once, and nothing depends on the clock or on chance: the same
coroutines take the same callbacks every time.
"""

from __future__ import annotations

import asyncio
import selectors
from collections import deque
from collections.abc import Callable
from typing import Any


class _Jump(selectors.SelectSelector):
    """Waiting takes no time: the clock jumps."""

    now_s = 0.0

    def select(self, timeout: float | None = None) -> Any:
        if timeout is None:
            raise RuntimeError("everybody waits and nothing is scheduled")
        self.now_s += max(timeout, 0.0)
        return super().select(0)


class _Ready(deque[Any]):
    """The loop's callbacks that are due. `before` is called before each is taken."""

    before: Callable[[], None] = staticmethod(lambda: None)

    def popleft(self) -> Any:
        self.before()
        return super().popleft()


class StepLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._jump = _Jump()
        super().__init__(self._jump)
        self._ready = _Ready()
        self.errors: list[str] = []
        """What callbacks and forgotten tasks raised: an event loop only logs it."""
        self.set_exception_handler(lambda _, said: self.errors.append(f"{said['message']}: {said.get('exception')!r}"))

    def time(self) -> float:
        return self._jump.now_s

    def between(self, call: Callable[[], None] | None) -> None:
        """Call this between any two callbacks, from now on."""
        self._ready.before = call or (lambda: None)

    def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> Any:
        done = self.create_future()
        try:
            done.set_result(func(*args))
        except Exception as e:  # it is for whoever waits, as from a thread
            done.set_exception(e)
        return done
