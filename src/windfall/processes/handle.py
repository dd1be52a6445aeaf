"""The handle of a process: its end, and signals to its own process and process group, none after it has ended."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Callable

EXIT_REFUSED = 3
"""Exit status of a worker that the controller refused. It must not be restarted, because it would be refused again."""
EXIT_NO_CONTROLLER = 5
"""Exit status of a worker that found no controller within its patience."""
KILL_TIMEOUT_S = 10.0
"""Seconds to wait for a process to end after SIGKILL."""


class Handle:
    """A running worker process. The code that started the process provides `send`, and calls `ended` once."""

    def __init__(
        self, *, name: str, pid: int, send: Callable[[int], None], kill_timeout_s: float = KILL_TIMEOUT_S,
        waiting: bool = False,
    ) -> None:  # fmt: skip
        """`send` sends a signal, given by its number, to the process. `pid`: the process id on the worker's machine, or
        the number of its job. `kill_timeout_s`: seconds to wait for its end after SIGKILL. `waiting`: it does not run
        yet; `runs` will say when it does."""
        self.name, self.pid, self._send, self._kill_timeout_s = name, pid, send, kill_timeout_s
        self._ran_from: float | None = None if waiting else time.monotonic()
        self._end: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    def runs(self) -> None:
        """Record that the process runs, if it was waiting until now."""
        if self._ran_from is None:
            self._ran_from = time.monotonic()

    @property
    def lived_s(self) -> float:
        """Seconds that the process has run, without the time that it waited for a machine."""
        return 0.0 if self._ran_from is None else time.monotonic() - self._ran_from

    def ended(self, code: int) -> None:
        """Record the end of the process. `code` is its exit status, or the negative number of the fatal signal."""
        if not self._end.done():
            self._end.set_result(code)

    @property
    def running(self) -> bool:
        return not self._end.done()

    def when_ended(self, call: Callable[[], None]) -> None:
        """Call this function soon after the process has ended, or soon if it has ended already."""
        self._end.add_done_callback(lambda _: call())

    def signal(self, number: int) -> None:
        """Send a signal to the worker, unless it has ended."""
        if self.running:
            self._send(number)

    def kill(self) -> None:
        """Send SIGKILL to the whole process group, immediately."""
        if self.running:
            self._send(signal.SIGKILL)

    async def terminate(self, grace_s: float) -> int:
        """Send SIGTERM to the worker so that it can drain, then SIGKILL to its group after `grace_s` seconds."""
        try:
            if self.running and grace_s > 0:
                self._send(signal.SIGTERM)
                await asyncio.wait({self._end}, timeout=grace_s)
        finally:
            self.kill()
        done, _ = await asyncio.wait({self._end}, timeout=self._kill_timeout_s)
        if not done:
            limit = f"{self._kill_timeout_s:g} s"
            raise TimeoutError(f"waited {limit} for worker {self.name} (pid {self.pid}) to end by SIGKILL")
        return self._end.result()

    async def wait(self) -> int:
        """Wait without a time limit for the end. Returns the exit status, or the negative number of the signal."""
        return await asyncio.shield(self._end)
