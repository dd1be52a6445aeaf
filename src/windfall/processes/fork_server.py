"""The fork server process: imports the modules that workers need once, then forks a worker for every request.

    python -m windfall.processes.fork_server ENTRY MODULE ...   ENTRY is module:function, called like a command;
                                                            MODULE may be module:function:argument, called once

Standard input is a connection that keeps packets apart (SOCK_SEQPACKET). Each packet is a JSON object:

    in    {"name", "argv", "env"} forks a worker, and brings the file descriptors of its log and perhaps of a channel;
          {"pid", "signal"} sends a signal to a worker; {"ping"} asks for a pong
    out   {"ready", "result"} or {"failed"} once; {"name", "pid"} or {"name", "error"} per fork; {"pid", "exit"} when a
          worker ends; {"pong"} for every ping

- It forks only while it has one thread. Other threads would not exist in the child, but their locks would stay held
  forever. Importing numpy starts threads unless OPENBLAS_NUM_THREADS is 1. Threads that their library restarts in a
  forked process do not count.
- When its input closes, or on SIGTERM, it kills all its descendants and exits.
- A worker asks the kernel to kill it when this process dies (PR_SET_PDEATHSIG), so `kill -9` here leaves no worker.
- What a worker leaves behind when it ends, such as a daemon, becomes a child of this process and is killed.
- A worker has its own session and environment variables, default signal handlers, and no file descriptor of this
  process. Values that a module read from the environment during its import stay as they were here.
- For modules of the user (`serve_user_code`), the number of threads does not matter: that is up to the user. Every
  process that is forked then is a reaper (reaper.py), which is asked by SIGTERM to kill its tree.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import select
import signal
import socket
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from windfall.errors import WindfallError
from windfall.processes import process, reaper
from windfall.processes.parent_death import die_with_parent

Request = dict[str, Any]
FORKABLE = {"OPENBLAS_NUM_THREADS": "1", "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
"""Environment variables that keep a process with torch able to fork. Without the first, importing numpy starts threads.
Without the second, a library that asks torch for a GPU initializes CUDA, which a forked process cannot use."""
HANDLED = (signal.SIGCHLD, signal.SIGTERM)
FORK_SAFE = ("jemalloc_bg_thd",)
"""Threads that do not prevent a fork: jemalloc, a part of pyarrow, stops its thread before a fork and restarts it."""
CHANNEL = "WINDFALL_CHANNEL"
"""Environment variable of a worker with the number of the file descriptor that came with the request for it."""
MAX_REQUEST_BYTES = 1 << 20


def channel() -> socket.socket:
    """In a worker: the connection that came with the request for it."""
    return socket.socket(fileno=int(os.environ.pop(CHANNEL)))


class ForkServer:
    def __init__(self, client: socket.socket, *, user_code: bool) -> None:
        self._client = client
        self._user_code = user_code
        self._pid = os.getpid()
        self._workers: dict[int, str] = {}
        self._helpers = set(reaper.children_of(self._pid))
        self._stopping = False
        self._wakeup_read, self._wakeup_write = os.pipe()
        os.set_blocking(self._wakeup_read, False)
        os.set_blocking(self._wakeup_write, False)
        signal.set_wakeup_fd(self._wakeup_write, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)  # handled only to wake up the select
        signal.signal(signal.SIGTERM, self._stop)
        reaper.adopt_orphans()

    def serve(self) -> Request | None:
        """Serve requests until the input closes. In a forked worker, return its request immediately."""
        while not self._stopping:
            ready, _, _ = select.select([self._client, self._wakeup_read], [], [])
            if self._wakeup_read in ready:
                os.read(self._wakeup_read, 4096)
                self._reap()
            if self._client in ready and (request := self._receive()) is not None:
                return request
        reaper.kill_the_rest()
        return None

    def answer(self, **fields: Any) -> None:
        try:
            _send(self._client, **fields)
        except ConnectionError:
            self._stopping = True  # the client is gone

    def _stop(self, *_: Any) -> None:
        self._stopping = True

    def _receive(self) -> Request | None:
        """Carry out a request. Returns the request in a forked worker, None here."""
        try:
            data, fds, flags, _ = socket.recv_fds(self._client, MAX_REQUEST_BYTES, 2, socket.MSG_CMSG_CLOEXEC)
        except ConnectionError:
            data, fds, flags = b"", [], 0
        if not data:
            self._stopping = True
            return None
        try:
            request = json.loads(data)
            match request:
                case {"ping": ping}:
                    return self.answer(pong=ping)
                case {"pid": int(pid), "signal": int(number)}:
                    if pid in self._workers:  # not reaped yet, so the pid still belongs to the worker
                        self._signal(pid, number)
                    return None
            _check(request)
            if flags & socket.MSG_CTRUNC:
                return self.answer(name=request["name"], error="too many open files in the fork server")
            return self._fork(request, *fds)
        except OSError as e:
            return self.answer(name=request["name"], error=f"cannot fork: {e}")
        except (ValueError, KeyError, TypeError, AttributeError) as e:
            return self.answer(name=None, error=f"invalid request: {type(e).__name__}: {e}")
        finally:
            if os.getpid() == self._pid:
                for fd in fds:
                    os.close(fd)

    def _signal(self, pid: int, number: int) -> None:
        (reaper if self._user_code else process).send_signal(pid, number)

    def _fork(self, request: Request, log: int, link: int | None = None) -> Request | None:
        if not self._user_code and (threads := count_threads()) != 1:
            self.answer(name=request["name"], error=f"the fork server has {threads} threads; it can only fork with one")
            return None
        sys.stdout.flush()
        sys.stderr.flush()
        set_up_read, set_up_write = os.pipe()
        # Block signals, so that none arrives while the worker still has the handlers of the fork server.
        signal.pthread_sigmask(signal.SIG_BLOCK, HANDLED)
        try:
            pid = os.fork()
            if pid == 0:
                self._become_worker(request, log, link)
        except BaseException:  # raised again here, but a half set up worker must not continue as a second fork server
            if os.getpid() != self._pid:
                traceback.print_exc()
                os._exit(1)
            raise
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, HANDLED)
            os.close(set_up_write)
            if os.getpid() == self._pid:
                os.read(set_up_read, 1)  # returns when the worker has its own session: only then may it get signals
            os.close(set_up_read)
        if pid == 0:
            return request
        self._workers[pid] = request["name"]
        self.answer(name=request["name"], pid=pid)
        return None

    def _become_worker(self, request: Request, log: int, link: int | None) -> None:
        os.setsid()
        die_with_parent(self._pid, signal.SIGKILL)
        signal.set_wakeup_fd(-1)
        for number in signal.valid_signals():
            if callable(signal.getsignal(number)):
                signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os.environ.clear()
        os.environ.update(request["env"])
        if link is not None:
            os.environ[CHANNEL] = str(link)
        Path("/proc/self/comm").write_text(request["name"][:15])  # ps and top show this name
        os.dup2(log, 1)
        os.dup2(log, 2)
        # Close these, not all above 2: a library may still need a descriptor that it opened during its import.
        for fd in (log, self._wakeup_read, self._wakeup_write):
            os.close(fd)
        self._client.close()

    def _reap(self) -> None:
        ended = False
        with suppress(ChildProcessError):  # there are no more
            while (found := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT | os.WNOHANG)) is not None:
                if (name := self._workers.get(found.si_pid)) is not None:
                    process.send_signal(found.si_pid, signal.SIGKILL)  # before it is reaped: the group is still its own
                _, status = os.waitpid(found.si_pid, 0)
                ended = True  # also if it was left behind by a worker: its children are ours only now
                if name is not None:
                    del self._workers[found.si_pid]
                    self.answer(pid=found.si_pid, exit=os.waitstatus_to_exitcode(status))
        if ended:
            for pid in set(reaper.children_of(self._pid)) - self._helpers - self._workers.keys():
                reaper.kill_descendants(pid)
                with suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)


def _send(client: socket.socket, **fields: Any) -> None:
    client.send(json.dumps(fields).encode())


def _check(request: Request) -> None:
    texts = [request["name"], *request["argv"], *request["env"], *request["env"].values()]
    if not all(isinstance(text, str) for text in texts):
        raise TypeError("name, argv and env must be text")


def count_threads() -> int:
    """Number of threads of this process that prevent a fork, including the main thread."""
    names = [Path(f"/proc/self/task/{thread}/comm").read_text().strip() for thread in os.listdir("/proc/self/task")]
    return sum(name not in FORK_SAFE for name in names)


def import_all(entry: str, modules: list[str]) -> tuple[Callable[[], Any], Any]:
    """Import the modules and make their calls. Returns the entry function and the result of the last call."""
    module, _, function = entry.partition(":")
    result = None
    for step in [*modules, module]:
        name, _, call = step.partition(":")
        try:
            imported = importlib.import_module(name)
            if call:
                called, _, argument = call.partition(":")
                result = getattr(imported, called)(argument)
        except WindfallError:
            raise
        except Exception as e:  # fault boundary: any error of an import is reported to the client
            raise ImportError(f"cannot import {name}: {type(e).__name__}: {e}") from e
    called = getattr(sys.modules[module], function or "main", None)
    if not callable(called):
        raise ImportError(f"{module} has no function {function or 'main'}")
    return called, result


def main() -> None:
    _serve(user_code=False)


def serve_user_code() -> None:
    """The program of a fork server for modules of the user, below a reaper. Its first argument is the connection."""
    os.dup2(int(sys.argv[1]), 0)
    os.close(int(sys.argv.pop(1)))
    _serve(user_code=True)


def _serve(*, user_code: bool) -> None:
    entry, *modules = sys.argv[1:]
    client = socket.socket(fileno=os.dup(0))
    # Output of an import goes to the log.
    os.dup2(2, 1)
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)
    gc.disable()  # nothing that an import makes is garbage; looking for it takes a seventh of the time
    try:
        run, result = import_all(entry, modules)
        if not user_code and (threads := count_threads()) != 1:
            raise ImportError(f"after importing {', '.join(modules)} there are {threads} threads; forking needs one")
    except ImportError as e:
        _send(client, failed=str(e))
        sys.exit(1)
    except WindfallError as e:
        _send(client, failed=e.what, where=e.where, fix=e.fix)
        sys.exit(1)
    gc.collect()
    gc.freeze()  # otherwise a worker's garbage collections would write to every shared page, and so copy it
    gc.enable()
    # Signals are handled only from here on. Before, SIGTERM, which is also sent when our parent dies, ends us at once.
    server = ForkServer(client, user_code=user_code)
    server.answer(ready=True, result=result)
    request = server.serve()
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
