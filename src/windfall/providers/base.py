"""The Provider interface: where workers come from.

    provider ── spawn(name, lease) ──▶ Handle: pid, kill(), terminate(grace_s), wait()

- A worker name is used once: `n3.2` is the second worker of node `n3`. A restarted worker is a new worker. Slurm and
  SkyPilot restart jobs by themselves; the worker then appends the number of the restart, or the time: `slurm3.2-r1`.
  Kubernetes restarts a worker under its old name; the controller tells the two apart (`NAME#2`).
- Canceling `run()` ends every worker that the provider started and waits for it. Canceling a `spawn` leaves no process.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Protocol

from windfall.processes.process import Handle
from windfall.types import Lease

Spawn = Callable[[str, Lease], Awaitable[Handle]]
"""Starts a worker. An OSError may be temporary, so the start is retried. A WindfallError needs a person to fix it."""


class OnEvent(Protocol):
    """Called with an event: `started`, `restarted`, `exited`, `refused`, `spawn_failed` or `stuck`, and its fields."""

    def __call__(self, name: str, /, **fields: Any) -> None: ...


def ignore_event(name: str, /, **fields: Any) -> None:
    """An OnEvent that does nothing."""


class Provider(Protocol):
    """A source of workers."""

    name: str
    started: int
    """Number of worker processes started so far."""
    lost: int
    """Number of started workers that ended without a request: they died, or were killed without notice."""

    async def run(self) -> None:
        """Run until canceled; then end every worker that was started, and wait for it."""
        ...

    def target(self, n: int) -> None:
        """Set the number of workers to run. A provider that cannot choose the number ignores it."""
        ...

    def owns(self, worker: str) -> bool:
        """Whether a worker with this name was started by this provider."""
        ...
