"""The child processes of an engine group, and the connections to them. Decides nothing about engines.

    trainer ── thread `engines` ── fork server (imported torch) ─┬─ child 0
                                                                 └─ child 1 ...

- The thread runs an event loop, which starts the fork server at once and the children after `start`. A child that ends
  is started again, with a delay if it has not lived long (backoff.py).
- All of them die with the thread, and so with the process, however it ends (processes/fork_client.py).
- `on_up`, `on_message` and `on_down` are called in the thread, for one child in this order: up, messages, down. All
  messages that a child has sent before its end are delivered.
- `send` never blocks, and can be called from any thread. A message to a child that is down is dropped.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from windfall.backoff import RestartDelay
from windfall.devices import Place
from windfall.engine.group import messages as m
from windfall.errors import describe_exit, run_until_first
from windfall.processes.fork_client import ForkClient
from windfall.processes.process import Handle

MODULES = ("windfall.engine.torch.engine", "windfall.engine.torch.runner")
"""Modules that the fork server imports besides those of child.py."""
READ_BYTES = 1 << 20


class Callbacks(Protocol):
    def on_up(self, child: int) -> None: ...
    def on_message(self, child: int, message: object) -> None: ...
    def on_down(self, child: int, why: str) -> None: ...
    def on_failure(self, error: BaseException) -> None:
        """No child can be started any more, now or later."""
        ...


class EngineProcesses:
    def __init__(
        self, places: Sequence[Place], callbacks: Callbacks, *, folder: Path, modules: Sequence[str] = MODULES
    ) -> None:
        """`folder`: for the logs. `modules`: as for a ForkClient."""
        self._places = places
        self._callbacks = callbacks
        self._folder = folder
        self._modules = modules
        self._writers: dict[int, asyncio.StreamWriter] = {}
        self._handles: dict[int, Handle] = {}
        self._loop = asyncio.new_event_loop()
        self._wanted = asyncio.Event()
        self._closing = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="engines", daemon=True)
        self._thread.start()

    def start(self) -> None:
        """Start the children."""
        self._call(self._wanted.set)

    def send(self, child: int, message: object) -> None:
        self._call(self._write, child, m.encode(message))

    def kill(self, child: int) -> None:
        """Kill this child, which is then started again."""
        self._call(self._kill, child)

    def close(self) -> None:
        """End all processes, and wait for them."""
        self._call(self._closing.set)
        self._thread.join()

    def _call(self, function: Callable[..., object], *args: object) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed, and so is everything
            self._loop.call_soon_threadsafe(function, *args)

    # The methods below run in the thread.

    def _run(self) -> None:
        try:
            with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
                runner.run(self._main())
        except BaseException as e:  # fault boundary: this is the only way in which the group learns of the error
            self._callbacks.on_failure(e)

    async def _main(self) -> None:
        client = ForkClient(
            entry="windfall.engine.group.child:main", modules=self._modules, log=self._folder / "fork_server.log"
        )
        self._folder.mkdir(parents=True, exist_ok=True)
        async with client:
            with contextlib.suppress(OSError):  # it was killed while it started: the first child starts another
                await client.ready()
            children = (self._keep_running(client, n) for n in range(len(self._places)))
            await run_until_first(self._closing.wait(), *children)

    async def _keep_running(self, client: ForkClient, child: int) -> None:
        delay, generation = RestartDelay(), 0
        await self._wanted.wait()
        while True:
            generation += 1
            began = time.monotonic()
            try:
                why = await self._run_child(client, child, f"engine{child}.{generation}")
            except OSError as e:  # it may be temporary: the fork server died, or there are too many processes
                why = f"could not be started: {e}"
            self._callbacks.on_down(child, why)
            await asyncio.sleep(delay.after_death(lived_s=time.monotonic() - began))

    async def _run_child(self, client: ForkClient, child: int, name: str) -> str:
        """Run one process. Returns how it ended."""
        ours, theirs = socket.socketpair()
        reader, writer = await asyncio.open_connection(sock=ours)
        try:
            with theirs:
                handle = self._handles[child] = await client.start(
                    name=name,
                    argv=["windfall-engine"],
                    env=self._places[child].environment(os.environ),
                    log=self._folder / f"engine{child}.log",
                    channel=theirs,
                )
            try:
                self._writers[child] = writer
                self._callbacks.on_up(child)
                await self._read(child, reader)
            finally:
                del self._writers[child]
                code = await handle.terminate(0.0)
        finally:
            writer.close()
        return describe_exit(code)

    async def _read(self, child: int, reader: asyncio.StreamReader) -> None:
        receiver = m.Receiver(m.FromChild)
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(READ_BYTES):
                for message in receiver.messages(data):
                    self._callbacks.on_message(child, message)

    def _write(self, child: int, data: bytes) -> None:
        if writer := self._writers.get(child):
            writer.write(data)

    def _kill(self, child: int) -> None:
        if (handle := self._handles.get(child)) is not None and child in self._writers:
            handle.kill()
