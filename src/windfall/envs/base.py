"""The Env seam: a task in, a reward out; and the Host seam: where an environment runs.

An environment keeps no state between calls: `task(i)` is always the same task, and `feedback` sees the whole episode so
far. So a run resumes from a number, an episode can move to another process, and a call that failed can be tried again.

An environment is anybody's code. It may block, raise, print, leave the process or return garbage, so the rest of
windfall never calls it directly: it asks a Host. `pool.EnvPool` keeps environments in child processes that can be
killed; `in_process.InProcess` calls them here, for simulations, tests and the two that take microseconds.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Sequence
from typing import Protocol, Self, runtime_checkable

from windfall.types import Feedback, Task, Turn

HELD_OUT = 1 << 40
"""Task numbers from here on are for evaluation only."""


@runtime_checkable
class Env(Protocol):
    """Both methods may be plain functions or `async def`."""

    def task(self, index: int) -> Task | Awaitable[Task]:
        """Task number `index` (0, 1, 2, ... without end): the same number gives the same task, in any process."""
        ...

    def feedback(self, task: Task, turns: Sequence[Turn]) -> Feedback | Awaitable[Feedback]:
        """Judge the episode: a reward ends it; an observation asks for one more turn.

        An observation may come with a reward, which counts only if the response has no tokens left for another turn.
        The call may be slow, and may raise: it is then tried again, and at last counted as missing, never as zero.
        """
        ...


class EnvHost(Protocol):
    """Used as `async with`."""

    name: str
    """How messages name the environment."""

    async def __aenter__(self) -> Self: ...
    async def __aexit__(self, *_: object) -> None: ...

    async def ready(self) -> None:
        """Until the environment is built. Raises WindfallError where it cannot be."""
        ...

    def task(self, index: int, timeout_s: float) -> asyncio.Future[Task]:
        """The future fails with EnvFailed where the environment does."""
        ...

    async def feedback(self, index: int, task: Task, turns: Sequence[Turn], timeout_s: float) -> Feedback:
        """Raises EnvFailed. The time limit counts from the start of the call, not from the start of the wait."""
        ...
