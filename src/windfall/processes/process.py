"""One process of this machine: started in its own session, ended by its pid and process group, never by name.

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
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from windfall.errors import WindfallError, describe_write, is_disk_full
from windfall.processes import parent_death

EXIT_REFUSED = 3
"""Exit status of a worker that the controller refused. It must not be restarted, because it would be refused again."""
EXIT_NO_CONTROLLER = 5
"""Exit status of a worker that found no controller within its patience."""
BEGAN = "WINDFALL_BEGAN_S"
"""Environment variable of a process whose machine was there for the run before it: since when (`began_s`)."""
KILL_TIMEOUT_S = 10.0

POLL_S = 0.05
"""Seconds between checks for the end of a process on systems without pidfd."""


class Handle:
    """A running process. The code that started the process provides `send`, and calls `ended` once."""

    def __init__(
        self,
        *,
        name: str,
        pid: int,
        send: Callable[[int], None],
        kill_timeout_s: float = KILL_TIMEOUT_S,
        waiting: bool = False,
    ) -> None:
        """`send` sends a signal, given by its number, to the process. `pid`: the process id on the worker's machine, or
        the number of its job. `kill_timeout_s`: seconds to wait for its end after SIGKILL. `waiting`: it does not run
        yet; `runs` will say when it does."""
        self.name = name
        self.pid = pid
        self._send = send
        self._kill_timeout_s = kill_timeout_s
        self._ran_from: float | None = None if waiting else time.monotonic()
        self._end: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    def runs(self) -> None:
        if self._ran_from is None:
            self._ran_from = time.monotonic()

    @property
    def lived_s(self) -> float:
        """Seconds that the process has run, without the time that it waited for a machine."""
        return 0.0 if self._ran_from is None else time.monotonic() - self._ran_from

    def ended(self, code: int) -> None:
        """Record the end of the process. `code` is its exit status, or the negative number of the fatal signal."""
        if not self._end.done():
            self._end.set_result(code)

    @property
    def running(self) -> bool:
        return not self._end.done()

    def when_ended(self, call: Callable[[], None]) -> None:
        """Call this function soon after the process has ended, or soon if it has ended already."""
        self._end.add_done_callback(lambda _: call())

    def signal(self, number: int) -> None:
        if self.running:
            self._send(number)

    def kill(self) -> None:
        if self.running:
            self._send(signal.SIGKILL)

    async def terminate(self, grace_s: float) -> int:
        """Send SIGTERM to the process so that it can drain, then SIGKILL to its group after `grace_s` seconds."""
        try:
            if self.running and grace_s > 0:
                self._send(signal.SIGTERM)
                await self.ends_within(grace_s)
        finally:
            self.kill()
        if not await self.ends_within(self._kill_timeout_s):
            limit = f"{self._kill_timeout_s:g} s"
            raise TimeoutError(f"waited {limit} for {self.name} (pid {self.pid}) to end by SIGKILL")
        return self._end.result()

    async def ends_within(self, timeout_s: float) -> bool:
        await asyncio.wait({self._end}, timeout=timeout_s)
        return not self.running

    async def wait(self) -> int:
        """Wait without a time limit for the end. Returns the exit status, or the negative number of the signal."""
        return await asyncio.shield(self._end)


def began_s() -> float:
    """When this process started (seconds since the machine booted)."""
    return int(state("self")[19]) / os.sysconf("SC_CLK_TCK")


def age_s() -> float:
    """Seconds since this process started, or since `BEGAN`."""
    began = float(os.environ.get(BEGAN) or began_s())
    return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - began)


def stopped(pids: Iterable[int]) -> dict[int, int]:
    """Those of the processes that are stopped, by SIGSTOP or by a debugger, with their CPU time in clock ticks."""
    found: dict[int, int] = {}
    for pid in pids:
        with contextlib.suppress(OSError):  # it has ended
            fields = state(pid)
            if fields[0] in "Tt":
                found[pid] = int(fields[11]) + int(fields[12])
    return found


def state(pid: int | str) -> list[str]:
    """The fields of /proc/PID/stat from the state on."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def start(
    *,
    name: str,
    argv: Sequence[str],
    env: Mapping[str, str],
    log: Path | int,
    channel: int | None = None,
    death: int = signal.SIGKILL,
) -> Handle:
    """Start the program `argv[0]` with the arguments `argv[1:]`. `log` may be a file descriptor to write to. `channel`
    is a file descriptor to use as standard input and output. `death` is the signal that the process gets when its
    parent dies."""
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
    return watch(child, name, lambda number: send_signal(child.pid, number))


def send_signal(pid: int, number: int) -> None:
    """Send SIGKILL to the whole group, any other signal to its leader only: it may need its children while it drains.
    The leader must not have been reaped yet."""
    with contextlib.suppress(ProcessLookupError):
        (os.killpg if number == signal.SIGKILL else os.kill)(pid, number)


def open_log(path: Path) -> int:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    except OSError as e:
        fix = "Output is written there. Make its folder writable, or choose another one."
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


def watch(child: subprocess.Popen[bytes], name: str, send: Callable[[int], None]) -> Handle:
    """The handle of a process that was just started as the leader of a process group. For `send` see Handle."""
    loop, handle = asyncio.get_running_loop(), Handle(name=name, pid=child.pid, send=send)
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
    return handle
