"""An event loop in virtual time. A test can inspect and disturb it between any two callbacks.

Waiting takes no time, work for a thread is done at once, and nothing depends on the clock or on chance: the same
coroutines run the same callbacks every time.
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
            raise RuntimeError("deadlock: every task waits and nothing is scheduled")
        self.now_s += max(timeout, 0.0)
        return super().select(0)


class _Ready(deque[Any]):
    """Callbacks that are due. `before` is called before each of them is taken."""

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
        """Exceptions of callbacks and of tasks that are never awaited: an event loop only logs them."""
        self.set_exception_handler(self._record)

    def _record(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        who = context.get("task") or context.get("future") or context.get("handle")
        self.errors.append(f"{context['message']}: {context.get('exception')!r} {who!r}")

    def time(self) -> float:
        return self._jump.now_s

    def between(self, call: Callable[[], None] | None) -> None:
        """From now on, call this between any two callbacks."""
        self._ready.before = call or (lambda: None)

    def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> Any:
        done = self.create_future()
        try:
            done.set_result(func(*args))
        except Exception as e:  # raised where the result is awaited, as from a thread
            done.set_exception(e)
        return done
