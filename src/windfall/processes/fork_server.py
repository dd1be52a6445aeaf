"""The fork server process: imports the modules that workers need once, then forks a worker for every request.

    python -m windfall.processes.fork_server ENTRY MODULE ...   ENTRY is module:function, called like a command;
                                                            MODULE may be module:function:argument, called once

    python -m windfall.processes.fork_server --listen SOCKET MODULE ...     the import server (import_server.py)

    in    one line of JSON per request: {"name", "argv", "env", "log"} forks a worker, {"pid", "signal"} sends a signal
          to a worker, {"ping"} asks for a pong
    out   {"ready"} or {"failed"} once; {"name", "pid"} or {"name", "error"} per fork; {"name", "pid", "exit"} when a
          worker ends; {"pong"} for every ping

- It forks only while it has one thread. Other threads would not exist in the child, but their locks would stay held
  forever. Importing numpy starts threads unless OPENBLAS_NUM_THREADS is 1. Threads that their library restarts in a
  forked process do not count.
- When its input closes, or on SIGTERM, it kills the process groups of all workers, waits for them, and exits.
- A worker asks the kernel to kill it when this process dies (PR_SET_PDEATHSIG), so `kill -9` here leaves no worker.
- A worker has its own session and environment variables, default signal handlers, and no file descriptor of this
  process. Values that a module read from the environment during its import stay as they were here.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import select
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from windfall.processes import import_server, process
from windfall.processes.parent_death import die_with_parent

Request = dict[str, Any]
HANDLED = (signal.SIGCHLD, signal.SIGTERM)
FORK_SAFE = ("jemalloc_bg_thd",)
"""Threads that do not prevent a fork: jemalloc, a part of pyarrow, stops its thread before a fork and restarts it."""


class ForkServer:
    def __init__(self, requests: int, answers: int) -> None:
        self._in, self._out = requests, answers
        self._pid = os.getpid()
        self._workers: dict[int, str] = {}
        self._partial_line = b""
        self._stopping = False
        self._wakeup_read, self._wakeup_write = os.pipe()
        os.set_blocking(self._wakeup_read, False)
        os.set_blocking(self._wakeup_write, False)
        signal.set_wakeup_fd(self._wakeup_write, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)  # handled only to wake up the select
        signal.signal(signal.SIGTERM, self._stop)

    def serve(self) -> Request | None:
        """Serve requests until the input closes. In a forked worker, return its request immediately."""
        while not self._stopping:
            ready, _, _ = select.select([self._in, self._wakeup_read], [], [])
            if self._wakeup_read in ready:
                os.read(self._wakeup_read, 4096)
                self._reap(os.WNOHANG)
            if self._in in ready:
                for line in self._read_lines():
                    if (request := self._handle(line)) is not None:
                        return request
        for pid in self._workers:
            process.send_signal(pid, signal.SIGKILL)
        while self._workers:
            self._reap(0)
        return None

    def answer(self, **fields: Any) -> None:
        try:
            _write_answer(self._out, **fields)
        except ConnectionError:
            self._stopping = True  # the client is gone

    def _stop(self, *_: Any) -> None:
        self._stopping = True

    def _read_lines(self) -> list[bytes]:
        data = os.read(self._in, 1 << 16)
        if not data:
            self._stopping = True
        *lines, self._partial_line = (self._partial_line + data).split(b"\n")
        return lines

    def _handle(self, line: bytes) -> Request | None:
        """Carry out a request. Returns the request in a forked worker, None here."""
        try:
            match request := json.loads(line):
                case {"ping": ping}:
                    return self.answer(pong=ping)
                case {"pid": int(pid), "signal": int(number)}:
                    if pid in self._workers:  # not reaped yet, so the pid still belongs to the worker
                        process.send_signal(pid, number)
                    return None
            _check(request)
        except (ValueError, KeyError, TypeError, AttributeError) as e:
            return self.answer(name=None, error=f"invalid request: {type(e).__name__}: {e}")
        return self._fork(request)

    def _fork(self, request: Request) -> Request | None:
        """Fork a worker. Returns the request in the worker, None here."""
        if (threads := _count_threads()) != 1:
            self.answer(name=request["name"], error=f"the fork server has {threads} threads; it can only fork with one")
            return None
        sys.stdout.flush()
        sys.stderr.flush()
        set_up_read, set_up_write = os.pipe()
        # Block signals, so that none arrives while the worker still has the handlers of the fork server.
        signal.pthread_sigmask(signal.SIG_BLOCK, HANDLED)
        try:
            pid = os.fork()
        except OSError as e:
            pid = -1
            self.answer(name=request["name"], error=f"cannot fork: {e}")
        if pid == 0:
            try:
                self._become_worker(request)
                os.close(set_up_read)
                os.close(set_up_write)
            except BaseException:  # fault boundary: a half set up worker must not continue as a second fork server
                traceback.print_exc()
                os._exit(1)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, HANDLED)
        if pid == 0:
            return request
        os.close(set_up_write)
        if pid > 0:
            self._workers[pid] = request["name"]
            os.read(set_up_read, 1)  # returns when the worker has its own session: only then may it get signals
            self.answer(name=request["name"], pid=pid)
        os.close(set_up_read)
        return None

    def _become_worker(self, request: Request) -> None:
        os.setsid()
        die_with_parent(self._pid, signal.SIGKILL)
        signal.set_wakeup_fd(-1)
        for number in signal.valid_signals():
            if callable(signal.getsignal(number)):
                signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os.environ.clear()
        os.environ.update(request["env"])
        Path("/proc/self/comm").write_text(request["name"][:15])  # ps and top show this name
        nothing, log = os.open(os.devnull, os.O_RDONLY), process.open_log(Path(request["log"]))
        for fd, to in ((nothing, 0), (log, 1), (log, 2)):
            os.dup2(fd, to)
        # Close these, not all above 2: a library may still need a descriptor that it opened during its import.
        for fd in (nothing, log, self._in, self._out, self._wakeup_read, self._wakeup_write):
            os.close(fd)

    def _reap(self, options: int) -> None:
        """Report the workers that ended."""
        while self._workers and (ended := process.reap(self._workers, options)) is not None:
            pid, code = ended
            if (name := self._workers.pop(pid, None)) is not None:  # otherwise it was a child that an import started
                self.answer(name=name, pid=pid, exit=code)


def _write_answer(fd: int, **fields: Any) -> None:
    os.write(fd, json.dumps(fields).encode() + b"\n")


def _check(request: Request) -> None:
    texts = [request["name"], request["log"], *request["argv"], *request["env"], *request["env"].values()]
    if not all(isinstance(text, str) for text in texts):
        raise TypeError("name, log, argv and env must be text")


def _count_threads() -> int:
    """Number of threads of this process that prevent a fork, including the main thread."""
    names = [Path(f"/proc/self/task/{thread}/comm").read_text().strip() for thread in os.listdir("/proc/self/task")]
    return sum(name not in FORK_SAFE for name in names)


def _import(entry: str, modules: list[str]) -> Callable[[], Any]:
    """Import the modules, make their calls, and return the entry function."""
    module, _, function = entry.partition(":")
    for step in [*modules, module]:
        name, _, call = step.partition(":")
        try:
            imported = importlib.import_module(name)
            if call:
                called, _, argument = call.partition(":")
                getattr(imported, called)(argument)
        except Exception as e:  # fault boundary: any error of an import is reported to the client
            raise ImportError(f"cannot import {name}: {type(e).__name__}: {e}") from e
    called = getattr(sys.modules[module], function or "main", None)
    if not callable(called):
        raise ImportError(f"{module} has no function {function or 'main'}")
    return called


def _import_for_forks(entry: str, modules: list[str]) -> Callable[[], Any]:
    """Like `_import`; afterwards this process can fork, and its memory stays shared with what it forks."""
    gc.disable()  # nothing that an import makes is garbage; looking for it takes a seventh of the time
    run = _import(entry, modules)
    if (threads := _count_threads()) != 1:
        raise ImportError(f"after importing {', '.join(modules)} there are {threads} threads; forking needs one")
    gc.collect()
    gc.freeze()  # otherwise a worker's garbage collections would write to every shared page, and so copy it
    gc.enable()
    return run


def _listen(path: str, modules: list[str]) -> list[str]:
    """Be the import server. Returns in a forked fork server, with its arguments."""
    os.environ.update(import_server.FORKABLE)
    server = import_server.ImportServer(path)
    try:
        _import_for_forks("windfall.processes.fork_server", modules)
    except ImportError as e:
        sys.exit(f"the import server did not start: {e}")
    return server.serve()


def main() -> None:
    if sys.argv[1:2] == ["--listen"]:
        path, *modules = sys.argv[2:]
        # Returns in every fork server that the import server forks, with the arguments of that fork server.
        sys.argv[1:] = _listen(path, modules)
    began = time.monotonic()
    entry, *modules = sys.argv[1:]
    # Output of an import must not be mixed with the answers.
    answers = os.dup(1)
    os.dup2(2, 1)
    requests = os.dup(0)
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)
    try:
        run = _import_for_forks(entry, modules)
    except ImportError as e:
        _write_answer(answers, failed=str(e))
        sys.exit(1)
    _write_answer(answers, ready=time.monotonic() - began)
    # Signals are handled only from here on. Before, SIGTERM, which is also sent when our parent dies, ends us at once.
    request = ForkServer(requests, answers).serve()
    if request is None:
        return
    sys.argv = list(request["argv"])
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)  # pyright: ignore[reportAttributeAccessIssue]
    if "numpy.random" in sys.modules:
        sys.modules["numpy.random"].seed()  # otherwise all workers draw the same; random and torch reseed by themselves
    sys.exit(run())


if __name__ == "__main__":
    main()
