"""The client of the nursery: workers forked from one process that has imported torch and the rest already.

Importing torch and transformers takes seconds of CPU; a worker that dies every few seconds cannot pay that. Forking
takes milliseconds (`python -m windfall.fleet.start_time` measures both). `start` has the interface of `process.start`;
its `argv` is the worker's `sys.argv`. The other side, and what holds for a forked worker, is `forker.py`.

- The nursery is started by the first request, and again by the next one after it died.
- If it dies, its workers die: the kernel kills them, and we kill their process groups before we say that they ended.
- It is pinged; one that stands still (SIGSTOP, a debugger) is killed, as is one that does not fork when asked to.
- If we die, its input closes (and SIGTERM comes): it kills the process groups of all workers and ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import signal
import socket
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from windfall.errors import WindfallError
from windfall.fleet import process
from windfall.fleet.base import KILL_TIMEOUT_S, Handle

_LOG = logging.getLogger(__name__)
FORK_TIMEOUT_S = 30.0
PING_S = 5.0
MOST_UNANSWERED = 6
"""Pings. Not a time: what we cannot hear while we stand still ourselves is not held against it."""
FORKABLE = {"OPENBLAS_NUM_THREADS": "1", "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
"""Without the first, numpy starts threads when it is imported, and then nothing can be forked. Without the second, a
library that asks torch whether there is a GPU initializes CUDA, which a forked process cannot use."""


class NurseryLost(ConnectionError):
    """The nursery died before it answered. The next request starts another."""


class Nursery:
    """`entry` is `module:function`; `modules` are imported before it, and see `env` (by default ours). One that is
    `module:function:argument` is called as well: what it does, and so imports, no worker has to do again. That is for
    speed alone: a nursery that cannot fork after such calls is started again without them."""

    def __init__(
        self,
        *,
        entry: str,
        modules: Sequence[str],
        log: Path,
        env: Mapping[str, str] | None = None,
        import_timeout_s: float = 180.0,
    ) -> None:
        self._entry, self._modules, self._log = entry, list(modules), log
        self._env = {**(os.environ if env is None else env), **FORKABLE}
        self._import_timeout_s = import_timeout_s
        self._link: asyncio.Task[_Link] | None = None

    @property
    def pid(self) -> int | None:
        """Of the nursery process, when there is one that is ready."""
        link = self._up()
        return link.process.pid if link else None

    def kill(self) -> None:
        """Now, and with it all its workers."""
        if link := self._up():
            link.process.kill()

    async def ready(self) -> None:
        """Start the nursery now, ahead of the first request."""
        await self._linked()

    async def start(self, *, name: str, argv: Sequence[str], env: Mapping[str, str], log: Path) -> Handle:
        """Fork a worker. Cancelled, it leaves none behind."""
        os.close(process.open_log(log))
        link = await self._linked()
        return await link.fork({"name": name, "argv": list(argv), "env": dict(env), "log": str(log)})

    async def close(self) -> None:
        """End the nursery and with it all its workers."""
        task, self._link = self._link, None
        if task is None:
            return
        if not task.done():
            task.cancel()
        with contextlib.suppress(asyncio.CancelledError, WindfallError, OSError):  # it never came up: nothing to close
            await (await task).close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, e: BaseException | None, t: TracebackType | None
    ) -> None:
        await self.close()

    async def _linked(self) -> _Link:
        if self._link is None or (self._link.done() and not self._up()):
            self._link = asyncio.create_task(self._launch())
        return await asyncio.shield(self._link)  # others may be waiting for the same nursery

    def _up(self) -> _Link | None:
        task = self._link
        if task is None or not task.done() or task.cancelled() or task.exception() or task.result().lost:
            return None
        return task.result()

    async def _launch(self) -> _Link:
        try:
            return await self._launch_with(self._modules)
        except WindfallError as e:
            plain = [module.partition(":")[0] for module in self._modules]
            if plain == self._modules:
                raise
            self._modules = plain
            with self._log.open("a") as log:
                log.write(f"{e}\nIt is started again with imports alone; workers will take longer to start.\n")
            return await self._launch_with(plain)

    async def _launch_with(self, modules: Sequence[str]) -> _Link:
        ours, theirs = socket.socketpair()
        with theirs:
            reader, writer = await asyncio.open_unix_connection(sock=ours)
            try:
                # SIGTERM, not SIGKILL, when we die: it then takes the process groups of its workers along.
                nursery = process.launch(
                    name="nursery",
                    argv=[sys.executable, "-m", "windfall.fleet.forker", self._entry, *modules],
                    env=self._env,
                    log=self._log,
                    channel=theirs.fileno(),
                    death=signal.SIGTERM,
                )
            except BaseException:  # closes what was opened and goes on up
                writer.close()
                raise
        link = _Link(nursery, reader, writer)
        try:
            await link.come_up(self._import_timeout_s, self._log)
        except BaseException:  # also when cancelled: a nursery that nobody will use must not stay
            nursery.kill()
            await link.close()
            raise
        link.watch()
        return link


class _Link:
    """The connection to one nursery process."""

    def __init__(self, nursery: Handle, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.process = nursery
        self.lost = False
        self._writer = writer
        self._up: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._asked: dict[str, asyncio.Future[Handle]] = {}
        self._workers: dict[int, Handle] = {}
        self._unanswered = 0
        self._listener = asyncio.create_task(self._listen(reader))
        self._pinger: asyncio.Task[None] | None = None

    async def come_up(self, timeout_s: float, log: Path) -> None:
        try:
            async with asyncio.timeout(timeout_s):
                failed = await self._up
        except TimeoutError:
            failed = f"waited {timeout_s:g} s for the imports"
        if failed:
            fix = f"What it printed is in {log}."
            raise WindfallError(f"the nursery did not come up: {failed}", where="fleet", fix=fix)

    def watch(self) -> None:
        """From now on it has to answer."""
        self._pinger = asyncio.create_task(self._ping())

    async def _ping(self) -> None:
        while self._unanswered < MOST_UNANSWERED:
            self._unanswered += 1
            self._send(ping=True)
            await asyncio.sleep(PING_S)
        self.process.kill()

    async def fork(self, request: dict[str, Any]) -> Handle:
        name = request["name"]
        if name in self._asked or any(w.name == name for w in self._workers.values()):
            raise WindfallError(f"there is a worker '{name}' already", where="fleet", fix="Use every name once.")
        if self.lost:
            raise NurseryLost("the nursery has died")
        asked = self._asked[name] = asyncio.get_running_loop().create_future()
        self._send(**request)
        try:
            # Not wait_for: Python 3.11's forgets that it was cancelled when the answer comes at the same moment.
            async with asyncio.timeout(FORK_TIMEOUT_S):
                return await asked
        except (TimeoutError, asyncio.CancelledError) as e:
            if asked.done() and not asked.cancelled() and not asked.exception():
                asked.result().kill()  # it came too late: nobody will hold it
            if isinstance(e, TimeoutError):
                self.process.kill()  # what cannot fork is of no use; its workers are ended and started again
                what = f"waited {FORK_TIMEOUT_S:g} s for the nursery (pid {self.process.pid}) to fork {name}"
                raise TimeoutError(what) from None
            raise

    async def close(self) -> None:
        with contextlib.suppress(OSError):
            self._writer.write_eof()
        await self.process.terminate(grace_s=KILL_TIMEOUT_S)
        await self._listener

    def _send(self, **fields: Any) -> None:
        if not self.lost:
            self._writer.write(json.dumps(fields).encode() + b"\n")

    async def _listen(self, reader: asyncio.StreamReader) -> None:
        with contextlib.suppress(ConnectionError):
            while line := await reader.readline():
                self._take(json.loads(line))
        self.lost = True
        if self._pinger is not None:
            self._pinger.cancel()
        self._writer.close()
        # A nursery that let go of its channel is of no use, whether it has died or not.
        code = await self.process.terminate(grace_s=1.0)
        if not self._up.done():
            self._up.set_result(f"it ended with {code}")
        for worker in self._workers.values():
            process.send(worker.pid, signal.SIGKILL)
        for worker in self._workers.values():
            await _gone(worker.pid)
            worker.ended(-signal.SIGKILL)
        for asked in self._asked.values():
            if not asked.done():
                asked.set_exception(NurseryLost(f"the nursery ended with {code} before it answered"))

    def _take(self, answer: dict[str, Any]) -> None:
        match answer:
            case {"ready": _} if not self._up.done():
                self._up.set_result("")
            case {"failed": why} if not self._up.done():
                self._up.set_result(why)
            case {"pong": _}:
                self._unanswered = 0
            case {"pid": pid, "exit": code}:
                self._workers.pop(pid).ended(code)
            case {"name": name, "pid": pid}:
                handle = Handle(name=name, pid=pid, send=lambda number: self._send(pid=pid, signal=int(number)))
                self._workers[pid] = handle
                if (asked := self._asked.pop(name)).done():
                    handle.kill()  # whoever asked was cancelled meanwhile
                else:
                    asked.set_result(handle)
            case {"name": name, "error": why} if name in self._asked:
                if not (asked := self._asked.pop(name)).done():
                    asked.set_exception(OSError(why))


async def _gone(pid: int) -> None:
    """Until a process that is no child of ours, and was killed, is no more (a zombie is no more)."""
    for _ in range(int(KILL_TIMEOUT_S / 0.01)):
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return
        except (FileNotFoundError, ProcessLookupError):
            return
        await asyncio.sleep(0.01)
    # Nobody awaits this, and the run can go on: the kernel ends such a process when its disk or driver lets it go.
    _LOG.warning("waited %g s for worker process %d to end by SIGKILL; going on without", KILL_TIMEOUT_S, pid)
