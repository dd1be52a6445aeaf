"""The process above a program of the user. It waits for the program, kills all that it started, and ends as it did.

    agent server ── fork ──▶ reaper ── fork ──▶ agent ──▶ its children, also those in a session of their own

    environment pool ── python -c "... main()" ──▶ reaper ── fork ──▶ reaper ── fork ──▶ environment ──▶ its children
                                            output ◀─── pipe ──────────────────────────────┘

- A process whose parent ends becomes a child of the reaper (PR_SET_CHILD_SUBREAPER), so nothing leaves this tree: not a
  daemon, and not a child with its own session.
- SIGTERM makes the reaper kill the tree. It gets this signal from its parent, and from the kernel when its parent ends.
- If the reaper itself is killed, the subreaper above it gets what is left of the tree, and kills it: the agent server,
  or the first of the two reapers of an environment. If that first one is killed, the second one gets SIGTERM.
- The first reaper of an environment also reads what the environment prints, and keeps a limited part of it
  (output_log.py).

Without subreapers (macOS), there is one reaper, and it kills only the program's process group.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import os
import resource
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NoReturn

from windfall.processes import output_log
from windfall.processes.parent_death import die_with_parent

PR_SET_CHILD_SUBREAPER = 36
KILL_S = 5.0
"""Seconds that killed processes may take to end. One in uninterruptible sleep may take forever."""
PAUSE_S = 0.005
READ_BYTES = 1 << 16
FAILED = 1 << 8
"""Exit status 1, as os.waitpid returns it."""
FORWARDED = signal.SIGUSR1
"""A signal that a reaper passes on to its program."""


def start(
    entry: str, fds: Sequence[int], *, env: Mapping[str, str], python: Sequence[str] = (), folder: str = "",
    log: Path | None = None,
) -> subprocess.Popen[bytes]:  # fmt: skip
    """Start a reaper and below it the program `entry`, given as module:function. The program gets the file descriptors
    `fds`; their numbers are its arguments. `python`: options of the interpreter. `log`: file for what it prints; None
    shows a little of it on standard error."""
    arguments = (os.getpid(), log or output_log.STANDARD_ERROR, entry, *fds)
    command = [sys.executable, *python, "-c", f"from {__name__} import main; main()", *map(str, arguments)]
    return subprocess.Popen(
        command, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, pass_fds=fds, start_new_session=True,
        cwd=folder or None,
    )  # fmt: skip


def end(process: subprocess.Popen[bytes]) -> None:
    """Have a reaper kill its program and all that the program started, even if the reaper was stopped (SIGSTOP)."""
    for number in (signal.SIGTERM, signal.SIGCONT):
        process.send_signal(number)


def main() -> NoReturn:
    """The program of a reaper that is started as a process of its own. Its arguments: the pid of its parent, the log
    for what the program prints (output_log.py), the program as module:function, and the arguments of the program."""
    parent, log, entry, *arguments = sys.argv[1:]
    sys.argv[1:] = arguments
    reader, writer = os.pipe()
    reaper = os.getpid()

    def program() -> NoReturn:
        os.dup2(writer, 1)
        os.dup2(writer, 2)
        os.close(reader)
        os.close(writer)
        if sys.platform != "linux":  # a second reaper has no use, and would hide the group of the program
            _call(entry)
        run(lambda: _call(entry), parent=reaper, output=2)

    status = FAILED
    try:
        pid = _start(program, int(parent))
        os.dup2(reader, 0)
        os.closerange(3, resource.getrlimit(resource.RLIMIT_NOFILE)[0])  # what was passed on is the program's
        status = _wait_reading(pid, output_log.opened(log))
    except OSError as e:
        print(f"cannot run {entry} in a process of its own: {e}", file=sys.stderr, flush=True)
    finally:
        _end_as(status)


def _call(entry: str) -> NoReturn:
    module, _, function = entry.partition(":")
    getattr(importlib.import_module(module), function)()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def run(program: Callable[[], NoReturn], *, parent: int, output: int) -> NoReturn:
    """In a process that `parent` has just forked: fork again and run `program`, which must not return. `output` gets
    the error if this fails."""
    status = FAILED
    try:
        pid = _start(program, parent)
        os.closerange(3, resource.getrlimit(resource.RLIMIT_NOFILE)[0])  # pipes and sockets are the program's
        status = _wait(pid)
        _finish(pid)
    except OSError as e:
        with contextlib.suppress(OSError):
            os.write(output, f"cannot start a process: {e}\n".encode())
    finally:
        _end_as(status)


def _start(program: Callable[[], NoReturn], parent: int) -> int:
    """Make this process a reaper, and fork the process of the program. Returns its pid."""
    if os.getsid(0) != os.getpid():
        os.setpgid(0, 0)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})  # one that comes before the fork must not be lost
    signal.signal(signal.SIGTERM, lambda *_: kill_descendants(os.getpid()))
    if sys.platform == "linux":
        adopt_orphans()
        die_with_parent(parent, signal.SIGTERM)
    reaper = os.getpid()
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            if sys.platform == "linux":
                die_with_parent(reaper, signal.SIGKILL)
            os.setpgid(0, 0)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
            program()
        except SystemExit as e:
            status = e.code if isinstance(e.code, int) else 1 if e.code else 0
        except BaseException as e:  # fault boundary: the program must not continue as a second reaper
            sys.excepthook(type(e), e, e.__traceback__)
        finally:
            os._exit(status)
    if sys.platform != "linux":
        signal.signal(signal.SIGTERM, lambda *_: _kill_group(pid))
    signal.signal(FORWARDED, lambda *_: _forward(pid))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    return pid


def _forward(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, FORWARDED)


def _wait(pid: int) -> int:
    """Wait for the program. Returns how it ended, as os.waitpid does. Also reaps what it left behind."""
    while True:
        ended, status = os.wait()
        if ended == pid:
            return status


def _wait_reading(pid: int, log: output_log.Log) -> int:
    """Like `_wait`. Meanwhile, log what arrives at standard input, until everything that could print has ended."""
    woken, wakes = os.pipe()
    for fd in (0, woken, wakes):
        os.set_blocking(fd, False)
    signal.set_wakeup_fd(wakes, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)  # handled only to wake up the select
    reading = True
    while (status := _reap(pid)) is None:
        ready, _, _ = select.select([0, woken] if reading else [woken], [], [])
        if woken in ready:
            os.read(woken, READ_BYTES)
        if 0 in ready:
            reading = _read(log)
    _finish(pid)
    while reading and select.select([0], [], [], 0)[0]:  # what is left in the pipe
        reading = _read(log)
    return status


def _reap(pid: int) -> int | None:
    """Reap what has ended. Returns how the program ended, or None while it runs."""
    status, ended = None, 1
    with contextlib.suppress(ChildProcessError):  # there are no more
        while ended:
            ended, how = os.waitpid(-1, os.WNOHANG)
            status = how if ended == pid else status
    return status


def _read(log: output_log.Log) -> bool:
    """False: nothing can arrive any more."""
    data = os.read(0, READ_BYTES)
    log.write(data)
    return bool(data)


def _finish(pid: int) -> None:
    """The program has ended: kill all that it started."""
    _kill_group(pid)
    _kill_the_rest()


def adopt_orphans() -> None:
    """Become the parent of descendants whose own parent ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def _kill_the_rest() -> None:
    """Kill and reap all descendants, also those that are started meanwhile. This does not pause while there are new
    ones: a process that only forks and exits would otherwise be gone whenever it is looked for."""
    deadline, before = time.monotonic() + KILL_S, list[int]()
    with contextlib.suppress(ChildProcessError):  # there are no more
        while time.monotonic() < deadline:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
            found = kill_descendants(os.getpid())
            if found == before:
                time.sleep(PAUSE_S)
            before = found


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


def kill_descendants(pid: int) -> list[int]:
    """Kill all descendants of a process that are there now, and the process groups of their own. Returns them."""
    found = descendants(pid)
    groups = set[int]()
    for process in found:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            groups.add(os.getpgid(process))
            os.kill(process, signal.SIGKILL)
    # A process that has forked since then is in the same group. A group without a leader is also theirs: those of
    # windfall have one.
    for group in groups:
        if group in found or not os.path.exists(f"/proc/{group}"):
            _kill_group(group)
    return found


def descendants(pid: int) -> list[int]:
    """The descendants of a process, parents first. Empty without /proc."""
    children = _children()
    out = list(children.get(pid, ()))
    for found in out:
        out += children.get(found, ())
    return out


def children_of(pid: int) -> list[int]:
    return _children().get(pid, [])


def _children() -> dict[int, list[int]]:
    """The children of every process."""
    children: dict[int, list[int]] = {}
    try:
        names = [int(name) for name in os.listdir("/proc") if name.isdigit()]
    except OSError:
        return {}
    for name in names:
        try:
            with open(f"/proc/{name}/stat", "rb") as file:
                parent = int(file.read().rpartition(b")")[2].split()[1])
        except (OSError, ValueError, IndexError):  # it has ended meanwhile
            continue
        children.setdefault(parent, []).append(name)
    return children


def _kill_group(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)
