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
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from windfall.envs import failures
from windfall.envs.failures import EnvFailed
from windfall.envs.process_pool.child_process import SECRETS, child_environment
from windfall.errors import WindfallError, describe_exit
from windfall.processes.fork_client import ForkClient, UserCode
from windfall.types import Feedback

BUILD_S = 300.0
"""Time limit for importing an agent's function (seconds)."""


@dataclass(frozen=True, kw_only=True)
class AgentProgram:
    """What is started for every response: a command, or a function."""

    command: Sequence[str] = ()
    function: str = ""
    """As "package.module:function". It is called with the task and the options."""
    options: Mapping[str, Any] = field(default_factory=dict)
    memory_mb: int = 0
    directory: str = ""
    """Folder in which the agent is imported and runs; empty: that of this process."""
    hidden: Sequence[str] = ()
    isolation: str = "auto"


@dataclass(frozen=True, kw_only=True, slots=True)
class AgentExit:
    code: int
    """Exit status; a negative number is the signal that ended the process."""
    value: Any = None
    """What the function returned, or the last line that the command printed, parsed as JSON if it is JSON."""
    output: str = ""
    why: str = ""

    @property
    def failure(self) -> EnvFailed | None:
        if self.why:
            return EnvFailed(f"the agent {self.why}", self.why, self.output)
        if self.code != 0:
            last = next((line for line in reversed(self.output.splitlines()) if line.strip()), "")
            how = describe_exit(self.code)
            cause = f"the agent {how}"
            return EnvFailed(f"{cause}: {last[: failures.MESSAGE_CHARS]}" if last else cause, cause, self.output)
        return None

    @property
    def reward(self) -> float | None:
        """The reward that the agent returned. Raises EnvFailed if its value is not a reward.

        >>> AgentExit(code=0, value={"reward": 0.5}).reward, AgentExit(code=0, value=True).reward
        (0.5, 1.0)
        """
        value = self.value.get("reward") if isinstance(self.value, dict) else self.value
        if value is None or isinstance(value, str):
            return None
        if fault := failures.feedback_fault(Feedback(reward=value)):
            raise failures.invalid_value("the value that the agent returned", fault)
        return float(value)

    @property
    def rewards(self) -> dict[str, float]:
        """The rewards by role that the agent returned. Raises EnvFailed if they are none.

        >>> AgentExit(code=0, value={"rewards": {"solver": 1}}).rewards
        {'solver': 1.0}
        """
        given = self.value.get("rewards") if isinstance(self.value, dict) else None
        if not given:
            return {}
        if fault := failures.feedback_fault(Feedback(rewards=given)):
            raise failures.invalid_value("the value that the agent returned", fault)
        return {role: float(reward) for role, reward in given.items()}

    @property
    def text(self) -> str:
        value = self.value.get("text") if isinstance(self.value, dict) else self.value
        return value if isinstance(value, str) else "" if value is None else json.dumps(value)


def last_line(output: str) -> Any:
    """The last line that is not empty: its value if it is JSON, otherwise its text.

    >>> last_line('thinking\\n{"reward": 1}\\n\\n'), last_line("done")
    ({'reward': 1}, 'done')
    """
    line = next((line for line in reversed(output.splitlines()) if line.strip()), "").strip()
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return line or None


class AgentLauncher:
    def __init__(self, program: AgentProgram) -> None:
        self._program = program
        self._file = tempfile.TemporaryFile()  # noqa: SIM115 (closed in __aexit__)
        build = {**dataclasses.asdict(program), "environment": agent_environment(bool(program.function))}
        self._file.write(json.dumps(build).encode())
        self._file.flush()
        module = "windfall.envs.agents.agent_main"
        self._client = ForkClient(
            entry=f"{module}:main",
            modules=[f"{module}:prepare:{self._file.fileno()}"],
            log=Path(os.devnull),
            env=child_environment(strict=False),
            import_timeout_s=BUILD_S,
            user_code=UserCode(fds=[self._file.fileno()], folder=program.directory),
        )
        self._next_number = 0
        self.hides_files = True
        """Agents cannot read the hidden folders. Known once the launcher has been ready."""

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
        try:
            self.hides_files = await self._client.ready()
        except OSError as e:
            what = f"cannot start agents in {self._program.directory or os.getcwd()}: {e}"
            raise WindfallError(what, where="env.directory", fix="Correct env.directory in recipe.toml.") from e

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
