"""Which call is running in a child process, and since when: a few bytes of memory shared with the parent.

The parent can read them no matter how busy the child is, even while C code holds the interpreter's lock.
"""

from __future__ import annotations

import asyncio
import mmap
import struct
import time
from collections.abc import Callable, Coroutine, Generator
from pathlib import Path
from typing import Any

from windfall.envs.failures import coroutine_stack

LAYOUT = struct.Struct("<Qd")
"""The number of the running call (0: none), and when it began to run (CLOCK_MONOTONIC, seconds)."""
LINK_LOST = 114
"""Exit status of a child whose link to its parent was closed or replaced by the environment."""
SHORT_S = 0.005
"""Sleep time is not measured in steps shorter than this (seconds)."""


class RunningCall:
    """The child's side: writes the record."""

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
        """Seconds of a step of `took_s` during which this process neither ran nor waited for a core."""
        before, self._delay_s = self._delay_s, run_delay_s()
        return max(0.0, took_s - cpu_s - (self._delay_s - before))


class TrackedCoroutine(Coroutine[Any, Any, None]):
    """The coroutine of a call. It records when it is running. Its time limit counts from its first step."""

    inner: Coroutine[Any, Any, None]
    task: asyncio.Task[None]

    def __init__(
        self,
        number: int,
        limit_s: float,
        running_call: RunningCall,
        send: Callable[..., None],
        check: Callable[[], None],
    ) -> None:
        """`send` gets `number, "waits"` when the call lets others run, `number, "late", stack` when it is overdue.
        `check` is called after each step, while the record still names this call."""
        self.number = number
        self.limit_s = limit_s
        self.late = False
        self.answered = False
        self._running_call = running_call
        self._send_message = send
        self._first = True
        self._check = check
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

    def _run(self, step: Any, *args: Any) -> Any:
        self._began_s = self._running_call.write(self.number)
        self._cpu_s = time.thread_time()
        try:
            result = step(*args)
        except BaseException:  # the coroutine has ended, by StopIteration or an error: the task handles it
            self._running_call.write(0)
            if self._timer is not None:
                self._timer.cancel()
            raise
        self._check()
        self._took_s, self._slept_s = self.used()
        self._running_call.write(0)
        if self._first:
            self._first = False
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(max(0.0, self.limit_s - self._took_s), self._overdue)
            self._send_message(self.number, "waits")
        return result

    def _overdue(self) -> None:
        self.late = True
        self._send_message(self.number, "late", coroutine_stack(self.inner))
        self.task.cancel()

    def used(self) -> tuple[float, float]:
        """Seconds for which the call has blocked other calls so far, and how many of these the process slept."""
        took_s = time.monotonic() - self._began_s
        slept_s = self._running_call.slept_s(took_s, time.thread_time() - self._cpu_s) if took_s > SHORT_S else 0.0
        return self._took_s + took_s, self._slept_s + slept_s


def run_delay_s() -> float:
    """Seconds for which this process has waited for a core so far, or 0 if the system does not report it."""
    try:
        return int(Path("/proc/self/schedstat").read_text().split()[1]) / 1e9
    except (OSError, ValueError, IndexError):
        return 0.0
