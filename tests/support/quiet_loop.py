"""An event loop whose clock hardly runs while there is something to do, for tests of servers and their clients.

All parts of such a test share the loop. If the process gets no CPU time for a second, that second does not exist by the
loop's clock, and no time limit passes because of it. A round of the loop with something to do takes ROUND_S. When no
socket has had anything to read or write for QUIET_S, the clock jumps to the next timer, so waiting costs little time.

Threads of the loop's executor are waited for in real time. Other threads and processes must not take part.

The simulator's loop (sim/core/loop.py) cannot replace this one: it has no sockets, and jumps to the next timer when no
callback is due. Bytes on their way through the kernel are in no callback yet, so a jump would pass time limits.
"""

from __future__ import annotations

import asyncio
import selectors
import time
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")
ROUND_S = 0.0005
QUIET_S = 0.02
"""Longer than the kernel needs to pass bytes from one socket of this process to another."""


class _Clock(selectors.EpollSelector):
    now_s = 0.0
    threads = 0
    """Calls of the executor that have not returned."""

    def select(self, timeout: float | None = None) -> Any:
        if self.threads and timeout != 0:
            began_s = time.monotonic()
            ready = super().select(timeout)
            waited_s = time.monotonic() - began_s
            self.now_s += waited_s if timeout is None else min(waited_s, timeout)
            return ready
        ready = super().select(timeout if timeout is None else min(timeout, QUIET_S))
        self.now_s += timeout if timeout and not ready else ROUND_S
        return ready


class QuietLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._clock = _Clock()
        super().__init__(self._clock)

    def time(self) -> float:
        return self._clock.now_s

    def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> Any:
        self._clock.threads += 1
        called = super().run_in_executor(executor, func, *args)
        called.add_done_callback(self._returned)
        return called

    def _returned(self, _: object) -> None:
        self._clock.threads -= 1


def run(main: Coroutine[Any, Any, T]) -> T:
    """Like asyncio.run."""
    with asyncio.Runner(loop_factory=QuietLoop) as runner:
        return runner.run(main)


def now_s() -> float:
    return asyncio.get_running_loop().time()
