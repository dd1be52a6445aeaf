"""Nodes, and the worker that is kept running on each while the node is up. What providers are made of.

    up() ──▶ spawn ──▶ running ── died ──▶ back off ──▶ spawn ...          down(grace_s) ──▶ ended, and waited for
                          └── exit status 3 ──▶ refused: nothing more until the next up()

- At most one process per node: an `up` waits for the end of the worker that the last `down` ended.
- A worker that died within 10 s of its start is started again after 0.2 s, then 0.4 s, ... up to 10 s; an older one at
  once. A spawn that fails with OSError counts as such a death. Other errors end the task and are the provider's.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from windfall.fleet.base import REFUSED, Handle, OnEvent, Spawn
from windfall.types import Lease

GRACE_S = 5.0


@dataclass(kw_only=True, slots=True)
class Backoff:
    """How long to wait before the next start.

    >>> b = Backoff()
    >>> [b.after(lived_s=1.0), b.after(lived_s=1.0), b.after(lived_s=60.0), b.after(lived_s=1.0)]
    [0.2, 0.4, 0.0, 0.2]
    """

    first_s: float = 0.2
    most_s: float = 10.0
    young_s: float = 10.0
    deaths: int = 0

    def after(self, *, lived_s: float) -> float:
        """A worker died after `lived_s`."""
        if lived_s >= self.young_s:
            self.deaths = 0
            return 0.0
        self.deaths += 1
        return min(self.most_s, self.first_s * 2.0 ** min(self.deaths - 1, 30))


class Crew:
    """The nodes of a provider, by name. `async with` it: on the way out all workers are ended, and waited for."""

    def __init__(self, spawn: Spawn, *, terms: Lease, on_event: OnEvent, grace_s: float) -> None:
        self.spawn, self.terms, self.on_event, self._grace_s = spawn, terms, on_event, grace_s
        self.started, self.lost = 0, 0
        self._nodes: dict[str, _Node] = {}
        self._up: dict[str, _Stay] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._failed: asyncio.Future[None] | None = None

    @property
    def up(self) -> list[str]:
        """The nodes that are up, with or without a worker on them right now."""
        return list(self._up)

    def bring_up(self, name: str) -> None:
        if name in self._up:
            return
        node = self._nodes.setdefault(name, _Node(name, self))
        stay = self._up[name] = _Stay()
        stay.task = asyncio.create_task(node.keep(stay), name=f"node {name}")
        self._tasks.add(stay.task)
        stay.task.add_done_callback(self._done)

    def take_down(self, name: str, grace_s: float) -> None:
        """With grace its worker may leave in order; with 0 its process group gets SIGKILL, and it counts as lost."""
        stay = self._up.pop(name)
        stay.grace_s, stay.over = grace_s, True
        if stay.task:
            stay.task.cancel()

    async def until(self, event: asyncio.Event, timeout_s: float | None = None) -> None:
        """Until the event, or the timeout; raises what a spawn raised for a person to put right."""
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

    async def __aexit__(
        self, kind: type[BaseException] | None, e: BaseException | None, t: TracebackType | None
    ) -> None:
        for name in self.up:
            self.take_down(name, self._grace_s)
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._failed and self._failed.done():
            self._failed.exception()  # looked at, so that asyncio does not report it as forgotten

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error and self._failed and not self._failed.done():
            self._failed.set_exception(error)


@dataclass(kw_only=True, slots=True)
class _Stay:
    """One time that a node is up."""

    grace_s: float = 0.0
    over: bool = False
    task: asyncio.Task[None] | None = None


class _Node:
    def __init__(self, name: str, crew: Crew) -> None:
        self.name, self.generation = name, 0
        self._crew = crew
        self._one = asyncio.Lock()

    async def keep(self, stay: _Stay) -> None:
        """Until cancelled, or until its worker is refused."""
        async with self._one:
            backoff, pause_s, instead_of = Backoff(), 0.0, ""
            while True:
                self.generation += 1
                name, began = f"{self.name}.{self.generation}", time.monotonic()
                try:
                    handle = await self._crew.spawn(name, self._crew.terms)
                except OSError as e:
                    self._crew.on_event("spawn_failed", worker=name, error=f"{type(e).__name__}: {e}")
                else:
                    self._crew.started += 1
                    more = {"instead_of": instead_of, "after_s": pause_s} if instead_of else {}
                    self._crew.on_event("restarted" if instead_of else "started", worker=name, pid=handle.pid, **more)
                    if await self._attend(handle, began, stay) == REFUSED:
                        self._crew.on_event("refused", worker=name)
                        return
                    instead_of = name
                pause_s = backoff.after(lived_s=time.monotonic() - began)
                await asyncio.sleep(pause_s)

    async def _attend(self, handle: Handle, began: float, stay: _Stay) -> int:
        """Until the worker ends: by itself, or because the node went down."""
        try:
            if stay.over:  # a spawn that uses wait_for may forget that it was cancelled (Python 3.11)
                raise asyncio.CancelledError
            code = await handle.wait()
        except asyncio.CancelledError:
            try:
                code = await handle.terminate(stay.grace_s)
            except TimeoutError as e:
                self._crew.on_event("stuck", worker=handle.name, pid=handle.pid, error=str(e))
            else:
                killed = stay.grace_s == 0
                self._ended(handle, began, code, by="killed" if killed else "stopped", lost=killed)
            raise
        self._ended(handle, began, code, by="itself", lost=code != REFUSED)
        return code

    def _ended(self, handle: Handle, began: float, code: int, *, by: str, lost: bool) -> None:
        self._crew.lost += lost
        lived_s = round(time.monotonic() - began, 3)
        self._crew.on_event("exited", worker=handle.name, pid=handle.pid, code=code, by=by, lost=lost, lived_s=lived_s)
