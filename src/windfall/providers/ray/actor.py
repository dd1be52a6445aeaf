"""The Ray actor of one worker. It runs on a node of the cluster and starts the worker as a child process.

- The worker is a process of its own, not a part of the actor: it can be drained by SIGTERM, its memory is its own,
  and it exits as it does everywhere else.
- The worker dies with the actor's process (parent_death.py), so nothing is left when Ray kills the actor, when
  the node's daemon dies, or when the run ends.
- Ray sets CUDA_VISIBLE_DEVICES for the actor, and the worker inherits it. The worker's output goes to the actor's log.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence

from windfall.processes import process
from windfall.processes.process import Handle


class WorkerActor:
    """All methods are coroutines, so that a signal can be sent while `wait` is running."""

    def __init__(self) -> None:
        self._handle: Handle | None = None

    async def start(self, name: str, arguments: Sequence[str], env: Mapping[str, str]) -> int:
        """Start a worker with these arguments of Python; returns its process id."""
        argv = [sys.executable, *arguments]
        self._handle = process.start(name=name, argv=argv, env={**os.environ, **env}, log=1)
        return self._handle.pid

    async def wait(self) -> int:
        assert self._handle is not None
        return await self._handle.wait()

    async def signal(self, number: int) -> None:
        if self._handle is not None:
            self._handle.signal(number)
