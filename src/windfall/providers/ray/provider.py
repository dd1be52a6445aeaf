"""Workers on a Ray cluster: one actor per worker, with GPUs, labels and custom resources as Ray schedules them.

    supervisor ── RayProvider ── RayClient ══ JSON lines ══ driver.py ── Ray ── WorkerActor ── worker process

- A lost node ends its workers. They are restarted with a growing delay (slots.py) wherever Ray finds room.
- If the driver process dies, or Ray ends it because the cluster is gone, its workers count as lost. The next start of a
  worker starts another driver.
- Ray knows nothing of the run. Workers dial the controller as from anywhere.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import json
import os
import signal
import socket
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from windfall.backoff import RestartDelay
from windfall.errors import WindfallError, install_command
from windfall.processes import process
from windfall.processes.process import Handle
from windfall.providers.base import OnEvent, ignore_event
from windfall.providers.ray.section import Ray
from windfall.providers.slots import SlotProvider
from windfall.providers.worker_command import arguments
from windfall.types import Lease

CONNECT_S = 90.0
"""Seconds until the driver must be connected to the cluster."""
CLOSE_S = 15.0
"""Seconds that the driver has to disconnect."""
KILL_TIMEOUT_S = 60.0
"""Seconds until a killed worker must be known to have ended. Ray notices the loss of a node after about 20 s."""


def check_installed() -> None:
    if importlib.util.find_spec("ray") is None:
        fix = f"Install it: {install_command('ray')}"
        raise WindfallError("Ray is not installed", where="fleet.ray", fix=fix)


class RayClient:
    """Starts processes on a Ray cluster. Used as `async with`: the exit ends the driver, and with it all workers."""

    def __init__(self, source: Ray, *, log: Path) -> None:
        """`log`: file for the output of the driver."""
        self._source = source
        self._log = log
        self._link: asyncio.Task[_Link] | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._link is not None:
            self._link.cancel()
            await asyncio.gather(self._link, return_exceptions=True)
            if not self._link.cancelled() and self._link.exception() is None:
                await self._link.result().close()

    async def start(self, *, name: str, arguments: Sequence[str], env: Mapping[str, str]) -> Handle:
        """Start a process as soon as the cluster has room for it. `arguments`: of Python on the node."""
        check_installed()
        if self._link is None or (self._link.done() and self._is_lost(self._link)):
            self._link = asyncio.create_task(_Link.open(self._source, self._log))
        link = await asyncio.shield(self._link)
        return await link.start(name, arguments, env, self._source.of_actor())

    @staticmethod
    def _is_lost(link: asyncio.Task[_Link]) -> bool:
        return link.cancelled() or link.exception() is not None or not link.result().alive


class _Link:
    """One driver process."""

    def __init__(self, driver: Handle, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._driver = driver
        self._reader = reader
        self._writer = writer
        self._starting: dict[str, asyncio.Future[Handle]] = {}
        self._running: dict[str, Handle] = {}
        self._reading: asyncio.Task[None] | None = None

    @classmethod
    async def open(cls, options: Ray, log: Path) -> _Link:
        ours, theirs = socket.socketpair()
        try:
            argv = [sys.executable, "-m", "windfall.providers.ray.driver"]
            # Ray's usage report uses the network at the start; it is off unless the user enables it.
            env = {"RAY_USAGE_STATS_ENABLED": "0", **os.environ}
            driver = process.start(
                name="ray-driver", argv=argv, env=env, log=log, channel=theirs.fileno(), death=signal.SIGTERM
            )
        finally:
            theirs.close()
        reader, writer = await asyncio.open_connection(sock=ours, limit=16 * 1024 * 1024)
        link = cls(driver, reader, writer)
        try:
            link._send(connect={"address": options.address, "namespace": "windfall"})
            async with asyncio.timeout(CONNECT_S):
                answer = json.loads(await reader.readline() or b'{"failed": "the driver died"}')
        except BaseException as e:  # raised again: no driver may be left
            driver.kill()
            if isinstance(e, TimeoutError):
                raise OSError(f"waited {CONNECT_S:g} s for the Ray cluster at {options.address}") from e
            raise
        if "failed" in answer:
            driver.kill()
            raise OSError(f"cannot connect to the Ray cluster at {options.address}: {answer['failed']}; see {log}")
        link._reading = asyncio.create_task(link._read())
        return link

    @property
    def alive(self) -> bool:
        return self._reading is not None and not self._reading.done()

    async def start(
        self, name: str, arguments: Sequence[str], env: Mapping[str, str], options: Mapping[str, Any]
    ) -> Handle:
        future = self._starting[name] = asyncio.get_running_loop().create_future()
        self._send(spawn=name, arguments=list(arguments), env=dict(env), options=dict(options))
        try:
            return await future
        except asyncio.CancelledError:
            self._send(forget=name)
            raise
        finally:
            self._starting.pop(name, None)

    async def close(self) -> None:
        self._writer.close()  # the driver ends its workers and exits
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._driver.wait(), CLOSE_S)
        await self._driver.terminate(0.0)
        if self._reading is not None:
            await asyncio.gather(self._reading, return_exceptions=True)

    def _send(self, **fields: Any) -> None:
        with contextlib.suppress(ConnectionError):
            self._writer.write(json.dumps(fields).encode() + b"\n")

    async def _read(self) -> None:
        try:
            while line := await self._reader.readline():
                self._handle(json.loads(line))
        except ConnectionError:
            pass
        finally:
            self._writer.close()
            self._driver.kill()
            for future in list(self._starting.values()):
                if not future.done():
                    future.set_exception(OSError("the Ray driver died"))
            for handle in list(self._running.values()):
                handle.ended(-signal.SIGKILL)

    def _handle(self, answer: dict[str, Any]) -> None:
        name, future = answer["worker"], self._starting.get(answer["worker"])
        if "exit" in answer:
            if handle := self._running.pop(name, None):
                handle.ended(answer["exit"])
        elif "error" in answer:
            if future is not None and not future.done():
                error = answer["error"]
                fix = "Check the keys of [fleet.ray]."
                future.set_exception(
                    OSError(error) if answer["temporary"] else WindfallError(error, where="fleet.ray", fix=fix)
                )
        elif future is not None and not future.done():
            handle = self._running[name] = Handle(
                name=name,
                pid=answer["pid"],
                send=lambda number: self._send(worker=name, signal=int(number)),
                kill_timeout_s=KILL_TIMEOUT_S,
            )
            future.set_result(handle)


def restart_delay() -> RestartDelay:
    """A worker loads its software from the disk of a node for many seconds before it can fail."""
    return RestartDelay(young_s=60.0, limit_s=60.0)


class RayProvider(SlotProvider):
    name = "ray"

    def __init__(
        self,
        client: RayClient,
        source: Ray,
        *,
        url: Callable[[], Awaitable[str]],
        secrets: Mapping[str, str],
        on_event: OnEvent = ignore_event,
    ) -> None:
        self._client = client
        self._source = source
        self._url = url
        self._secrets = secrets
        super().__init__(
            self._spawn,
            source.workers,
            terms=source.lease,
            on_event=on_event,
            grace_s=source.drain_s,
            prefix="ray",
            delay=restart_delay,
            patient=True,
        )

    async def _spawn(self, name: str, lease: Lease) -> Handle:
        command = ["-m", "windfall.run.cli", *arguments(self._source, await self._url(), name)]
        return await self._client.start(name=name, arguments=command, env=self._secrets)

    async def run(self) -> None:
        async with self._client:
            await super().run()
