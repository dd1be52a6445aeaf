"""Whose code is running in a child process, and since when: a few bytes of memory shared with the parent.

The parent reads them however busy the child is, also while C code holds the interpreter's lock.
"""

from __future__ import annotations

import asyncio
import mmap
import struct
import time
from collections.abc import Callable, Coroutine, Generator
from pathlib import Path
from typing import Any

from windfall.envs.failures import awaiting

LAYOUT = struct.Struct("<Qd")
"""The number of the call whose code is running (0: none), and when that began (CLOCK_MONOTONIC, seconds)."""
SHORT_S = 0.005
"""Steps shorter than this are not looked into."""


class Board:
    """The child's side."""

    def __init__(self, memory: mmap.mmap) -> None:
        self._memory = memory
        self._delay_s = run_delay_s()

    @property
    def number(self) -> int:
        return LAYOUT.unpack_from(self._memory)[0]

    def write(self, number: int) -> float:
        now = time.monotonic()
        LAYOUT.pack_into(self._memory, 0, number, now)
        return now

    def slept_s(self, took_s: float, cpu_s: float) -> float:
        """Of a step of this length, how long this process neither ran nor waited for a core."""
        before, self._delay_s = self._delay_s, run_delay_s()
        return max(0.0, took_s - cpu_s - (self._delay_s - before))


class Stepped(Coroutine[Any, Any, None]):
    """A call's coroutine, which says on the board when it is running. Its limit counts from its first step."""

    inner: Coroutine[Any, Any, None]
    task: asyncio.Task[None]

    def __init__(self, number: int, limit_s: float, board: Board, tell: Callable[..., None]) -> None:
        """`tell` gets `number, "waits"` when the call lets others run, and `number, "late", stack` when it is cancelled
        at its limit."""
        self.number, self.limit_s, self.late, self.answered = number, limit_s, False, False
        self._board, self._tell, self._first = board, tell, True
        self._began_s = self._cpu_s = self._took_s = self._slept_s = 0.0
        self._timer: asyncio.TimerHandle | None = None

    def send(self, value: Any) -> Any:
        return self._run(self.inner.send, value)

    def throw(self, *error: Any) -> Any:
        return self._run(self.inner.throw, *error)

    def close(self) -> None:
        self.inner.close()

    def __await__(self) -> Generator[Any, Any, None]:
        raise AssertionError("run as a task")

    def _run(self, go: Any, *args: Any) -> Any:
        self._began_s, self._cpu_s = self._board.write(self.number), time.thread_time()
        try:
            result = go(*args)
        except BaseException:  # the coroutine is over, by StopIteration or otherwise: the task handles it
            self._board.write(0)
            if self._timer is not None:
                self._timer.cancel()
            raise
        self._took_s, self._slept_s = self.used()
        self._board.write(0)
        if self._first:
            self._first = False
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(max(0.0, self.limit_s - self._took_s), self._overdue)
            self._tell(self.number, "waits")
        return result

    def _overdue(self) -> None:
        self.late = True
        self._tell(self.number, "late", awaiting(self.inner))
        self.task.cancel()

    def used(self) -> tuple[float, float]:
        """Seconds in which the call held up others, up to now; and of these, in which the process slept."""
        took_s = time.monotonic() - self._began_s
        slept_s = self._board.slept_s(took_s, time.thread_time() - self._cpu_s) if took_s > SHORT_S else 0.0
        return self._took_s + took_s, self._slept_s + slept_s


def run_delay_s() -> float:
    """How long this process has waited for a core so far; 0 where the system does not say."""
    try:
        return int(Path("/proc/self/schedstat").read_text().split()[1]) / 1e9
    except (OSError, ValueError, IndexError):
        return 0.0
