"""Starts agents through a fork server that has imported the agent's function (agent_main.py), and waits for them.

An agent gets the variables of this process except windfall's own (WINDFALL_*), which may be secrets, and the address
and the key of its session. The fork server runs below a reaper (processes/reaper.py): if the fork server or this
process ends, its agents end too, and all that they and the agent's module have started. The next start begins another
one. One that is killed while it starts is started again, a few times.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import signal
import socket
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from windfall.backoff import delay_s
from windfall.envs.agents.agent_exit import AgentExit
from windfall.envs.process_pool.child_process import SECRETS, child_environment
from windfall.errors import WindfallError
from windfall.processes.fork_client import ForkServerLost, UserCodeForkClient

BUILD_S = 300.0
"""Time limit for importing an agent's function (seconds)."""
MAX_LOST_STARTS = 4
"""Number of fork servers in a row that may be killed while they start."""
RESTART_S = 0.5
"""Seconds until such a fork server is started again; then twice that, and so on."""


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


class AgentLauncher:
    """Used as `async with`."""

    def __init__(self, program: AgentProgram) -> None:
        self._program = program
        self._file = tempfile.TemporaryFile()  # noqa: SIM115 (closed in __aexit__)
        build = {**dataclasses.asdict(program), "environment": agent_environment(bool(program.function))}
        self._file.write(json.dumps(build).encode())
        self._file.flush()
        module = "windfall.envs.agents.agent_main"
        self._client = UserCodeForkClient(
            entry=f"{module}:main",
            modules=[f"{module}:prepare:{self._file.fileno()}"],
            fds=[self._file.fileno()],
            env=child_environment(strict=False),
            folder=program.directory,
            import_timeout_s=BUILD_S,
        )
        self._next_number = 0
        self.hides_files = True
        """Agents cannot read the hidden folders. Known once the launcher has been ready."""
        self._starting = asyncio.Lock()

    @property
    def pid(self) -> int | None:
        """The process id of the reaper above the fork server, if it is ready."""
        return self._client.pid

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._client.close()
        self._file.close()

    async def ready(self) -> None:
        """Start the fork server, if it is not running, and wait until it has imported the agent. Raises
        WindfallError."""
        async with self._starting:
            for lost in range(1, MAX_LOST_STARTS + 1):
                try:
                    self.hides_files = await self._client.ready()
                    return
                except ForkServerLost as e:
                    if lost == MAX_LOST_STARTS:
                        fix = "Check the free memory, and what the agent's module does when it is imported."
                        raise WindfallError(f"{e} ({lost} times in a row)", where="env", fix=fix) from e
                    wait_s = delay_s(lost - 1, first_s=RESTART_S)
                    print(f"{e}; restarting it in {wait_s:g} s", file=sys.stderr, flush=True)
                    await asyncio.sleep(wait_s)
                except OSError as e:
                    what = f"cannot start agents in {self._program.directory or os.getcwd()}: {e}"
                    fix = "Correct env.directory in recipe.toml."
                    raise WindfallError(what, where="env.directory", fix=fix) from e

    async def run(self, task: Mapping[str, Any], variables: Mapping[str, str], kill: asyncio.Future[str]) -> AgentExit:
        """Start an agent and wait for its end. If `kill` gets a reason, or this is canceled, the agent is killed."""
        await self.ready()
        self._next_number += 1
        name, server = f"agent {self._next_number}", self.pid
        ours, theirs = socket.socketpair()
        reader, writer = await asyncio.open_connection(sock=ours)
        try:
            with theirs:
                agent = await self._client.start(name=name, argv=[name], env={}, log=Path(os.devnull), channel=theirs)
            writer.write(json.dumps({"task": dict(task), "variables": dict(variables)}).encode())
            writer.write_eof()
            try:
                ended = asyncio.ensure_future(agent.wait())
                await asyncio.wait([ended, kill], return_when=asyncio.FIRST_COMPLETED)
                why = "" if ended.done() else kill.result()
            finally:
                agent.kill()  # no effect if it has ended
            code = await ended
            report = json.loads(await reader.read() or b"{}")
        except OSError as e:
            return AgentExit(code=1, why=f"could not be started: {e}")
        finally:
            writer.close()
        if code == -signal.SIGKILL and self.pid != server:
            why = why or "ended, because the process that starts agents was lost"
        return AgentExit(**{"code": code, **report, "why": why or report.get("why", "")})


def agent_environment(is_function: bool) -> dict[str, str]:
    """The variables of an agent: no secrets of the run, and no proxy for the gateway. A command may be a program of
    another Python, so it does not get the import path of this one."""
    kept = child_environment(strict=False) if is_function else dict(os.environ)
    kept = {name: value for name, value in kept.items() if not name.startswith(SECRETS)}
    direct = ",".join(filter(None, (os.environ.get("NO_PROXY") or os.environ.get("no_proxy"), "127.0.0.1,localhost")))
    return kept | {"NO_PROXY": direct, "no_proxy": direct, "PYTHONUNBUFFERED": "1"}
