"""The process that stands for one worker on a Ray cluster: `python -m windfall.providers.ray.driver`.

It is a process of its own because Ray ends a driver whose cluster is gone, and brings threads and signal handlers. The
supervisor must survive that.

    in     one line of JSON: how to connect, the options of the actor, the command of the worker and its secrets
    out    one line of JSON when the worker runs ({"pid"}) or cannot be started ({"error", "temporary"})
    exit   with the status of the worker

- A worker that waits for free resources waits without limit: Ray's autoscaler sees it as demand.
- The worker is a process of its own on the node, not a part of the actor: it can be drained by SIGTERM, its memory is
  its own, and it exits as it does everywhere else. It dies with the actor's process (parent_death.py). Ray sets
  CUDA_VISIBLE_DEVICES for the actor, and the worker inherits it. Its output goes to the actor's log.
- SIGTERM, which is also sent when the supervisor dies, goes on to the worker, which has `drain_s` to leave. Then the
  actor is killed. If this process is killed, Ray ends the actor when it notices, within about a minute.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import json
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from windfall.processes import process
from windfall.processes.process import Handle

CONNECT_S = 90.0
"""Seconds until the driver must be connected to the cluster."""
SHUTDOWN_S = 10.0
"""Seconds for disconnecting from Ray."""


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


async def main(request: dict[str, Any], answers: int) -> int:
    """Run one worker. Returns its exit status."""
    ray: Any = importlib.import_module("ray")  # an extra
    asked = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, asked.set)
    leaving = asyncio.create_task(asked.wait())

    def answer(**fields: Any) -> None:
        with contextlib.suppress(BrokenPipeError):  # the supervisor is gone, and SIGTERM comes
            os.write(answers, json.dumps(fields).encode() + b"\n")

    try:
        async with asyncio.timeout(request["connect_s"]):
            # On a thread, because it blocks; Ray then leaves the signal handlers alone as well.
            await asyncio.to_thread(ray.init, request["address"], namespace="windfall", log_to_driver=False)
    except (ConnectionError, OSError, RuntimeError, ValueError) as e:
        why = str(e) or f"no answer within {request['connect_s']:g} s"
        answer(error=f"cannot connect to the Ray cluster at {request['address']}: {why}", temporary=True)
        return 1
    try:
        actor = ray.remote(WorkerActor).options(max_restarts=0, max_concurrency=8, **request["actor"]).remote()
        starting = asyncio.ensure_future(actor.start.remote(*request["start"]))
        await asyncio.wait({starting, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not starting.done():
            return 1
        answer(pid=await starting)
    except (ray.exceptions.RayError, ValueError, TypeError, OSError) as e:
        temporary = isinstance(e, ray.exceptions.RayError | OSError)
        answer(error=f"{type(e).__name__}: {str(e).strip().partition(chr(10))[0]}", temporary=temporary)
        return 1
    ending = asyncio.ensure_future(actor.wait.remote())
    await asyncio.wait({ending, leaving}, return_when=asyncio.FIRST_COMPLETED)
    if not ending.done():
        drain = asyncio.ensure_future(actor.signal.remote(int(signal.SIGTERM)))
        await asyncio.wait({ending}, timeout=request["drain_s"])
        drain.cancel()
    try:
        code = ending.result() if ending.done() else -signal.SIGKILL
    except ray.exceptions.RayError:  # the actor died, or its node
        code = -signal.SIGKILL
    with contextlib.suppress(ray.exceptions.RayError):
        ray.kill(actor)
    return code if code >= 0 else 128 - code


async def _close() -> None:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(SHUTDOWN_S):
            await asyncio.to_thread(importlib.import_module("ray").shutdown)


async def _run() -> None:
    answers = os.dup(1)
    request = json.loads(sys.stdin.readline())
    os.dup2(2, 1)  # what Ray prints goes to the log, not between the answers
    code = await main(request, answers)
    await _close()
    sys.stderr.flush()
    os._exit(code)  # not by return: asyncio would wait for a thread that Ray still blocks


if __name__ == "__main__":
    asyncio.run(_run())
