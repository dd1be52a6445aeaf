"""The program that starts agents. It imports the agent's function once, and forks a process for every run of it.

    controller ── start, kill ──▶ agent server ── fork ──▶ agent (own process group, limits, variables)
               ◀── ended ────────      │
                                       └── the link closes: the controller is gone; every agent is killed

A fork takes milliseconds, while importing an agent's packages takes seconds. This program has one thread and no event
loop, so a fork is safe unless the agent's module starts threads when it is imported. What agents print is read here,
and only its end is kept.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import inspect
import json
import os
import resource
import selectors
import signal
import socket
import sys
import tempfile
import traceback
from dataclasses import dataclass, field
from typing import Any, NoReturn

from windfall.envs import user_code
from windfall.envs.agents.agent_exit import last_line
from windfall.errors import WindfallError
from windfall.fleet.parent_death import die_with_parent

TAIL_BYTES = 16 << 10
"""Bytes of each output of an agent that are kept."""
RESULT_BYTES = 1 << 20
"""Largest value that a function may return, as JSON."""
POLL_S = 0.1
"""Seconds between checks for agents that have ended without closing their outputs."""


@dataclass(eq=False)
class RunningAgent:
    number: int
    pid: int
    pipes: dict[int, str]
    """By file descriptor: stdout, stderr or value."""
    kept: dict[str, bytes] = field(default_factory=lambda: {"stdout": b"", "stderr": b"", "value": b""})
    why: str = ""
    """Why it was killed."""


def main() -> None:
    os.dup2(2, 1)
    AgentServer(socket.socket(fileno=int(sys.argv[1]))).run()


class AgentServer:
    def __init__(self, link: socket.socket) -> None:
        self._link, self._partial_line = link, b""
        self._running: dict[int, RunningAgent] = {}
        self._selector = selectors.DefaultSelector()
        self._selector.register(link, selectors.EVENT_READ)
        self._build: dict[str, Any] = {}
        self._function: Any = None

    def run(self) -> None:
        while True:
            for key, _ in self._selector.select(POLL_S if self._running else None):
                if key.fileobj is self._link:
                    self._receive()
                else:
                    self._read(key.fd, key.data)
            for agent in list(self._running.values()):
                self._check(agent)

    def _send(self, **message: Any) -> None:
        self._link.sendall(json.dumps(message).encode() + b"\n")

    def _receive(self) -> None:
        data = self._link.recv(1 << 18)
        if not data:
            for agent in self._running.values():
                _kill_group(agent.pid)
            os._exit(0)
        *lines, self._partial_line = (self._partial_line + data).split(b"\n")
        for line in lines:
            message = json.loads(line)
            match message.pop("what"):
                case "build":
                    self._prepare(message)
                case "start":
                    self._start(**message)
                case "kill" if message["number"] in self._running:
                    agent = self._running[message["number"]]
                    agent.why = agent.why or message["why"]
                    _kill_group(agent.pid)

    def _prepare(self, build: dict[str, Any]) -> None:
        self._build = build
        try:
            if build["function"]:
                self._function = user_code.load(build["function"], where="env.function")
                if prepare := getattr(self._function, "prepare", None):
                    prepare(**build["options"])
        except WindfallError as e:
            self._send(what="refused", error=e.what, where=e.where, fix=e.fix)
        except Exception as e:  # fault boundary: the agent's own code
            self._send(
                what="refused", error=f"{type(e).__name__}: {e}", where="env.function", fix=traceback.format_exc()
            )
        else:
            gc.collect()
            gc.freeze()  # agents share these objects: the garbage collector would copy their pages
            self._send(what="ready")

    def _start(self, number: int, task: dict[str, Any], variables: dict[str, str]) -> None:
        pipes = {name: os.pipe() for name in ("stdout", "stderr", "value")}
        with tempfile.TemporaryFile() as stdin:
            stdin.write(json.dumps(task).encode())
            stdin.seek(0)
            sys.stdout.flush()
            sys.stderr.flush()
            pid = os.fork()
            if pid == 0:
                self._become_agent(stdin.fileno(), {name: pipe[1] for name, pipe in pipes.items()}, task, variables)
        with contextlib.suppress(OSError):  # the child does the same; the first one succeeds
            os.setpgid(pid, pid)
        agent = self._running[number] = RunningAgent(number, pid, {})
        for name, (reading, writing) in pipes.items():
            os.close(writing)
            os.set_blocking(reading, False)
            agent.pipes[reading] = name
            self._selector.register(reading, selectors.EVENT_READ, agent)

    def _become_agent(
        self, stdin: int, pipes: dict[str, int], task: dict[str, Any], variables: dict[str, str]
    ) -> NoReturn:
        """In the forked process: run the agent, and never return."""
        code = 1
        try:
            server = os.getppid()
            os.setpgid(0, 0)
            if sys.platform == "linux":
                die_with_parent(server, signal.SIGKILL)
            for source, target in ((stdin, 0), (pipes["stdout"], 1), (pipes["stderr"], 2)):
                os.dup2(source, target)
            value = os.dup2(pipes["value"], 3, inheritable=False)
            os.closerange(4, 4096)  # the link, and the pipes of other agents
            _limit(self._build["memory_mb"])
            if self._build["directory"]:
                os.chdir(self._build["directory"])
            environment = {**self._build["environment"], **variables}
            if self._function is None:
                command = self._build["command"]
                signal.signal(signal.SIGPIPE, signal.SIG_DFL)
                os.execvpe(command[0], command, environment)
            os.environ.clear()
            os.environ.update(environment)
            code = self._call(task, value)
        except BaseException:  # fault boundary: the agent's own code; what it raised is in its output
            traceback.print_exc()
        finally:
            with contextlib.suppress(Exception):  # the output may be closed already
                sys.stdout.flush()
                sys.stderr.flush()
            os._exit(code)

    def _call(self, task: dict[str, Any], value: int) -> int:
        try:
            result = self._function(task, **self._build["options"])
            if inspect.isawaitable(result):
                result = asyncio.run(_awaited(result))
            if not isinstance(result, bool | int | float | str | dict | list | None):
                result = float(result)  # for example a number of numpy
            data = json.dumps(result).encode()
        except SystemExit as e:
            return e.code if isinstance(e.code, int) else 1 if e.code else 0
        if len(data) > RESULT_BYTES:
            print(
                f"the returned value has {len(data)} bytes as JSON; at most {RESULT_BYTES} are accepted",
                file=sys.stderr,
            )
            return 1
        while data:
            data = data[os.write(value, data) :]
        return 0

    def _read(self, fd: int, agent: RunningAgent) -> bool:
        """Read what an agent has written. False: there is nothing more now."""
        name = agent.pipes[fd]
        try:
            data = os.read(fd, 1 << 16)
        except BlockingIOError:
            return False
        if not data:
            self._close(agent, fd)
            return False
        limit = RESULT_BYTES if name == "value" else TAIL_BYTES
        agent.kept[name] = (agent.kept[name] + data)[-limit:]
        return True

    def _close(self, agent: RunningAgent, fd: int) -> None:
        self._selector.unregister(fd)
        os.close(fd)
        del agent.pipes[fd]

    def _check(self, agent: RunningAgent) -> None:
        """If the agent has ended, kill what it started, and report it. Its pid belongs to it until it is reaped."""
        if os.waitid(os.P_PID, agent.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
            return
        _kill_group(agent.pid)
        _, status = os.waitpid(agent.pid, 0)
        for fd in list(agent.pipes):
            while fd in agent.pipes and self._read(fd, agent):
                pass
            if fd in agent.pipes:  # a process that left the group still holds it
                self._close(agent, fd)
        del self._running[agent.number]
        stdout, stderr = (agent.kept[name].decode(errors="replace") for name in ("stdout", "stderr"))
        value = json.loads(agent.kept["value"] or b"null") if self._function is not None else last_line(stdout)
        output = "\n".join(part.strip("\n") for part in (stdout, stderr) if part.strip())
        code = os.waitstatus_to_exitcode(status)
        self._send(what="ended", number=agent.number, code=code, value=value, output=output, why=agent.why)


async def _awaited(awaitable: Any) -> Any:
    return await awaitable


def _limit(memory_mb: int) -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if memory_mb:
        with contextlib.suppress(ValueError, OSError):  # macOS has the name but not the limit
            resource.setrlimit(resource.RLIMIT_AS, (memory_mb << 20, resource.getrlimit(resource.RLIMIT_AS)[1]))


def _kill_group(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)
