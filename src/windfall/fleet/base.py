"""What a provider is, and the handle by which it holds a worker process.

    provider ── spawn(name, lease) ──▶ Handle: pid, kill(), terminate(grace_s), wait()

- A worker's name is used once: `n3.2` is the second worker of node `n3`. One that comes back is a new worker.
- A handle signals its own process and process group only, and nothing at all once the process has ended.
- Cancelling `run()` ends every worker the provider started and waits for it; cancelling a `spawn` leaves no process.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Awaitable, Callable
from typing import Any, Protocol

from windfall.types import Lease

REFUSED = 3
"""The exit status of a worker that must not be started again: it was refused, and would be once more."""
KILL_TIMEOUT_S = 10.0


class Handle:
    """A running worker process. Whoever started it also says how it is signalled, and calls `ended` once."""

    def __init__(self, *, name: str, pid: int, send: Callable[[int], None]) -> None:
        self.name, self.pid, self._send = name, pid, send
        self._end: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    def ended(self, code: int) -> None:
        """`code` is the exit status, or the negative number of the signal that ended it."""
        if not self._end.done():
            self._end.set_result(code)

    @property
    def running(self) -> bool:
        return not self._end.done()

    def kill(self) -> None:
        """SIGKILL to the whole process group, now."""
        if self.running:
            self._send(signal.SIGKILL)

    async def terminate(self, grace_s: float) -> int:
        """SIGTERM to the worker, so that it can leave in order; SIGKILL to its group when that takes too long."""
        try:
            if self.running and grace_s > 0:
                self._send(signal.SIGTERM)
                await asyncio.wait({self._end}, timeout=grace_s)
        finally:
            self.kill()
        done, _ = await asyncio.wait({self._end}, timeout=KILL_TIMEOUT_S)
        if not done:
            raise TimeoutError(f"waited {KILL_TIMEOUT_S:g} s for worker {self.name} (pid {self.pid}) to end by SIGKILL")
        return self._end.result()

    async def wait(self) -> int:
        """Until it ends, however long that is: the exit status, or the negative number of the signal."""
        return await asyncio.shield(self._end)


Spawn = Callable[[str, Lease], Awaitable[Handle]]
"""Starts a worker. OSError: it may work later, and is tried again. WindfallError: a person has to put it right."""


class OnEvent(Protocol):
    """Told what happened: `started`, `restarted`, `exited`, `refused`, `spawn_failed` or `stuck`, and its fields."""

    def __call__(self, name: str, /, **fields: Any) -> None: ...


def unheard(name: str, /, **fields: Any) -> None:
    """The OnEvent of whoever does not listen."""


class Provider(Protocol):
    """Where workers come from."""

    name: str

    @property
    def started(self) -> int:
        """Worker processes started so far."""
        ...

    @property
    def lost(self) -> int:
        """Of these, the ones that ended without being asked to: they died, or were killed without notice."""
        ...

    async def run(self) -> None:
        """Until cancelled; then it ends everything it started, and waits for it."""
        ...

    def target(self, n: int) -> None:
        """How many workers are wanted. A provider that cannot choose takes no notice."""
        ...
