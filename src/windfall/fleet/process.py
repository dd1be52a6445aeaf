"""One local worker process: started in a session of its own, ended by its pid and process group, never by name.

- Its standard input is empty; what it prints is appended to its log. The environment is the given one and no other:
  secrets such as the run's token go there, never on the command line, which every user of the machine can read.
- It dies with the thread that started it, however that ends (`guard.py`). Start workers from the main thread.
- When it ends, what is left of its process group is killed before it is reaped: until then its pid cannot be another's.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from windfall.errors import WindfallError
from windfall.fleet import parent_death
from windfall.fleet.base import Handle

POLL_S = 0.05
"""How often we look for the end of a process where the system has no pidfd."""


def age_s() -> float:
    """How long this process has been running; 0 where the system does not say."""
    try:
        began = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19]) / os.sysconf("SC_CLK_TCK")
        return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - began)
    except (OSError, AttributeError, ValueError, IndexError):  # not Linux
        return 0.0


async def start(*, name: str, argv: Sequence[str], env: Mapping[str, str], log: Path) -> Handle:
    """Start `argv`, which names its program first."""
    return launch(name=name, argv=argv, env=env, log=log)


def launch(
    *,
    name: str,
    argv: Sequence[str],
    env: Mapping[str, str],
    log: Path,
    channel: int | None = None,
    death: int = signal.SIGKILL,
) -> Handle:
    """As `start`, without a place to be cancelled. `channel` is a file descriptor to be standard input and output."""
    program = shutil.which(argv[0], path=env.get("PATH", os.defpath))
    if program is None:
        raise WindfallError(f"there is no program '{argv[0]}'", where=f"worker {name}", fix="Give its full path.")
    output = open_log(log)
    try:
        child = subprocess.Popen(
            [sys.executable, "-I", "-S", parent_death.__file__, str(os.getpid()), str(int(death)), program, *argv[1:]],
            stdin=subprocess.DEVNULL if channel is None else channel,
            stdout=output if channel is None else channel,
            stderr=output,
            env=dict(env),
            start_new_session=True,
        )
    finally:
        os.close(output)
    handle = Handle(name=name, pid=child.pid, send=lambda number: send(child.pid, number))
    _watch(child, handle)
    return handle


def send(pid: int, number: int) -> None:
    """SIGKILL goes to the group, all else to the leader: it may need its children to leave in order.

    Only for a leader that has not been reaped yet.
    """
    with contextlib.suppress(ProcessLookupError):
        (os.killpg if number == signal.SIGKILL else os.kill)(pid, number)


def open_log(path: Path) -> int:
    """A file descriptor to append to."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    except OSError as e:
        fix = "A worker writes its output there: make the folder writable, or give the run another."
        raise WindfallError(f"cannot open the log: {e.strerror}", where=str(path), fix=fix) from e


def _watch(child: subprocess.Popen[bytes], handle: Handle) -> None:
    """Tell the handle when the process has ended."""
    loop = asyncio.get_running_loop()
    try:
        fd = os.pidfd_open(child.pid)
    except OSError:  # an old kernel or a sandbox
        fd = -1

    def look() -> None:
        if os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
            if fd < 0:
                loop.call_later(POLL_S, look)
            return
        send(child.pid, signal.SIGKILL)
        if fd >= 0:
            loop.remove_reader(fd)
            os.close(fd)
        handle.ended(child.wait())

    if fd >= 0:
        loop.add_reader(fd, look)
    else:
        loop.call_later(POLL_S, look)
