"""The process of an agent, forked by a fork server that has imported the agent's function (processes/fork_server.py).

    controller ── start, kill ──▶ fork server ── fork ──▶ reaper ── fork ──▶ agent (limits, variables, isolation.py)
        └── task and key ──────────────────────────────▶   │
        ◀── output and value ──────────────────────────────┘

A fork takes milliseconds, while importing an agent's packages takes seconds. It is safe unless the agent's module
starts threads when it is imported.

An agent that is a function runs in a copy of the fork server. So the task and the key of another agent must not be
found in its memory: they go over a connection of its own to the agent's reaper, which also reads what the agent
prints, and keeps the end of it. Whatever one agent does, or lacks, only that agent fails.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import resource
import signal
import sys
import tempfile
import traceback
from contextlib import suppress
from functools import partial
from typing import Any, NoReturn

from windfall.envs import user_code
from windfall.envs.agents import isolation
from windfall.envs.agents.launcher import last_line
from windfall.envs.agents.role_session import RoleSession
from windfall.envs.failures import message_of
from windfall.envs.process_pool import limits
from windfall.errors import WindfallError
from windfall.processes import fork_server, reaper

TAIL_BYTES = 16 << 10
RESULT_BYTES = 1 << 20
"""Largest value that a function may return, as JSON."""
LIMITS = {"stdout": TAIL_BYTES, "stderr": TAIL_BYTES, "value": RESULT_BYTES}
NOT_JSON = "left a result that is not JSON; does it write to file descriptor 3?"


class _Prepared:
    """What all agents share: read and imported once, in the fork server."""

    build: dict[str, Any]
    protections = isolation.Protections()
    function: Any = None


def prepare(fd: str) -> bool:
    """Import the agent. `fd`: a file descriptor with an AgentProgram and its variables (launcher.py), as JSON. Returns
    whether agents cannot read the hidden folders. Raises WindfallError."""
    isolation.forbid_tracing()  # keys of all sessions pass through reapers, which are copies of this process
    build = _Prepared.build = json.loads(os.pread(int(fd), os.fstat(int(fd)).st_size, 0))
    try:
        _Prepared.protections = _chosen_protections(build["isolation"])
        if build["function"]:
            _Prepared.function = user_code.load(build["function"], where="env.function")
            if call := getattr(_Prepared.function, "prepare", None):
                call(**build["options"])
    except WindfallError:
        raise
    except BaseException as e:  # fault boundary: the agent's own code
        what = f"{type(e).__name__}: {message_of(e)}"
        raise WindfallError(what, where="env.function", fix=traceback.format_exc()) from e
    return not build["hidden"] or _Prepared.protections.hides_files(build["isolation"] == "strict")


def _chosen_protections(level: str) -> isolation.Protections:
    if level == "off":
        return isolation.Protections()
    found = isolation.available()
    if level == "strict" and not found.hides_files(strict=True):
        what = "this system has neither mount namespaces nor Landlock, so agents cannot be isolated"
        raise WindfallError(what, where="env.isolation", fix='Use Linux 5.13 or newer, or set it to "auto".')
    return found


def main() -> NoReturn:
    """In a process that the fork server has forked: run an agent below it, report what it left, and end as it did. The
    channel brings the task and the variables of the agent."""
    server, status = os.getppid(), reaper.FAILED
    try:
        with fork_server.channel() as channel, channel.makefile("rb") as reading:
            given = json.loads(reading.read())
            kept = dict.fromkeys(LIMITS, b"")
            try:
                pipes = {name: os.pipe() for name in LIMITS}
                readers = {pipe[0]: partial(_keep, kept, name) for name, pipe in pipes.items()}
                ends = {name: pipe[1] for name, pipe in pipes.items()}
                status = reaper.run(
                    partial(_become_agent, ends, **given), parent=server, readers=readers, keep=[channel.fileno()]
                )
                report = _report(kept)
            except OSError as e:  # the system has no more file descriptors or processes
                report = {"why": f"could not be started: {e}"}
            channel.sendall(json.dumps(report).encode())
    finally:
        reaper.end_as(status)


def _keep(kept: dict[str, bytes], name: str, data: bytes) -> None:
    kept[name] = (kept[name] + data)[-LIMITS[name] :]


def _report(kept: dict[str, bytes]) -> dict[str, Any]:
    stdout, stderr = (kept[name].decode(errors="replace") for name in ("stdout", "stderr"))
    output = "\n".join(part.strip("\n") for part in (stdout, stderr) if part.strip())
    if _Prepared.function is None:
        return {"output": output, "value": last_line(stdout)}
    try:
        return {"output": output, "value": json.loads(kept["value"] or b"null")}
    except (ValueError, RecursionError):  # fault boundary: the bytes of an agent
        return {"output": output, "why": NOT_JSON}


def _become_agent(pipes: dict[str, int], task: dict[str, Any], variables: dict[str, str]) -> NoReturn:
    code, pid, build = 1, os.getpid(), _Prepared.build
    try:
        os.dup2(pipes["stderr"], 2)
        os.dup2(pipes["stdout"], 1)
        value = os.dup2(pipes["value"], 3, inheritable=False)
        os.closerange(4, resource.getrlimit(resource.RLIMIT_NOFILE)[0])
        with tempfile.TemporaryFile() as stdin:
            stdin.write(json.dumps(task).encode())
            stdin.seek(0)
            os.dup2(stdin.fileno(), 0)
        if build["isolation"] != "off":
            isolation.isolate(build["hidden"], _Prepared.protections, strict=build["isolation"] == "strict")
        limits.limit_memory(build["memory_mb"] << 20)
        environment = {**build["environment"], **variables}
        if _Prepared.function is None:
            signal.signal(signal.SIGPIPE, signal.SIG_DFL)
            os.execvpe(build["command"][0], build["command"], environment)
        os.environ.clear()
        os.environ.update(environment)
        code = _call(task, value, pid)
    except BaseException:  # fault boundary: the agent's own code; what it raised is in its output
        traceback.print_exc()
    finally:
        with suppress(Exception):  # the output may be closed already
            if os.getpid() == pid:
                sys.stdout.flush()
                sys.stderr.flush()
        os._exit(code)


def _call(task: dict[str, Any], value: int, pid: int) -> int:
    try:
        result = _Prepared.function(task, **_Prepared.build["options"], **_session(_Prepared.function))
        if inspect.isawaitable(result):
            result = asyncio.run(_awaited(result))
        if not isinstance(result, bool | int | float | str | dict | list | None):
            result = float(result)  # for example a number of numpy
        data = json.dumps(result).encode()
    except SystemExit as e:
        return e.code if isinstance(e.code, int) else 1 if e.code else 0
    if len(data) > RESULT_BYTES:
        what = f"the returned value has {len(data)} bytes as JSON; at most {RESULT_BYTES} are accepted"
        print(what, file=sys.stderr)
        return 1
    while data and os.getpid() == pid:  # otherwise the function has forked, and this is not the agent
        data = data[os.write(value, data) :]
    return 0


def _session(function: Any) -> dict[str, RoleSession]:
    """The argument `session` of a function that has one and gets no option of this name."""
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):  # some functions written in C have no signature
        return {}
    wanted = "session" in parameters and "session" not in _Prepared.build["options"]
    return {"session": RoleSession.from_environment()} if wanted else {}


async def _awaited(awaitable: Any) -> Any:
    return await awaitable
