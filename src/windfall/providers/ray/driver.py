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
from collections.abc import Iterator, Mapping, Sequence
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


def when_signaled(*numbers: int) -> asyncio.Task[Any]:
    """A task that is done as soon as one of these signals has come. To be called after `connect`, because Ray sets
    handlers of its own, with which the process would abort at its end."""
    asked, loop = asyncio.Event(), asyncio.get_running_loop()
    for number in numbers:
        loop.add_signal_handler(number, asked.set)
    return asyncio.create_task(asked.wait())


async def connect(address: str, within_s: float, *, show_logs: bool) -> Any:
    """Ray, connected to this cluster. `show_logs`: print what actors print. Raises OSError."""
    ray: Any = importlib.import_module("ray")  # an extra
    try:
        async with asyncio.timeout(within_s):
            # On a thread, because it blocks; Ray then leaves the signal handlers alone as well.
            await asyncio.to_thread(ray.init, address, namespace="windfall", log_to_driver=show_logs)
    except (OSError, RuntimeError, ValueError) as e:
        cause = str(e) or f"no answer within {within_s:g} s"
        raise OSError(f"cannot connect to the Ray cluster at {address}: {cause}") from e
    return ray


async def disconnect() -> None:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(SHUTDOWN_S):
            await asyncio.to_thread(importlib.import_module("ray").shutdown)


@contextlib.contextmanager
def placed(ray: Any, kind: type[WorkerActor], **options: Any) -> Iterator[Any]:
    """An actor of this kind with these options, which is killed at the end."""
    actor = ray.remote(kind).options(max_restarts=0, max_concurrency=8, **options).remote()
    try:
        yield actor
    finally:
        with contextlib.suppress(ray.exceptions.RayError):
            ray.kill(actor)


async def exit_status(actor: Any, leaving: asyncio.Task[Any], grace_s: float) -> int:
    """The exit status of the process of this actor. When `leaving` is done, the process has `grace_s` to end. Raises
    RayError if the actor or its node is lost."""
    ending = asyncio.ensure_future(actor.wait.remote())
    await asyncio.wait({ending, leaving}, return_when=asyncio.FIRST_COMPLETED)
    if not ending.done():
        drain = asyncio.ensure_future(actor.signal.remote(int(signal.SIGTERM)))
        await asyncio.wait({ending}, timeout=grace_s)
        drain.cancel()
    code = ending.result() if ending.done() else -signal.SIGKILL
    return code if code >= 0 else 128 - code


async def main(request: dict[str, Any], answers: int) -> int:
    """Run one worker. Returns its exit status."""

    def answer(**fields: Any) -> None:
        with contextlib.suppress(BrokenPipeError):  # the supervisor is gone, and SIGTERM comes
            os.write(answers, json.dumps(fields).encode() + b"\n")

    try:
        ray = await connect(request["address"], request["connect_s"], show_logs=False)
    except OSError as e:
        answer(error=str(e), temporary=True)
        return 1
    leaving, lost = when_signaled(signal.SIGTERM), ray.exceptions.RayError
    try:
        with placed(ray, WorkerActor, **request["actor"]) as actor:
            starting = asyncio.ensure_future(actor.start.remote(*request["start"]))
            await asyncio.wait({starting, leaving}, return_when=asyncio.FIRST_COMPLETED)
            if not starting.done():
                return 1
            answer(pid=starting.result())
            with contextlib.suppress(lost):
                return await exit_status(actor, leaving, request["drain_s"])
            return 128 + signal.SIGKILL
    except (lost, ValueError, TypeError, OSError) as e:
        answer(error=why(e), temporary=isinstance(e, lost | OSError))
        return 1


def why(error: Exception) -> str:
    """The kind of an error, and the first line of its text: Ray's errors have many."""
    first, _, _ = str(error).strip().partition("\n")
    return f"{type(error).__name__}: {first}"


async def _run() -> None:
    answers = os.dup(1)
    request = json.loads(sys.stdin.readline())
    os.dup2(2, 1)  # what Ray prints goes to the log, not between the answers
    code = await main(request, answers)
    await disconnect()
    sys.stderr.flush()
    os._exit(code)  # not by return: asyncio would wait for a thread that Ray still blocks


if __name__ == "__main__":
    asyncio.run(_run())
