"""The nursery process: imports once what workers need, then forks a worker for every request.

    python -m windfall.fleet.forker ENTRY MODULE ...        ENTRY is module:function, called as a command would be;
                                                            MODULE may be module:function:argument, called once

    in    {"name", "argv", "env", "log"} forks a worker, {"pid", "signal"} signals one, {"ping"}: a line of JSON each
    out   {"ready"} or {"failed"} once; {"name", "pid"} or {"name", "error"}; {"name", "pid", "exit"} when one ends;
          {"pong"} for every ping

- It has one thread whenever it forks, or it refuses: a thread of the parent's would be missing in the child, with its
  locks held for ever. Importing numpy starts threads unless OPENBLAS_NUM_THREADS is 1. Threads that their library
  starts again in a forked process do not count.
- When its input closes, or on SIGTERM, it kills the process groups of all workers, waits for them, and ends.
- A worker asks the kernel to be killed when this process dies (PR_SET_PDEATHSIG), so `kill -9` here leaves none behind.
- A worker has its own session and environment, default signal handlers, and no file descriptor of this process. What a
  module read from the environment when it was imported stays as it was here.
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

from windfall.fleet import process
from windfall.fleet.parent_death import die_with_parent

Request = dict[str, Any]
HANDLED = (signal.SIGCHLD, signal.SIGTERM)
FORK_SAFE = ("jemalloc_bg_thd",)
"""Threads by name. jemalloc, which pyarrow brings, stops its own before a fork and starts it again after."""


class Forker:
    def __init__(self, requests: int, answers: int) -> None:
        self._in, self._out = requests, answers
        self._pid = os.getpid()
        self._workers: dict[int, str] = {}
        self._text = b""
        self._stopping = False
        self._woken, self._wake = os.pipe()
        os.set_blocking(self._woken, False)
        os.set_blocking(self._wake, False)
        signal.set_wakeup_fd(self._wake, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)  # only to be woken
        signal.signal(signal.SIGTERM, self._stop)

    def serve(self) -> Request | None:
        """Until the input closes. In a forked worker it returns at once, with the request the worker is to run."""
        while not self._stopping:
            ready, _, _ = select.select([self._in, self._woken], [], [])
            if self._woken in ready:
                os.read(self._woken, 4096)
                self._reap(os.WNOHANG)
            if self._in in ready:
                for line in self._lines():
                    if (request := self._obey(line)) is not None:
                        return request
        for pid in self._workers:
            process.send(pid, signal.SIGKILL)
        while self._workers:
            self._reap(0)
        return None

    def answer(self, **fields: Any) -> None:
        try:
            _answer(self._out, **fields)
        except ConnectionError:
            self._stopping = True  # nobody is left to fork for

    def _stop(self, *_: Any) -> None:
        self._stopping = True

    def _lines(self) -> list[bytes]:
        data = os.read(self._in, 1 << 16)
        if not data:
            self._stopping = True
        *lines, self._text = (self._text + data).split(b"\n")
        return lines

    def _obey(self, line: bytes) -> Request | None:
        try:
            request = json.loads(line)
            if "ping" in request:
                self.answer(pong=request["ping"])
                return None
            if "signal" in request:
                pid, number = int(request["pid"]), int(request["signal"])
            else:
                pid, number = 0, 0
                _check(request)
        except (ValueError, KeyError, TypeError, AttributeError) as e:
            self.answer(name=None, error=f"no such request: {type(e).__name__}: {e}")
            return None
        if not number:
            return self._fork(request)
        if pid in self._workers:  # not reaped yet, so the pid is still the worker's
            process.send(pid, number)
        return None

    def _fork(self, request: Request) -> Request | None:
        """The request in the worker, None here."""
        if (threads := _threads()) != 1:
            self.answer(name=request["name"], error=f"the nursery has {threads} threads, and forks only with one")
            return None
        sys.stdout.flush()
        sys.stderr.flush()
        settled, settling = os.pipe()
        # No signal may find the worker with the handlers of the nursery.
        signal.pthread_sigmask(signal.SIG_BLOCK, HANDLED)
        try:
            pid = os.fork()
        except OSError as e:
            pid = -1
            self.answer(name=request["name"], error=f"cannot fork: {e}")
        if pid == 0:
            try:
                self._become_worker(request)
                os.close(settled)
                os.close(settling)
            except BaseException:  # fault boundary: half a worker must not go on as a second nursery
                traceback.print_exc()
                os._exit(1)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, HANDLED)
        if pid == 0:
            return request
        os.close(settling)
        if pid > 0:
            self._workers[pid] = request["name"]
            os.read(settled, 1)  # ends when the worker has a session of its own: only then may it be signalled
            self.answer(name=request["name"], pid=pid)
        os.close(settled)
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
        Path("/proc/self/comm").write_text(request["name"][:15])  # what ps and top show
        nothing, log = os.open(os.devnull, os.O_RDONLY), process.open_log(Path(request["log"]))
        for fd, to in ((nothing, 0), (log, 1), (log, 2)):
            os.dup2(fd, to)
        # By number, not all above 2: a library may have opened one at import that it still needs.
        for fd in (nothing, log, self._in, self._out, self._woken, self._wake):
            os.close(fd)

    def _reap(self, options: int) -> None:
        """Take the workers that ended, and kill what is left of their groups first, while the pid is still theirs."""
        while self._workers:
            ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT | options)
            if ended is None:
                return
            name = self._workers.pop(ended.si_pid, None)
            if name is not None:
                process.send(ended.si_pid, signal.SIGKILL)
            _, status = os.waitpid(ended.si_pid, 0)
            if name is not None:  # else a child that an import started
                self.answer(name=name, pid=ended.si_pid, exit=os.waitstatus_to_exitcode(status))


def _answer(fd: int, **fields: Any) -> None:
    os.write(fd, json.dumps(fields).encode() + b"\n")


def _check(request: Request) -> None:
    texts = [request["name"], request["log"], *request["argv"], *request["env"], *request["env"].values()]
    if not all(isinstance(text, str) for text in texts):
        raise TypeError("name, log, argv and env are text")


def _threads() -> int:
    names = [Path(f"/proc/self/task/{thread}/comm").read_text().strip() for thread in os.listdir("/proc/self/task")]
    return sum(name not in FORK_SAFE for name in names)


def _load(entry: str, modules: list[str]) -> Callable[[], Any]:
    module, _, function = entry.partition(":")
    for step in [*modules, module]:
        name, _, call = step.partition(":")
        try:
            imported = importlib.import_module(name)
            if call:
                called, _, argument = call.partition(":")
                getattr(imported, called)(argument)
        except Exception as e:  # fault boundary: whatever an import raises is told to the one who asked for it
            raise ImportError(f"cannot import {name}: {type(e).__name__}: {e}") from e
    called = getattr(sys.modules[module], function or "main", None)
    if not callable(called):
        raise ImportError(f"{module} has no function {function or 'main'}")
    return called


def main() -> None:
    began = time.monotonic()
    entry, *modules = sys.argv[1:]
    # What an import prints must not get between the answers.
    answers = os.dup(1)
    os.dup2(2, 1)
    requests = os.dup(0)
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)
    try:
        run = _load(entry, modules)
        if (threads := _threads()) != 1:
            raise ImportError(f"after importing {', '.join(modules)} there are {threads} threads; forking needs one")
    except ImportError as e:
        _answer(answers, failed=str(e))
        sys.exit(1)
    gc.collect()
    gc.freeze()  # so that a worker's collections do not write to, and so copy, every page it shares with us
    _answer(answers, ready=time.monotonic() - began)
    # Only now are signals handled: until here SIGTERM, which also says that our parent died, ends us at once.
    request = Forker(requests, answers).serve()
    if request is None:
        return
    sys.argv = list(request["argv"])
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)  # pyright: ignore[reportAttributeAccessIssue]
    if "numpy.random" in sys.modules:
        sys.modules["numpy.random"].seed()  # else every worker draws the same; random and torch see to it themselves
    sys.exit(run())


if __name__ == "__main__":
    main()
