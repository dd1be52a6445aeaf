"""Providers that restart their workers: while a node is up, one worker is kept running on it.

    bring_up() ──▶ spawn ──▶ running ── died ──▶ back off ──▶ spawn ...    take_down(grace_s) ──▶ ended, and waited for
                                └── exit status 3 ──▶ refused: not restarted until the next bring_up()

- A node has at most one process: `bring_up` waits for the end of the worker that the last `take_down` ended.
- A worker that died within 10 s of its start is restarted after 0.2 s, then 0.4 s, ... up to 10 s; sources with slow
  starts have longer times. An older worker is restarted immediately. The age counts from when the worker began to run:
  time in a queue, or until a machine has booted, is not part of it.
- A spawn that fails with OSError counts as such a death. The provider raises all other errors. A patient provider
  raises a WindfallError only before its first worker has started; later it reports the error and tries again, because
  other systems may refuse for a while.

A SlotProvider keeps the requested number of nodes up:

- Slot k holds the workers `w<k>.1`, `w<k>.2`, ...: one at a time, each started after the previous one has ended.
- A smaller target ends the workers of the highest slots: SIGTERM, then SIGKILL after `grace_s`.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Self

from windfall.backoff import RestartDelay
from windfall.errors import WindfallError
from windfall.processes.process import EXIT_REFUSED, Handle
from windfall.providers.base import OnEvent, Spawn, ignore_event
from windfall.types import Lease

GRACE_S = 5.0
"""Default seconds between SIGTERM and SIGKILL."""
RESERVED = Lease(kind="reserved")


class RestartingNodes:
    """The nodes of a provider, by name. Used as `async with`: the exit ends all workers and waits for them."""

    def __init__(
        self,
        spawn: Spawn,
        *,
        terms: Lease,
        on_event: OnEvent,
        grace_s: float,
        delay: Callable[[], RestartDelay] = RestartDelay,
        patient: bool = False,
    ) -> None:
        """`delay`: makes the back-off of one node. `patient`: see above."""
        self.patient = patient
        self.spawn = spawn
        self.terms = terms
        self.on_event = on_event
        self.grace_s = grace_s
        self.started = 0
        self.lost = 0
        self.delay = delay
        self._nodes: dict[str, _Node] = {}
        self._up: dict[str, _UpPeriod] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._failed: asyncio.Future[None] | None = None

    @property
    def up(self) -> list[str]:
        """Names of the nodes that are up, including those without a worker at the moment."""
        return list(self._up)

    def bring_up(self, name: str) -> None:
        if name in self._up:
            return
        node = self._nodes.setdefault(name, _Node(name, self))
        period = self._up[name] = _UpPeriod()
        period.task = asyncio.create_task(node.keep_running(period), name=f"node {name}")
        self._tasks.add(period.task)
        period.task.add_done_callback(self._task_done)

    def take_down(self, name: str, grace_s: float) -> None:
        """With a grace period the worker can drain. With 0, its process group gets SIGKILL and it counts as lost."""
        period = self._up.pop(name)
        period.grace_s = grace_s
        period.over = True
        if period.task:
            period.task.cancel()

    async def wait_for(self, event: asyncio.Event, timeout_s: float | None = None) -> None:
        """Wait for the event or the timeout. Raises the error of a spawn that a person must fix."""
        assert self._failed, "only inside `async with`"
        waiter = asyncio.create_task(event.wait())
        try:
            await asyncio.wait({waiter, self._failed}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            waiter.cancel()
        if self._failed.done():
            self._failed.result()

    async def __aenter__(self) -> Self:
        self._failed = asyncio.get_running_loop().create_future()
        return self

    async def __aexit__(self, *_: object) -> None:
        for name in self.up:
            self.take_down(name, self.grace_s)
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._failed and self._failed.done():
            self._failed.exception()  # retrieve it, so that asyncio does not report it as never retrieved

    def _task_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error and self._failed and not self._failed.done():
            self._failed.set_exception(error)


@dataclass(kw_only=True, slots=True)
class _UpPeriod:
    """One period during which a node is up."""

    grace_s: float = 0.0
    over: bool = False
    task: asyncio.Task[None] | None = None


class _Node:
    def __init__(self, name: str, nodes: RestartingNodes) -> None:
        self.name = name
        self.generation = 0
        self._nodes = nodes
        self._one_worker = asyncio.Lock()

    async def keep_running(self, period: _UpPeriod) -> None:
        """Restart the worker until canceled, or until the controller refuses it."""
        async with self._one_worker:
            delay, pause_s, instead_of = self._nodes.delay(), 0.0, ""
            while True:
                self.generation += 1
                name, lived_s = f"{self.name}.{self.generation}", 0.0
                try:
                    handle = await self._nodes.spawn(name, self._nodes.terms)
                except (OSError, WindfallError) as e:
                    if isinstance(e, WindfallError) and not (self._nodes.patient and self._nodes.started):
                        raise
                    self._nodes.on_event("spawn_failed", worker=name, error=f"{type(e).__name__}: {e}")
                else:
                    self._nodes.started += 1
                    more = {"instead_of": instead_of, "after_s": pause_s} if instead_of else {}
                    self._nodes.on_event("restarted" if instead_of else "started", worker=name, pid=handle.pid, **more)
                    if await self._wait_for_end(handle, period) == EXIT_REFUSED:
                        self._nodes.on_event("refused", worker=name)
                        return
                    instead_of, lived_s = name, handle.lived_s
                pause_s = delay.after_death(lived_s=lived_s)
                await asyncio.sleep(pause_s)

    async def _wait_for_end(self, handle: Handle, period: _UpPeriod) -> int:
        """Wait until the worker ends, either by itself or because the node went down."""
        try:
            if period.over:  # spawns come from elsewhere, too, and one with asyncio.wait_for can lose its cancellation
                raise asyncio.CancelledError
            code = await handle.wait()
        except asyncio.CancelledError:
            try:
                code = await handle.terminate(period.grace_s)
            except TimeoutError as e:
                self._nodes.on_event("stuck", worker=handle.name, pid=handle.pid, error=str(e))
            else:
                killed = period.grace_s == 0
                self._record_end(handle, code, by="killed" if killed else "stopped", lost=killed)
            raise
        self._record_end(handle, code, by="itself", lost=code != EXIT_REFUSED)
        return code

    def _record_end(self, handle: Handle, code: int, *, by: str, lost: bool) -> None:
        self._nodes.lost += lost
        lived_s = round(handle.lived_s, 3)
        self._nodes.on_event("exited", worker=handle.name, pid=handle.pid, code=code, by=by, lost=lost, lived_s=lived_s)


class SlotProvider(RestartingNodes):
    """Workers on this machine. Base class of providers of workers elsewhere."""

    name = "local"

    def __init__(
        self,
        spawn: Spawn,
        count: int,
        *,
        terms: Lease = RESERVED,
        on_event: OnEvent = ignore_event,
        grace_s: float = GRACE_S,
        prefix: str = "w",
        delay: Callable[[], RestartDelay] = RestartDelay,
        patient: bool = False,
    ) -> None:
        super().__init__(spawn, terms=terms, on_event=on_event, grace_s=grace_s, delay=delay, patient=patient)
        self.prefix = prefix
        self._changed = asyncio.Event()
        self.target(count)

    def target(self, n: int) -> None:
        if n < 0:
            raise WindfallError(f"{n} workers were requested", where="fleet", fix="Request 0 or more.")
        self._count = n
        self._changed.set()

    def owns(self, worker: str) -> bool:
        return re.fullmatch(rf"{re.escape(self.prefix)}\d+\.\d+(-r\d+)?", worker) is not None

    async def run(self) -> None:
        async with self:
            while True:
                self._changed.clear()
                wanted = [f"{self.prefix}{k + 1}" for k in range(self._count)]
                for name in self.up:
                    if name not in wanted:
                        self.take_down(name, self.grace_s)
                for name in wanted:
                    self.bring_up(name)
                await self.wait_for(self._changed)


def slot_of(worker: str) -> int:
    """The number of the slot of a worker.

    >>> slot_of("slurm12.3")
    12
    """
    found = re.search(r"(\d+)\.\d+$", worker)
    assert found, worker
    return int(found[1])
