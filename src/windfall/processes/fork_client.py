"""The client of the fork server: workers are forked from one process that has already imported torch and the rest.

Importing torch and transformers takes seconds of CPU time, too much for a worker that dies every few seconds. Forking
takes milliseconds (benchmarks/fleet/start_time.py measures both). fork_server.py is the other side, with the rules for
a forked worker.

- The first request starts the fork server. If it has died, the next request starts another. One that is killed while it
  starts is started again after a while, MAX_LOST_STARTS times; then it is an error that a person must fix.
- If it dies, its workers die: the kernel kills them, and we kill their process groups before we report their end.
- It is pinged. A fork server that does not respond (SIGSTOP, a debugger) is killed, and so is one that does not fork.
- If we die, its input closes and it gets SIGTERM: it kills all that it has started and exits.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import shlex
import signal
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from windfall.backoff import delay_s
from windfall.errors import WindfallError, describe_exit
from windfall.processes import fork_server, process, reaper
from windfall.processes.process import KILL_TIMEOUT_S, Handle

_LOG = logging.getLogger(__name__)
FORK_TIMEOUT_S = 30.0
PING_S = 5.0
MAX_UNANSWERED = 6
"""Number of unanswered pings before the fork server is killed. It is not a time: while this process is itself stopped,
it sends no pings, so a late answer does not count against the fork server."""
MAX_LOST_STARTS = 4
"""Number of fork servers in a row that may be killed while they start. Such a kill may come from outside."""
RESTART_S = 0.5
"""Seconds until such a fork server is started again; then twice that, and so on."""
RUNNER = "WINDFALL_RUN_FORK_SERVER"
"""Environment variable with the options of Python that run the module of the fork server, instead of `-m`. The tests of
windfall share the imports of their fork servers by it."""


class ForkServerLost(ConnectionError):
    """The fork server died before it answered. The next request starts another."""


@dataclass(frozen=True, kw_only=True, slots=True)
class UserCode:
    """How a fork server runs modules of the user: it and what it forks are below reapers (reaper.py), a call that fails
    is an error, and its output is shown on standard error, up to a limit."""

    fds: Sequence[int]
    """File descriptors for the calls."""
    folder: str


class ForkClient:
    """`entry` is `module:function`. `modules` are imported before it, with the environment variables `env` (default:
    those of this process). A module given as `module:function:argument` is also called: workers need not repeat its
    work and imports. Such calls only save time: if the fork server ends during them, or cannot fork after them, it is
    restarted without. Calls that load a module of the user (`user_code`) are needed."""

    def __init__(
        self,
        *,
        entry: str,
        modules: Sequence[str],
        log: Path,
        env: Mapping[str, str] | None = None,
        import_timeout_s: float = 180.0,
        user_code: UserCode | None = None,
    ) -> None:
        self._entry = entry
        self._modules = list(modules)
        self._log = log
        self._env = {**(os.environ if env is None else env), **({} if user_code else fork_server.FORKABLE)}
        self._import_timeout_s = import_timeout_s
        self._user_code = user_code
        self._link: asyncio.Task[_Link] | None = None

    @property
    def pid(self) -> int | None:
        link = self._ready_link()
        return link.server.pid if link else None

    def kill(self) -> None:
        if link := self._ready_link():
            link.server.kill()

    async def ready(self) -> Any:
        """Start the fork server now, before the first request. Returns the result of its last call."""
        return (await self._connect()).result

    async def start(
        self, *, name: str, argv: Sequence[str], env: Mapping[str, str], log: Path, channel: socket.socket | None = None
    ) -> Handle:
        """Fork a worker, with `argv` as its `sys.argv`. It gets `channel` by fork_server.channel(). Canceling this
        leaves no worker behind."""
        output = process.open_log(log)
        try:
            link = await self._connect()
            fds = [output] if channel is None else [output, channel.fileno()]
            return await link.fork({"name": name, "argv": list(argv), "env": dict(env)}, fds)
        finally:
            os.close(output)

    async def close(self) -> None:
        task, self._link = self._link, None
        if task is None:
            return
        if not task.done():
            task.cancel()
        with contextlib.suppress(asyncio.CancelledError, WindfallError, OSError):  # it never started: nothing to close
            await (await task).close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def _connect(self) -> _Link:
        if self._link is None or (self._link.done() and not self._ready_link()):
            self._link = asyncio.create_task(self._launch())
        return await asyncio.shield(self._link)  # other requests may be waiting for the same fork server

    def _ready_link(self) -> _Link | None:
        task = self._link
        if task is None or not task.done() or task.cancelled() or task.exception() or task.result().lost:
            return None
        return task.result()

    async def _launch(self) -> _Link:
        imports = [module.partition(":")[0] for module in self._modules]
        lost = 0
        while True:
            try:
                return await self._launch_once()
            except (ForkServerLost, WindfallError) as e:
                calls_needed = self._user_code is not None or imports == self._modules
                if isinstance(e, WindfallError) and calls_needed:
                    raise
                lost += 1
                if lost == MAX_LOST_STARTS:
                    fix = f"Check the free memory, and read its output in {self._log}."
                    raise WindfallError(f"{e} ({lost} times in a row)", where="fork server", fix=fix) from e
                wait_s = delay_s(lost - 1, first_s=RESTART_S)
                _LOG.warning("%s; restarting it in %g s%s", e, wait_s, "" if calls_needed else ", with imports only")
                if not calls_needed:
                    self._modules = imports
            await asyncio.sleep(wait_s)

    async def _launch_once(self) -> _Link:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            try:
                link = _Link(self._start_server(theirs), ours)
            except BaseException:  # close the connection and raise again
                ours.close()
                raise
        try:
            await link.wait_until_ready(self._import_timeout_s, f"Read its output in {self._log}.")
        except BaseException:  # also when canceled: an unused fork server must not stay
            link.server.kill()
            await link.close()
            raise
        return link

    def _start_server(self, connection: socket.socket) -> Handle:
        if self._user_code is not None:
            return reaper.start(
                "windfall.processes.fork_server:serve_user_code",
                [connection.fileno(), self._entry, *self._modules],
                name="process that starts agents",
                fds=[connection.fileno(), *self._user_code.fds],
                env=self._env,
                folder=self._user_code.folder,
            )
        # When we die it gets SIGTERM, not SIGKILL, so that it can kill what its workers have started.
        run = shlex.split(self._env.get(RUNNER, "-m"))
        return process.start(
            name="fork server",
            argv=[sys.executable, *run, "windfall.processes.fork_server", self._entry, *self._modules],
            env=self._env,
            log=self._log,
            channel=connection.fileno(),
            death=signal.SIGTERM,
        )


class _Link:
    def __init__(self, server: Handle, connection: socket.socket) -> None:
        self.server = server
        self.lost = False
        self.result: Any = None
        self._connection = connection
        self._import_error: asyncio.Future[WindfallError | None] = asyncio.get_running_loop().create_future()
        """Resolves when the imports are done. Raises ForkServerLost if the fork server was killed."""
        self._requested: dict[str, asyncio.Future[Handle]] = {}
        self._workers: dict[int, Handle] = {}
        self._unanswered = 0
        self._pinger: asyncio.Task[None] | None = None
        self._ending: asyncio.Task[None] | None = None
        connection.setblocking(False)
        asyncio.get_running_loop().add_reader(connection, self._receive)

    async def wait_until_ready(self, timeout_s: float, fix: str) -> None:
        """Wait for the imports. After them it must answer pings. Raises WindfallError or ForkServerLost."""
        try:
            async with asyncio.timeout(timeout_s):
                failed = await self._import_error
        except TimeoutError:
            failed = WindfallError(f"waited {timeout_s:g} s for the imports")
        if failed is not None and not failed.where:
            failed = WindfallError(f"the {self.server.name} did not start: {failed.what}", where="fleet", fix=fix)
        if failed is not None:
            raise failed
        self._pinger = asyncio.create_task(self._ping())

    async def _ping(self) -> None:
        while self._unanswered < MAX_UNANSWERED:
            self._unanswered += 1
            self._send({"ping": True})
            await asyncio.sleep(PING_S)
        self.server.kill()

    async def fork(self, request: dict[str, Any], fds: Sequence[int]) -> Handle:
        name = request["name"]
        if name in self._requested or any(w.name == name for w in self._workers.values()):
            raise WindfallError(f"there is already a worker '{name}'", where="fleet", fix="Use every name once.")
        if self.lost:
            raise ForkServerLost("the fork server has died")
        try:
            self._send(request, fds)
        except OSError as e:
            what = f"the arguments and environment variables of {name} cannot be sent to the fork server: {e}"
            raise WindfallError(what, where="fleet", fix="Unset large environment variables.") from e
        requested = self._requested[name] = asyncio.get_running_loop().create_future()
        try:
            async with asyncio.timeout(FORK_TIMEOUT_S):
                return await requested
        except (TimeoutError, asyncio.CancelledError) as e:
            if requested.done() and not requested.cancelled() and not requested.exception():
                requested.result().kill()  # too late: nothing will use this worker
            if isinstance(e, TimeoutError):
                self.server.kill()  # it cannot fork, so it is useless; its workers end and are restarted
                what = f"waited {FORK_TIMEOUT_S:g} s for the fork server (pid {self.server.pid}) to fork {name}"
                raise TimeoutError(what) from None
            raise

    async def close(self) -> None:
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_WR)
        await self.server.terminate(grace_s=KILL_TIMEOUT_S)
        if self._ending is None:
            self._ending = asyncio.create_task(self._end())
        await self._ending

    def _send(self, fields: dict[str, Any], fds: Sequence[int] = ()) -> None:
        if self.lost:
            return
        try:
            socket.send_fds(self._connection, [json.dumps(fields).encode()], fds)
        except BlockingIOError:  # it has not read for a long time
            self.server.kill()
        except ConnectionError:  # the reader notices that it has ended
            pass

    def _receive(self) -> None:
        try:
            data = self._connection.recv(fork_server.MAX_REQUEST_BYTES)
        except BlockingIOError:
            return
        except ConnectionError:
            data = b""
        if data:
            self._handle(json.loads(data))
        elif self._ending is None:
            self._ending = asyncio.create_task(self._end())

    async def _end(self) -> None:
        """The fork server has closed its connection: it has ended, or is useless."""
        self.lost = True
        asyncio.get_running_loop().remove_reader(self._connection)
        self._connection.close()
        if self._pinger is not None:
            self._pinger.cancel()
        code = await self.server.terminate(grace_s=1.0)
        if not self._import_error.done():
            how = f"{describe_exit(code)} while it started"
            if code < 0:
                self._import_error.set_exception(ForkServerLost(f"the {self.server.name} {how}"))
                self._import_error.exception()  # it is possible that nothing waits for it
            else:
                self._import_error.set_result(WindfallError(f"it {how}"))
        for worker in self._workers.values():
            process.send_signal(worker.pid, signal.SIGKILL)
        for worker in self._workers.values():
            await _wait_for_end(worker.pid)
            worker.ended(-signal.SIGKILL)
        for requested in self._requested.values():
            if not requested.done():
                requested.set_exception(ForkServerLost(f"the fork server ended with status {code} before it answered"))

    def _handle(self, answer: dict[str, Any]) -> None:
        match answer:
            case {"ready": _, "result": result} if not self._import_error.done():
                self.result = result
                self._import_error.set_result(None)
            case {"failed": why} if not self._import_error.done():
                error = WindfallError(why, where=answer.get("where", ""), fix=answer.get("fix", ""))
                self._import_error.set_result(error)
            case {"pong": _}:
                self._unanswered = 0
            case {"pid": pid, "exit": code}:
                self._workers.pop(pid).ended(code)
            case {"name": name, "pid": pid}:
                handle = Handle(name=name, pid=pid, send=lambda number: self._send({"pid": pid, "signal": int(number)}))
                self._workers[pid] = handle
                if (requested := self._requested.pop(name)).done():
                    handle.kill()  # the request was canceled meanwhile
                else:
                    requested.set_result(handle)
            case {"name": name, "error": why} if name in self._requested:
                if not (requested := self._requested.pop(name)).done():
                    requested.set_exception(OSError(why))


async def _wait_for_end(pid: int) -> None:
    """Wait until a killed process that is not our child has ended. A zombie counts as ended."""
    for _ in range(int(KILL_TIMEOUT_S / 0.01)):
        try:
            if process.state(pid)[0] == "Z":
                return
        except (FileNotFoundError, ProcessLookupError):
            return
        await asyncio.sleep(0.01)
    # The run can continue: the kernel ends such a process as soon as its disk or driver releases it.
    _LOG.warning("waited %g s for worker process %d to end by SIGKILL; no longer waiting", KILL_TIMEOUT_S, pid)
