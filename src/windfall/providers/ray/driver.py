"""The process that talks to Ray for the supervisor: `python -m windfall.providers.ray.driver`.

It is a process of its own because Ray ends a driver whose cluster is gone, and brings threads and signal handlers. The
supervisor must survive that. RayClient in provider.py is the supervisor's side of the connection.

    in    one line of JSON per request: {"connect": {...}} once; {"spawn", "arguments", "env", "options"} starts a
          worker; {"signal", "worker"} sends a signal; {"forget"} gives up a worker that is not started yet
    out   {"connected"} or {"failed"} once; {"worker", "pid"} when a worker runs; {"worker", "error", "temporary"} when
          it cannot be started; {"worker", "exit"} when it has ended

- A worker that waits for free resources waits without limit: Ray's autoscaler sees it as demand.
- When the input closes, the process kills all actors, tells Ray that its job is over, and exits. If it is killed, Ray
  ends the actors when it notices, within about a minute.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import json
import os
import signal
import sys
from typing import Any

from windfall.providers.ray.actor import WorkerActor

KILL_S = 5.0
"""Seconds that an actor has to pass on SIGKILL before the actor itself is killed."""
SHUTDOWN_S = 10.0
"""Seconds for disconnecting from Ray."""
PROTOCOL_LIMIT = 16 * 1024 * 1024
"""Largest line in bytes."""


class Driver:
    def __init__(self, answers: int) -> None:
        self._answers = answers
        self._actors: dict[str, Any] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._background: set[asyncio.Task[None]] = set()

    def answer(self, **fields: Any) -> None:
        with contextlib.suppress(BrokenPipeError):  # the supervisor is gone, and the input will close
            os.write(self._answers, json.dumps(fields).encode() + b"\n")

    async def serve(self, requests: asyncio.StreamReader) -> None:
        while line := await requests.readline():
            request = json.loads(line)
            if "connect" in request:
                await self._connect(request["connect"])
            elif "spawn" in request:
                self._tasks[request["spawn"]] = asyncio.create_task(self._run_worker(request["spawn"], request))
            elif "forget" in request:
                if task := self._tasks.get(request["forget"]):
                    task.cancel()
            elif "signal" in request:
                self._start(self._signal(request["worker"], request["signal"]))

    async def close(self) -> None:
        """Kill all actors and disconnect."""
        for actor in list(self._actors.values()):
            _ray().kill(actor)
        await asyncio.to_thread(_ray().shutdown)

    def _start(self, work: Any) -> None:
        task = asyncio.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    async def _connect(self, options: dict[str, Any]) -> None:
        try:
            ray = _ray()
            # On a thread, because it blocks; Ray then leaves the signal handlers alone as well.
            await asyncio.to_thread(ray.init, log_to_driver=False, **options)
        except (ConnectionError, OSError, RuntimeError, ValueError, TimeoutError) as e:
            self.answer(failed=f"{type(e).__name__}: {e}")
        else:
            self.answer(connected=ray.get_runtime_context().get_node_id())

    async def _run_worker(self, name: str, request: dict[str, Any]) -> None:
        ray, RayError = _ray(), _ray().exceptions.RayError
        actor = None
        try:
            actor = ray.remote(WorkerActor).options(max_restarts=0, max_concurrency=8, **request["options"]).remote()
            self._actors[name] = actor
            pid = await actor.start.remote(name, request["arguments"], request["env"])
            self.answer(worker=name, pid=pid)
        except (RayError, ValueError, TypeError, OSError) as e:
            temporary = isinstance(e, RayError | OSError)
            self.answer(worker=name, error=f"{type(e).__name__}: {_first_line(e)}", temporary=temporary)
        else:
            try:
                code = await actor.wait.remote()
            except RayError:  # the actor died, or its node
                code = -signal.SIGKILL
            self.answer(worker=name, exit=code)
        finally:
            self._tasks.pop(name, None)
            self._actors.pop(name, None)
            if actor is not None:
                ray.kill(actor)

    async def _signal(self, name: str, number: int) -> None:
        ray, RayError = _ray(), _ray().exceptions.RayError
        if (actor := self._actors.get(name)) is None:
            return
        try:
            await asyncio.wait_for(actor.signal.remote(number), KILL_S)
            if number == signal.SIGKILL:
                await asyncio.sleep(KILL_S)
        except (RayError, TimeoutError):
            pass
        if number == signal.SIGKILL and name in self._actors:
            ray.kill(actor)


def _ray() -> Any:
    """Ray, which is an extra."""
    return importlib.import_module("ray")


def _first_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else "no message"


async def _main() -> None:
    requests, answers = os.dup(0), os.dup(1)
    os.dup2(2, 1)  # what Ray prints goes to the log, not between the answers
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    reader = asyncio.StreamReader(limit=PROTOCOL_LIMIT)
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(requests, "rb"))
    # Sent when the supervisor dies. The input closes as well, and then there is still something to do.
    loop.add_signal_handler(signal.SIGTERM, lambda: None)
    driver = Driver(answers)
    await driver.serve(reader)
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(driver.close(), SHUTDOWN_S)
    sys.stderr.flush()
    os._exit(0)  # not by return: asyncio would wait for a thread that Ray still blocks


if __name__ == "__main__":
    asyncio.run(_main())
