"""Starts agents through a server process (server_main.py), and waits for them.

An agent gets the variables of this process except windfall's own (WINDFALL_*), which may be secrets, and the address
and the key of its session. The server runs below a reaper (reaper.py): if the server or this process ends, its
agents end too, and all that they and the agent's module have started. The next start begins another server. One that is
killed while it starts is started again, a few times.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

from windfall.backoff import delay_s
from windfall.envs.agents.agent_exit import AgentExit
from windfall.envs.agents.server_main import SIZES
from windfall.envs.process_pool.child_process import SECRETS, child_environment
from windfall.errors import WindfallError, describe_exit
from windfall.processes import reaper

BUILD_S = 300.0
"""Time limit for importing an agent's function (seconds)."""
MAX_MESSAGE_BYTES = 4 << 20
MAX_LOST_STARTS = 4
"""Number of servers in a row that may be killed while they start."""
RESTART_S = 0.5
"""Seconds until such a server is started again; then twice that, and so on."""
STOP_S = 5.0
"""Seconds that the server may take to end; it may be importing."""


@dataclass(frozen=True, kw_only=True)
class AgentProgram:
    """What is started for every response: a command, or a function."""

    command: Sequence[str] = ()
    function: str = ""
    """As "package.module:function". It is called with the task and the options."""
    options: Mapping[str, Any] = field(default_factory=dict)
    memory_mb: int = 0
    """Upper limit for the address space of the agent's process. 0: no limit."""
    directory: str = ""
    """Folder in which the agent is imported and runs; empty: that of this process."""
    hidden: Sequence[str] = ()
    """Folders that agents must not read."""
    isolation: str = "auto"
    """As env.isolation in the recipe."""


class ServerLost(ConnectionError):
    """The server was killed while it started."""


class AgentLauncher:
    """Used as `async with`."""

    def __init__(self, program: AgentProgram) -> None:
        self._program = program
        self._server: subprocess.Popen[bytes] | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._reading: asyncio.Task[None] | None = None
        self._built: asyncio.Future[None] | None = None
        self._running: dict[int, asyncio.Future[AgentExit]] = {}
        self._next_number = 0
        self.hides_files = True
        """Agents cannot read the hidden folders. Known once the launcher has been ready."""
        self._starting = asyncio.Lock()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stop()

    async def ready(self) -> None:
        """Start the server, if it is not running, and wait until it has imported the agent. Raises WindfallError."""
        async with self._starting:
            for lost in range(1, MAX_LOST_STARTS + 1):
                if self._server is not None:
                    return
                try:
                    await self._start_server()
                except ServerLost as e:
                    if lost == MAX_LOST_STARTS:
                        fix = "Check the free memory, and what the agent's module does when it is imported."
                        raise WindfallError(f"{e} ({lost} times in a row)", where="env", fix=fix) from e
                    wait_s = delay_s(lost - 1, first_s=RESTART_S)
                    print(f"{e}; restarting it in {wait_s:g} s", file=sys.stderr, flush=True)
                    await asyncio.sleep(wait_s)

    async def _start_server(self) -> None:
        await self._begin()
        assert self._built is not None
        try:
            await asyncio.wait_for(asyncio.shield(self._built), BUILD_S)
        except TimeoutError:
            await self._stop()
            raise WindfallError(f"the agent was not imported within {BUILD_S:g} s", where="env.function") from None
        except (WindfallError, ServerLost):
            await self._stop()
            raise

    async def run(self, task: Mapping[str, Any], variables: Mapping[str, str], kill: asyncio.Future[str]) -> AgentExit:
        """Start an agent and wait for its end. If `kill` gets a reason, or this is canceled, the agent is killed."""
        await self.ready()
        self._next_number += 1
        number = self._next_number
        ended = self._running[number] = asyncio.get_running_loop().create_future()
        secret = json.dumps({"task": dict(task), "variables": dict(variables)}).encode()
        self._send(secret, what="start", number=number)
        try:
            await asyncio.wait([ended, kill], return_when=asyncio.FIRST_COMPLETED)
            if not ended.done():
                self._send(what="kill", number=number, why=kill.result())
            return await ended
        finally:
            self._running.pop(number, None)
            if not ended.done():
                self._send(what="kill", number=number, why="is no longer needed")

    def _send(self, secret: bytes = b"", /, **message: Any) -> None:
        """`secret` is for the agent's process alone (server_main.py)."""
        if self._writer is not None and not self._writer.is_closing():
            data = json.dumps(message).encode()
            self._writer.write(struct.pack(SIZES, len(data), len(secret)) + data + secret)

    async def _begin(self) -> None:
        ours, theirs = socket.socketpair()
        with theirs, _folder_errors(ours, self._program.directory):
            self._server = reaper.start(
                "windfall.envs.agents.server_main:main", [theirs.fileno()], env=child_environment(strict=False),
                folder=self._program.directory,
            )  # fmt: skip
        reader, self._writer = await asyncio.open_connection(sock=ours, limit=MAX_MESSAGE_BYTES)
        self._built = asyncio.get_running_loop().create_future()
        self._reading = asyncio.create_task(self._read(reader, self._server))
        p = self._program
        self._send(
            what="build", command=list(p.command), function=p.function, options=dict(p.options), memory_mb=p.memory_mb,
            hidden=list(p.hidden), isolation=p.isolation, environment=agent_environment(bool(p.function)),
        )  # fmt: skip

    async def _read(self, reader: asyncio.StreamReader, server: subprocess.Popen[bytes]) -> None:
        with contextlib.suppress(ConnectionError, ValueError):  # a line that is not one of ours: the server is broken
            while line := await reader.readline():
                self._handle(json.loads(line))
        reaper.end(server)  # it kills all that is left, and ends as the server did
        code = await asyncio.to_thread(server.wait)
        assert self._built is not None
        if not self._built.done():
            what = f"the process that starts agents {describe_exit(code)} while it started"
            self._built.set_exception(ServerLost(what) if code < 0 else WindfallError(what, where="env"))
        for ended in self._running.values():
            if not ended.done():
                ended.set_result(AgentExit(code=code, why="ended, because the process that starts agents was lost"))
        if self._server is server:
            self._server = self._writer = None

    def _handle(self, message: dict[str, Any]) -> None:
        assert self._built is not None
        match message.pop("what"):
            case "ready":
                self.hides_files = message["hides_files"]
                self._built.set_result(None)
            case "refused":
                fix = message["fix"] or "Correct the agent's function."
                self._built.set_exception(WindfallError(message["error"], where=message["where"], fix=fix))
            case "ended":
                ended = self._running.get(message.pop("number"))
                if ended is not None and not ended.done():
                    ended.set_result(AgentExit(**message))

    async def _stop(self) -> None:
        reading, self._reading = self._reading, None
        if reading is None:
            return
        writer, server = self._writer, self._server
        if writer is not None and not writer.is_closing():
            writer.write_eof()  # the server kills its agents, with all processes that they started, and ends
        await asyncio.wait([reading], timeout=STOP_S)
        if server is not None and not reading.done():
            reaper.end(server)
        await asyncio.gather(reading, return_exceptions=True)
        if writer is not None:
            writer.close()
        if self._built is not None and self._built.done() and not self._built.cancelled():
            self._built.exception()


@contextlib.contextmanager
def _folder_errors(link: socket.socket, directory: str) -> Iterator[None]:
    """Raises WindfallError if the working directory is the reason why a process cannot be started."""
    try:
        yield
    except OSError as e:
        link.close()
        what, fix = f"cannot start agents in {directory or os.getcwd()}: {e}", "Correct env.directory in recipe.toml."
        raise WindfallError(what, where="env.directory", fix=fix) from e


def agent_environment(is_function: bool) -> dict[str, str]:
    """The variables of an agent: no secrets of the run, and no proxy for the gateway. A command may be a program of
    another Python, so it does not get the import path of this one."""
    kept = child_environment(strict=False) if is_function else dict(os.environ)
    kept = {name: value for name, value in kept.items() if not name.startswith(SECRETS)}
    direct = ",".join(filter(None, (os.environ.get("NO_PROXY") or os.environ.get("no_proxy"), "127.0.0.1,localhost")))
    return kept | {"NO_PROXY": direct, "no_proxy": direct, "PYTHONUNBUFFERED": "1"}
