"""One local worker process: started in its own session, ended by its pid and process group, never by name.

- Its standard input is empty. Its output is appended to its log. It gets exactly the given environment variables:
  secrets such as the run's token are passed there, never on the command line, which every user of the machine can read.
- It dies with the thread that started it, no matter how that thread ends (parent_death.py). Start workers from the main
  thread.
- When it ends, the rest of its process group is killed before it is reaped. Until it is reaped, no other process can
  get its pid.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Container, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from windfall.errors import WindfallError, describe_write, is_disk_full
from windfall.processes import parent_death
from windfall.processes.handle import Handle

POLL_S = 0.05
"""Seconds between checks for the end of a process on systems without pidfd."""


def age_s() -> float:
    """Seconds since this process started, or 0 on systems that do not report it."""
    try:
        began = int(_stat("self")[19]) / os.sysconf("SC_CLK_TCK")
        return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - began)
    except (OSError, AttributeError, ValueError, IndexError):  # not Linux
        return 0.0


def stopped(pids: Iterable[int]) -> dict[int, int]:
    """Those of the processes that are stopped, by SIGSTOP or by a debugger, with their CPU time in clock ticks. Empty
    on systems that do not report it."""
    found: dict[int, int] = {}
    for pid in pids:
        with contextlib.suppress(OSError, ValueError, IndexError):  # it has ended, or not Linux
            state = _stat(pid)
            if state[0] in "Tt":
                found[pid] = int(state[11]) + int(state[12])
    return found


def _stat(pid: int | str) -> list[str]:
    """The fields of /proc/PID/stat from the state on."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


async def start(*, name: str, argv: Sequence[str], env: Mapping[str, str], log: Path) -> Handle:
    """Start the program `argv[0]` with the arguments `argv[1:]`."""
    return launch(name=name, argv=argv, env=env, log=log)


def launch(
    *, name: str, argv: Sequence[str], env: Mapping[str, str], log: Path | int, channel: int | None = None,
    death: int = signal.SIGKILL,
) -> Handle:  # fmt: skip
    """Like `start`, but synchronous, so it cannot be canceled. `log` may be a file descriptor to write to. `channel` is
    a file descriptor to use as standard input and output. `death` is the signal that the process gets when its parent
    dies."""
    program = shutil.which(argv[0], path=env.get("PATH", os.defpath))
    if program is None:
        raise WindfallError(f"program '{argv[0]}' not found", where=f"worker {name}", fix="Give its full path.")
    output = os.dup(log) if isinstance(log, int) else open_log(log)
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
    handle = Handle(name=name, pid=child.pid, send=lambda number: send_signal(child.pid, number))
    _watch(child, handle)
    return handle


def send_signal(pid: int, number: int) -> None:
    """Send SIGKILL to the whole group, any other signal to its leader only: it may need its children while it drains.
    The leader must not have been reaped yet."""
    with contextlib.suppress(ProcessLookupError):
        (os.killpg if number == signal.SIGKILL else os.kill)(pid, number)


def reap(known: Container[int], options: int = 0) -> tuple[int, int] | None:
    """Reap a child that has ended. Returns its pid and exit code, or None if there is none. `known`: the children that
    have a process group of their own; the rest of it is killed first, while the pid still belongs to it."""
    try:
        ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT | options)
    except ChildProcessError:
        return None
    if ended is None:
        return None
    if ended.si_pid in known:
        send_signal(ended.si_pid, signal.SIGKILL)
    _, status = os.waitpid(ended.si_pid, 0)
    return ended.si_pid, os.waitstatus_to_exitcode(status)


def open_log(path: Path) -> int:
    """Open the log for appending and return its file descriptor."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    except OSError as e:
        fix = "A worker writes its output there. Make the folder writable, or use another run folder."
        raise WindfallError(f"cannot open the log: {describe_write(e, path)}", where=str(path), fix=fix) from e


class _LogFile(io.FileIO):
    """A log on a full disk loses lines; a line must not end the process."""

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except OSError as e:
            if not is_disk_full(e):
                raise
            return len(data)


def tolerate_full_log() -> None:
    """From now on, output of this process that does not fit onto the disk is dropped."""
    for name, fd in (("stdout", 1), ("stderr", 2)):
        buffer = io.BufferedWriter(_LogFile(fd, "w", closefd=False))
        setattr(sys, name, io.TextIOWrapper(buffer, errors="backslashreplace", line_buffering=True))


def _watch(child: subprocess.Popen[bytes], handle: Handle) -> None:
    """Call `handle.ended` when the process has ended."""
    loop = asyncio.get_running_loop()
    try:
        fd = os.pidfd_open(child.pid)
    except OSError:  # an old kernel or a sandbox
        fd = -1

    def check_ended() -> None:
        if os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
            if fd < 0:
                loop.call_later(POLL_S, check_ended)
            return
        send_signal(child.pid, signal.SIGKILL)
        if fd >= 0:
            loop.remove_reader(fd)
            os.close(fd)
        handle.ended(child.wait())

    if fd >= 0:
        loop.add_reader(fd, check_ended)
    else:
        loop.call_later(POLL_S, check_ended)
