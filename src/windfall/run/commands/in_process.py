"""A worker in the process of the controller: the usual WorkerLink and engine thread, over a link in memory."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable

from windfall.controller.rollout.dispatch import Dispatch
from windfall.engine.base import Engine
from windfall.engine.engine_thread import EngineThread
from windfall.link import messages as m
from windfall.link.base import LinkClosed
from windfall.link.memory import pair
from windfall.types import Lease
from windfall.weights.pulling.pull import PulledWeights
from windfall.worker.worker_link import Pull, WorkerLink


def weights_already_loaded(load: m.Load, stop: object) -> PulledWeights:
    """A Pull for an engine that already has the weights, because it shares the module that is trained."""
    del stop
    return PulledWeights(digest=load.digest)


@contextlib.asynccontextmanager
async def in_process_worker(
    dispatch: Dispatch, engine: Engine, slots: int, *, name: str = "local", base: str = "",
    pull: Pull = weights_already_loaded, heartbeat_s: float = 0.5,
    on_failure: Callable[[BaseException | None], None] = lambda error: None,
) -> AsyncIterator[WorkerLink]:  # fmt: skip
    """While this context is open, `engine` generates for `dispatch`. `base`: what it is built for."""
    ours, theirs = pair("controller", name)
    loop, host = asyncio.get_running_loop(), EngineThread(engine, slots)
    host.start(lambda: loop.call_soon_threadsafe(on_failure, host.failed) and None)
    worker = WorkerLink(theirs, host, pull, heartbeat_s=heartbeat_s)
    hello = m.Hello(protocol=m.PROTOCOL, nonce=b"", proof=b"", name=name, lease=Lease(kind="reserved", device="here"))
    tasks = [asyncio.create_task(dispatch.attend(ours, hello, base)), asyncio.create_task(worker.serve())]
    try:
        yield worker
    finally:
        await ours.close("over")
        with contextlib.suppress(LinkClosed):
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.to_thread(host.close)
