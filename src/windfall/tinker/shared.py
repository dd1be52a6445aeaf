"""What all parts of the service use: the store, the calls, the accounts, the trainer, and tasks in the background."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, NoReturn

from windfall.errors import WindfallError
from windfall.tinker import calls as c
from windfall.tinker.accounts.fairness import TrainerTurns
from windfall.tinker.accounts.keys import Keys
from windfall.tinker.calls import Refusal
from windfall.tinker.disk.call_log import CallLog, Entry
from windfall.tinker.disk.store import TinkerStore
from windfall.tinker.models.adapter_slots import Trainers
from windfall.training import AdapterSpec, TrainerFailed, TrainerLost

FAILURES = 3
"""If the trainer fails this often with a call, the call is given up: no other could be performed either."""
LOSSES = 8
"""If the trainer is lost this often during a call for another reason, such as a kill, the call is given up."""


@dataclass(kw_only=True, frozen=True, slots=True)
class ServerTerms:
    """What the server offers."""

    base: str
    """Name under which it serves the base model."""
    tokenizer: str
    """Hub id, or folder on the server's machine, of the tokenizer of the base."""
    context: int
    vocabulary: int
    """Token ids are below it."""
    rank: int
    """Largest rank of an adapter."""
    adapter: Callable[[c.LoraSpec], AdapterSpec]
    """The adapter that a client's spec means for this base. Raises WindfallError."""
    session_timeout_s: float

    def check_base(self, base: str) -> None:
        """Raises Refusal."""
        if base != self.base:
            raise Refusal(400, f"the base model {base!r} is not served here; this server has {self.base!r}")


class Tasks:
    """Tasks in the background. If one fails, that ends the server."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()
        self.failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Its exception is that of the first task that failed."""

    def start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None and not self.failed.done():
            self.failed.set_exception(error)

    def end(self, error: WindfallError) -> NoReturn:
        """End the server, and the task that calls this: what it was about to do is done after the next start. Raises
        the error instead if the server is being stopped."""
        if self.failed.cancelled():
            raise error
        if not self.failed.done():
            self.failed.set_exception(error)
        raise asyncio.CancelledError

    async def stop(self) -> None:
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self.failed.cancel()


@dataclass(kw_only=True, frozen=True, slots=True)
class SharedParts:
    store: TinkerStore
    keys: Keys
    calls: CallLog
    terms: ServerTerms
    trainers: Trainers
    log: Callable[..., None]
    """Logs an event."""
    turns: TrainerTurns = field(default_factory=TrainerTurns)
    tasks: Tasks = field(default_factory=Tasks)

    async def until_done(
        self, entry: Entry, attempt: Callable[[], Awaitable[None]], fail: Callable[[c.FailedCall], Awaitable[None]], *,
        user: bool, over: Callable[[], bool] = lambda: False,
    ) -> None:  # fmt: skip
        """Attempt to perform a call, with one trainer after the other, until it has a result or is `over`. `user`: what
        is wrong with the call is for its user to correct."""
        tries = Counter[type[TrainerLost]]()
        while entry.done is None and not over():
            try:
                await attempt()
            except WindfallError as e:
                if entry.done is None:
                    await fail(c.FailedCall(message=str(e), user=user))
            except TrainerLost as e:
                tries[type(e)] += 1
                most, how = (FAILURES, "failed") if isinstance(e, TrainerFailed) else (LOSSES, "was lost")
                if entry.done is None and tries[type(e)] >= most:
                    await fail(c.FailedCall(message=f"the trainer {how} {most} times with this call: {e}", user=False))
                await self.trainers.lost(e)
