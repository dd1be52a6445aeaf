"""The process above one agent. It waits for the agent, kills everything that the agent started, and ends as it did.

    agent server ── fork ──▶ reaper ── fork ──▶ agent ──▶ its children, also those in a session of their own

A process whose parent ends becomes a child of the reaper (PR_SET_CHILD_SUBREAPER), so nothing leaves this tree: not a
daemon, and not a child with its own session. SIGTERM makes the reaper kill the tree; it gets that signal from the agent
server, and from the kernel when the agent server ends. Without subreapers (macOS), only the agent's process group is
killed.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import signal
import sys
import time
from collections.abc import Callable
from typing import NoReturn

from windfall.fleet.parent_death import die_with_parent

PR_SET_CHILD_SUBREAPER = 36
KILL_S = 5.0
"""Seconds that killed processes may take to end. One in uninterruptible sleep may take forever."""
PAUSE_S = 0.005


def run_agent(agent: Callable[[], NoReturn], output: int) -> NoReturn:
    """In a forked process: fork again and run `agent`, which must not return. `output` gets the error if this fails."""
    status = 1
    try:
        status = _run_agent(agent, os.getppid())
    except OSError as e:
        with contextlib.suppress(OSError):
            os.write(output, f"cannot start the process of the agent: {e}\n".encode())
    finally:
        _end_as(status)


def _run_agent(agent: Callable[[], NoReturn], server: int) -> int:
    """Returns how the agent ended, as os.waitpid does."""
    os.setpgid(0, 0)
    signal.signal(signal.SIGTERM, lambda *_: kill_descendants(os.getpid()))
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        die_with_parent(server, signal.SIGTERM)
    reaper = os.getpid()
    pid = os.fork()
    if pid == 0:
        if sys.platform == "linux":
            die_with_parent(reaper, signal.SIGKILL)
        os.setpgid(0, 0)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        agent()
    if sys.platform != "linux":
        signal.signal(signal.SIGTERM, lambda *_: _kill_group(pid))
    os.closerange(3, resource.getrlimit(resource.RLIMIT_NOFILE)[0])  # the pipes are the agent's
    while True:
        ended, status = os.wait()
        if ended == pid:
            break
    _kill_group(pid)
    _kill_the_rest()
    return status


def _kill_the_rest() -> None:
    """Kill and reap all descendants, also those that are started meanwhile."""
    deadline = time.monotonic() + KILL_S
    with contextlib.suppress(ChildProcessError):  # there are no more
        while time.monotonic() < deadline:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
            kill_descendants(os.getpid())
            time.sleep(PAUSE_S)


def _end_as(status: int) -> NoReturn:
    """End with the exit status of another process, or by the same signal."""
    if status > 255 or status == 0:
        os._exit(status >> 8)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        number = status & 0x7F
        if number not in (signal.SIGKILL, signal.SIGSTOP):
            signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
    os._exit(1)


def kill_descendants(pid: int) -> None:
    """Kill all descendants of a process that are there now."""
    for found in descendants(pid):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(found, signal.SIGKILL)


def descendants(pid: int) -> list[int]:
    """The descendants of a process, parents first. Empty without /proc."""
    children: dict[int, list[int]] = {}
    try:
        names = [int(name) for name in os.listdir("/proc") if name.isdigit()]
    except OSError:
        return []
    for name in names:
        try:
            with open(f"/proc/{name}/stat", "rb") as file:
                parent = int(file.read().rpartition(b")")[2].split()[1])
        except (OSError, ValueError, IndexError):  # it has ended meanwhile
            continue
        children.setdefault(parent, []).append(name)
    out = list(children.get(pid, ()))
    for found in out:
        out += children.get(found, ())
    return out


def _kill_group(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)
