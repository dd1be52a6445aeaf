"""The process above a program of the user. It waits for the program, kills all that it started, and ends as it did.

    fork server of agents ── fork ──▶ reaper ── fork ──▶ agent ──▶ its children, also those in a session of their own

    environment pool ── python -c "... main()" ──▶ reaper ── fork ──▶ reaper ── fork ──▶ environment ──▶ its children
                                            output ◀─── pipe ──────────────────────────────┘

- A process whose parent ends becomes a child of the reaper (PR_SET_CHILD_SUBREAPER), so nothing leaves this tree: not a
  daemon, and not a child with its own session.
- SIGTERM makes the reaper kill the tree. It gets this signal from its parent, and from the kernel when its parent ends.
- If the reaper itself is killed, the subreaper above it gets what is left of the tree, and kills it: the fork server,
  or the first of the two reapers of an environment. If that first one is killed, the second one gets SIGTERM.
- A reaper can read what its program prints. That of an environment keeps a limited part of it (output_log.py).
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
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import NoReturn

from windfall.processes import output_log, process
from windfall.processes.parent_death import die_with_parent
from windfall.processes.process import Handle

PR_SET_CHILD_SUBREAPER = 36
KILL_S = 5.0
"""Seconds that killed processes may take to end. One in uninterruptible sleep may take forever."""
PAUSE_S = 0.005
READ_BYTES = 1 << 16
FAILED = 1 << 8
"""Exit status 1, as os.waitpid returns it."""
FORWARDED = signal.SIGUSR1
"""A signal that a reaper passes on to its program."""
Readers = Mapping[int, Callable[[bytes], object]]
"""By file descriptor: what gets the bytes that arrive there."""


def start(
    entry: str,
    arguments: Sequence[object],
    *,
    name: str,
    env: Mapping[str, str],
    fds: Sequence[int] = (),
    python: Sequence[str] = (),
    folder: str = "",
    log: Path | None = None,
) -> Handle:
    """Start a reaper and below it the program `entry`, given as module:function, with these arguments and the file
    descriptors `fds`. `python`: options of the interpreter. `log`: file for what it prints; None shows a little of it
    on standard error. Killing the handle kills the program and all that it started."""
    words = (os.getpid(), log or output_log.STANDARD_ERROR, entry, *arguments)
    command = [sys.executable, *python, "-c", f"from {__name__} import main; main()", *map(str, words)]
    child = subprocess.Popen(
        command,
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        pass_fds=fds,
        start_new_session=True,
        cwd=folder or None,
    )
    return process.watch(child, name, lambda number: send_signal(child.pid, number))


def send_signal(pid: int, number: int) -> None:
    """Send a signal to a reaper. Instead of SIGKILL it gets SIGTERM, and is continued if it was stopped (SIGSTOP)."""
    with contextlib.suppress(ProcessLookupError):
        for sent in (signal.SIGTERM, signal.SIGCONT) if number == signal.SIGKILL else (number,):
            os.kill(pid, sent)


def main() -> NoReturn:
    """The program of a reaper that is started as a process of its own. Its arguments: the pid of its parent, the log
    for what the program prints (output_log.py), the program as module:function, and the arguments of the program."""
    parent, log, entry, *arguments = sys.argv[1:]
    sys.argv[1:] = arguments
    reading, writing = os.pipe()
    reaper = os.getpid()

    def call() -> NoReturn:
        module, _, function = entry.partition(":")
        getattr(importlib.import_module(module), function)()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)

    def program() -> NoReturn:
        os.dup2(writing, 1)
        os.dup2(writing, 2)
        os.close(reading)
        os.close(writing)
        status = FAILED
        try:
            status = run(call, parent=reaper)
        except OSError as e:
            print(f"cannot start a process: {e}", file=sys.stderr, flush=True)
        finally:
            end_as(status)

    status = FAILED
    try:
        status = run(program, parent=int(parent), readers={reading: output_log.opened(log).write})
    except OSError as e:
        print(f"cannot run {entry} in a process of its own: {e}", file=sys.stderr, flush=True)
    finally:
        end_as(status)


def run(
    program: Callable[[], NoReturn], *, parent: int, readers: Readers | None = None, keep: Sequence[int] = ()
) -> int:
    """Make this process, which `parent` has started, a reaper: fork, and run `program` in the new process. Returns how
    the program ended, as os.waitpid does, after all that it started has ended. Of the open files, only those of
    `readers` and `keep` stay open here: pipes and sockets are the program's."""
    readers = readers or {}
    pid = _start(program, parent)
    woken, wakes = os.pipe()
    _close_all_but({0, 1, 2, woken, wakes, *readers, *keep})
    for fd in (woken, wakes, *readers):
        os.set_blocking(fd, False)
    signal.set_wakeup_fd(wakes, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)  # handled only to wake up the select
    opened = set(readers)
    while (status := _reap(pid)) is None:
        ready, _, _ = select.select([woken, *opened], [], [])
        if woken in ready:
            os.read(woken, READ_BYTES)
        opened -= {fd for fd in opened.intersection(ready) if not _read(fd, readers)}
    _kill_group(pid)
    kill_the_rest()
    while ready := select.select(opened, [], [], 0)[0]:  # what is left in the pipes
        opened -= {fd for fd in ready if not _read(fd, readers)}
    return status


def _start(program: Callable[[], NoReturn], parent: int) -> int:
    """Make this process a reaper, and fork the process of the program. Returns its pid."""
    if os.getsid(0) != os.getpid():
        os.setpgid(0, 0)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})  # one that comes before the fork must not be lost
    signal.signal(signal.SIGTERM, lambda *_: kill_descendants(os.getpid()))
    adopt_orphans()
    die_with_parent(parent, signal.SIGTERM)
    reaper = os.getpid()
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
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
    signal.signal(FORWARDED, lambda *_: _forward(pid))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    return pid


def _forward(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, FORWARDED)


def _close_all_but(kept: set[int]) -> None:
    before = -1
    for fd in (*sorted(kept), resource.getrlimit(resource.RLIMIT_NOFILE)[0]):
        if fd > before + 1:  # closerange(0, 0) of Python 3.11 closes everything
            os.closerange(before + 1, fd)
        before = fd


def _reap(pid: int) -> int | None:
    status, ended = None, 1
    with contextlib.suppress(ChildProcessError):  # there are no more
        while ended:
            ended, how = os.waitpid(-1, os.WNOHANG)
            status = how if ended == pid else status
    return status


def _read(fd: int, readers: Readers) -> bool:
    """False: nothing can arrive any more."""
    data = os.read(fd, READ_BYTES)
    readers[fd](data)
    return bool(data)


def adopt_orphans() -> None:
    """Become the parent of descendants whose own parent ends."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def kill_the_rest() -> None:
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


def end_as(status: int) -> NoReturn:
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
    for found_pid in found:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            groups.add(os.getpgid(found_pid))
            os.kill(found_pid, signal.SIGKILL)
    # A process that has forked since then is in the same group. A group without a leader is also theirs: those of
    # windfall have one.
    for group in groups:
        if group in found or not os.path.exists(f"/proc/{group}"):
            _kill_group(group)
    return found


def descendants(pid: int) -> list[int]:
    return descendants_of_all([pid])[pid]


def descendants_of_all(pids: Iterable[int]) -> dict[int, list[int]]:
    """The descendants of each of these processes, from one scan of /proc."""
    children = _children()
    found = {pid: list(children.get(pid, ())) for pid in pids}
    for out in found.values():
        for child in out:
            out += children.get(child, ())
    return found


def children_of(pid: int) -> list[int]:
    return _children().get(pid, [])


def _children() -> dict[int, list[int]]:
    children: dict[int, list[int]] = {}
    try:
        names = [name for name in os.listdir("/proc") if name.isdigit()]
    except OSError:  # there are too many open files
        return {}
    for name in names:
        with contextlib.suppress(OSError, ValueError, IndexError):  # it has ended meanwhile
            with open(f"/proc/{name}/stat", "rb") as file:
                parent = int(file.read().rpartition(b")")[2].split()[1])
            children.setdefault(parent, []).append(int(name))
    return children


def _kill_group(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)
