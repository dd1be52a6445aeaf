"""The program that starts agents. It imports the agent's function once, and forks a process for every run of it.

    controller ── start, kill ──▶ agent server ── fork ──▶ reaper ── fork ──▶ agent (limits, variables, isolation.py)
               ◀── ended ────────      │            (processes/reaper.py)
                                       └── the link closes: the controller is gone; every agent is killed

Whatever one agent does, or lacks, only that agent fails: not this program, and not the other agents.

An agent that is a function runs in a copy of this process. So the task and the key of another agent must not be found
in its memory: they are read into one buffer, which is erased after the fork, and only the copy decodes it.

A fork takes milliseconds, while importing an agent's packages takes seconds. This program has one thread and no event
loop, so a fork is safe unless the agent's module starts threads when it is imported. What agents print is read here,
and only its end is kept.
"""

from __future__ import annotations

import asyncio
import gc
import inspect
import json
import os
import resource
import selectors
import signal
import socket
import struct
import sys
import tempfile
import time
import traceback
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NoReturn

from windfall.envs import user_code
from windfall.envs.agents import isolation
from windfall.envs.agents.agent_exit import last_line
from windfall.envs.failures import message_of
from windfall.errors import WindfallError
from windfall.processes import reaper

TAIL_BYTES = 16 << 10
"""Bytes of each output of an agent that are kept."""
RESULT_BYTES = 1 << 20
"""Largest value that a function may return, as JSON."""
END_S = 2.0
"""Seconds that killed agents may take to end when the controller is gone."""
POLL_S = 0.1
"""Seconds between checks for agents that have ended without closing their outputs."""
PIPES = ("stdout", "stderr", "value")
SIZES = "<II"
"""How a message begins: the bytes of its JSON, and those that follow it for the agent's process alone."""
NOT_JSON = "left a result that is not JSON; does it write to file descriptor 3?"


@dataclass(eq=False)
class RunningAgent:
    number: int
    pid: int
    """The process id of its reaper."""
    pipes: dict[int, str]
    """By file descriptor: stdout, stderr or value."""
    kept: dict[str, bytes] = field(default_factory=lambda: {"stdout": b"", "stderr": b"", "value": b""})
    why: str = ""
    """Why it was killed."""
    killed_s: float = 0.0
    """When it was killed (monotonic clock, seconds)."""


def main() -> None:
    isolation.forbid_tracing()  # keys of all sessions pass through this process
    reaper.adopt_orphans()
    AgentServer(socket.socket(fileno=int(sys.argv[1]))).run()


class AgentServer:
    def __init__(self, link: socket.socket) -> None:
        self._link = link
        self._running: dict[int, RunningAgent] = {}
        self._selector = selectors.DefaultSelector()
        self._selector.register(link, selectors.EVENT_READ)
        self._build: dict[str, Any] = {}
        self._function: Any = None
        self._protections = isolation.Protections()
        self._helpers: set[int] = set()
        """Processes that the agent's module has started when it was imported."""
        self._orphans = False
        """A reaper was killed, so processes of its agent may have become children of this one."""
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        self._file_limit = soft
        """Limit of an agent's open files. This process takes three for each agent, so its own limit is raised."""
        with suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))

    def run(self) -> None:
        while True:
            for key, _ in self._selector.select(POLL_S if self._running or self._orphans else None):
                if key.fileobj is self._link:
                    self._receive()
                else:
                    self._read(key.fd, key.data)
            for agent in list(self._running.values()):
                self._check(agent)
            if self._orphans:
                self._kill_orphans()

    def _send(self, **message: Any) -> None:
        self._link.sendall(json.dumps(message).encode() + b"\n")

    def _receive(self) -> None:
        sizes = struct.unpack(SIZES, self._read_exactly(struct.calcsize(SIZES)))
        message, secret = json.loads(self._read_exactly(sizes[0])), self._read_exactly(sizes[1])
        match message.pop("what"):
            case "build":
                self._prepare(message)
            case "start":
                self._start(message["number"], secret)
                secret[:] = bytes(len(secret))  # the processes of later agents are copies of this one
            case "kill" if message["number"] in self._running:
                agent = self._running[message["number"]]
                agent.why = agent.why or message["why"]
                _kill(agent)

    def _read_exactly(self, count: int) -> bytearray:
        """Read into one buffer, without copies that could not be erased."""
        data, have = bytearray(count), 0
        while have < count:
            got = self._link.recv_into(memoryview(data)[have:])
            if not got:
                self._end()
            have += got
        return data

    def _end(self) -> NoReturn:
        """Kill all agents, and give their reapers time to see to it."""
        for agent in self._running.values():
            _kill(agent)
        deadline = time.monotonic() + END_S
        while self._running and time.monotonic() < deadline:
            for agent in list(self._running.values()):
                if os.waitpid(agent.pid, os.WNOHANG)[0]:
                    del self._running[agent.number]
            time.sleep(reaper.PAUSE_S)
        os._exit(0)

    def _prepare(self, build: dict[str, Any]) -> None:
        self._build = build
        try:
            self._protections = self._chosen_protections(build["isolation"])
            if build["function"]:
                self._function = user_code.load(build["function"], where="env.function")
                if prepare := getattr(self._function, "prepare", None):
                    prepare(**build["options"])
        except WindfallError as e:
            self._send(what="refused", error=e.what, where=e.where, fix=e.fix)
        except BaseException as e:  # fault boundary: the agent's own code
            self._send(
                what="refused",
                error=f"{type(e).__name__}: {message_of(e)}",
                where="env.function",
                fix=traceback.format_exc(),
            )
        else:
            self._helpers = set(reaper.children_of(os.getpid()))
            gc.collect()
            gc.freeze()  # agents share these objects: the garbage collector would copy their pages
            hides = not build["hidden"] or self._protections.hides_files(build["isolation"] == "strict")
            self._send(what="ready", hides_files=hides)

    def _chosen_protections(self, level: str) -> isolation.Protections:
        """What isolates agents at this level of env.isolation. Raises WindfallError."""
        if level == "off":
            return isolation.Protections()
        found = isolation.available()
        if level == "strict" and not found.hides_files(strict=True):
            what = "this system has neither mount namespaces nor Landlock, so agents cannot be isolated"
            raise WindfallError(what, where="env.isolation", fix='Use Linux 5.13 or newer, or set it to "auto".')
        return found

    def _start(self, number: int, secret: bytearray) -> None:
        """Start an agent. `secret`: its task and its variables, as JSON, which only the agent's process decodes. If the
        system refuses, for example because it has no more file descriptors or processes, this agent has failed."""
        pipes: dict[str, tuple[int, int]] = {}
        try:
            for name in PIPES:
                pipes[name] = os.pipe()
            pid = self._fork(pipes, secret)
        except OSError as e:
            for fd in (fd for pipe in pipes.values() for fd in pipe):
                os.close(fd)
            self._send(what="ended", number=number, code=1, why=f"could not be started: {e}")
            return
        agent = self._running[number] = RunningAgent(number, pid, {})
        for name, (reading, writing) in pipes.items():
            os.close(writing)
            os.set_blocking(reading, False)
            agent.pipes[reading] = name
            self._selector.register(reading, selectors.EVENT_READ, agent)

    def _fork(self, pipes: dict[str, tuple[int, int]], secret: bytearray) -> int:
        sys.stdout.flush()
        sys.stderr.flush()
        server = os.getpid()
        pid = os.fork()
        if pid == 0:
            ends = {name: pipe[1] for name, pipe in pipes.items()}
            reaper.run(partial(self._become_agent, ends, secret), parent=server, output=ends["stderr"])
        return pid

    def _become_agent(self, pipes: dict[str, int], secret: bytearray) -> NoReturn:
        """In the process of the agent: run it, and never return."""
        code, pid = 1, os.getpid()
        try:
            os.dup2(pipes["stderr"], 2)
            os.dup2(pipes["stdout"], 1)
            value = os.dup2(pipes["value"], 3, inheritable=False)
            os.closerange(4, resource.getrlimit(resource.RLIMIT_NOFILE)[0])  # the link, and pipes of other agents
            given = json.loads(secret)
            task, variables = given["task"], given["variables"]
            with tempfile.TemporaryFile() as stdin:
                stdin.write(json.dumps(task).encode())
                stdin.seek(0)
                os.dup2(stdin.fileno(), 0)
            build = self._build
            if build["isolation"] != "off":
                isolation.isolate(build["hidden"], self._protections, strict=build["isolation"] == "strict")
            _limit(build["memory_mb"], self._file_limit)
            environment = {**self._build["environment"], **variables}
            if self._function is None:
                command = self._build["command"]
                signal.signal(signal.SIGPIPE, signal.SIG_DFL)
                os.execvpe(command[0], command, environment)
            os.environ.clear()
            os.environ.update(environment)
            code = self._call(task, value, pid)
        except BaseException:  # fault boundary: the agent's own code; what it raised is in its output
            traceback.print_exc()
        finally:
            with suppress(Exception):  # the output may be closed already
                if os.getpid() == pid:
                    sys.stdout.flush()
                    sys.stderr.flush()
            os._exit(code)

    def _call(self, task: dict[str, Any], value: int, pid: int) -> int:
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
        while data and os.getpid() == pid:  # otherwise the function has forked, and this is not the agent
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
        """If the agent has ended, report it. Its reaper has killed what it started."""
        ended, status = os.waitpid(agent.pid, os.WNOHANG)
        self._orphans = self._orphans or os.WIFSIGNALED(status)
        if not ended:
            if agent.killed_s and time.monotonic() - agent.killed_s > 2 * reaper.KILL_S:
                os.kill(agent.pid, signal.SIGKILL)  # the reaper does not react
            return
        for fd in list(agent.pipes):
            while fd in agent.pipes and self._read(fd, agent):
                pass
            if fd in agent.pipes:  # a process that could not be killed still holds it
                self._close(agent, fd)
        del self._running[agent.number]
        stdout, stderr = (agent.kept[name].decode(errors="replace") for name in ("stdout", "stderr"))
        output = "\n".join(part.strip("\n") for part in (stdout, stderr) if part.strip())
        ended = {"number": agent.number, "code": os.waitstatus_to_exitcode(status), "output": output}
        try:
            value = json.loads(agent.kept["value"] or b"null") if self._function is not None else last_line(stdout)
            self._send(what="ended", **ended, value=value, why=agent.why)
        except (ValueError, RecursionError):  # fault boundary: the bytes of an agent
            self._send(what="ended", **ended, why=agent.why or NOT_JSON)

    def _kill_orphans(self) -> None:
        """Kill what agents left behind whose reapers were killed, until nothing is left."""
        known = self._helpers | {agent.pid for agent in self._running.values()}
        left = [pid for pid in reaper.children_of(os.getpid()) if pid not in known]
        self._orphans = bool(left)
        for pid in left:
            reaper.kill_descendants(pid)
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
            with suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)


async def _awaited(awaitable: Any) -> Any:
    return await awaitable


def _limit(memory_mb: int, files: int) -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_NOFILE, (files, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    if memory_mb:
        with suppress(ValueError, OSError):  # macOS has the name but not the limit
            resource.setrlimit(resource.RLIMIT_AS, (memory_mb << 20, resource.getrlimit(resource.RLIMIT_AS)[1]))


def _kill(agent: RunningAgent) -> None:
    """Kill an agent with all that it has started. Its reaper ends then."""
    agent.killed_s = agent.killed_s or time.monotonic()
    reaper.kill_descendants(agent.pid)
    for number in (signal.SIGTERM, signal.SIGCONT):
        with suppress(ProcessLookupError):
            os.kill(agent.pid, number)
