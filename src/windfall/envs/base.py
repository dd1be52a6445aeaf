"""The Env interface: tasks and rewards. The EnvHost interface: where an environment runs.

An environment keeps no state between calls: `task(i)` is always the same task, and `feedback` gets the whole episode so
far. So a run can resume from a task number, an episode can move to another process, and a failed call can be retried.

An environment is foreign code. It may block, raise, print, exit the process or return garbage, so the rest of windfall
calls it only through an EnvHost. `process_pool.pool.EnvPool` runs environments in child processes that can be killed.
`remote.client.EnvServers` has such a pool on every one of several machines.
`in_process.InProcess` calls them in this process: for simulations, tests and the two environments whose calls take
microseconds.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass
from typing import Protocol, Self, runtime_checkable

from windfall.types import Feedback, Task, Turn

HELD_OUT = 1 << 40
"""Task numbers from this one on are used only for evaluation."""


@runtime_checkable
class Env(Protocol):
    """An environment. Both methods may be plain functions or `async def`.

    It may have these attributes, too: `needs_tokens` (False by default): turns must come with their token ids;
    `stateful` (False) and `replayable` (True): as in sessions.Stateful.
    """

    def task(self, index: int) -> Task | Awaitable[Task]:
        """Task number `index` (0, 1, 2, ... without end). The same number gives the same task in every process."""
        ...

    def feedback(self, task: Task, turns: Sequence[Turn]) -> Feedback | Awaitable[Feedback]:
        """Judge the episode: a reward ends it, an observation asks for one more turn, by the role that it names.

        An observation may come with a reward, which counts only if the response has no tokens left for another turn.
        The call may be slow. If it raises, it is retried; if all tries fail, the reward is missing, never zero.
        """
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerLoad:
    address: str
    connected: bool
    calls: int
    answers: int
    errors: int
    lost: int
    answer_s: float
    """Running mean of the seconds from sending a call to its answer."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HostLoad:
    processes: int = 0
    """Child processes; 0 if the environment runs in this process."""
    limit: int = 0
    queued: int = 0
    servers: tuple[ServerLoad, ...] = ()


class EnvHost(Protocol):
    name: str
    needs_tokens: bool
    """Turns must come with their token ids. Known once the environment is ready."""

    async def __aenter__(self) -> Self: ...
    async def __aexit__(self, *_: object) -> None: ...

    def load(self) -> HostLoad: ...

    async def ready(self) -> None:
        """Wait until the environment is built. Raises WindfallError if it cannot be built."""
        ...

    def task(self, index: int, timeout_s: float) -> asyncio.Future[Task]:
        """The future fails with EnvFailed if the environment fails."""
        ...

    async def feedback(self, index: int, task: Task, turns: Sequence[Turn], timeout_s: float) -> Feedback:
        """Raises EnvFailed. The time limit counts from when the call begins to run; time in a queue does not count."""
        ...

    def end_session(self, index: int, task: Task, turns: Sequence[Turn]) -> None:
        """No further turn follows these: close the session that waits for one, if there is one."""
        ...
