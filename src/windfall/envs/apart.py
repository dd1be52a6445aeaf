"""Calls into other people's graders, made in child processes that can be killed.

Graders hand the policy's text to sympy, and some of it to `eval`. One answer of `9**9**9` keeps the interpreter busy
for hours without letting go of its lock: in a thread it would stop the event loop, and with it every timeout. A child
can be killed, has a limit on CPU time and memory, sees no secrets in its environment, and always starts with the same
hash seed, so what it makes does not depend on the order of a set. It is no sandbox: it may do what its user may do.

    call ──▶ a free thread ──▶ an idle child (or a new one) ──▶ one JSON line there, one JSON line back
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import importlib
import json
import math
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from windfall.errors import WindfallError

MEMORY_BYTES = 4 << 30
PASSED_ON = ("PATH", "HOME", "LANG", "LC_ALL", "TMPDIR", "LD_LIBRARY_PATH")


class TooCostly(Exception):
    """The call went over its limit of CPU time or memory."""


class Apart:
    """Up to `children` processes, started when first needed.

    A function is named 'module:function' and takes and returns plain JSON data. What it raises arrives as RuntimeError,
    except WindfallError and TooCostly, which arrive as such.
    """

    def __init__(self, children: int) -> None:
        self._threads = ThreadPoolExecutor(children, thread_name_prefix="windfall-apart")
        self._idle: deque[_Child] = deque()
        atexit.register(self.close)

    def call(self, function: str, *args: Any) -> Any:
        """Make the call and wait for it."""
        return self._threads.submit(_Call(self._idle, function, args).run).result()

    async def acall(self, function: str, *args: Any) -> Any:
        """Make the call without blocking the event loop. Cancelling it kills the child that works on it."""
        call = _Call(self._idle, function, args)
        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads, call.run)
        except asyncio.CancelledError:
            call.abandon()
            raise

    def close(self) -> None:
        """End the idle children; a later call starts new ones."""
        while self._idle:
            self._idle.pop().kill()


class _Call:
    def __init__(self, idle: deque[_Child], function: str, args: tuple[Any, ...]) -> None:
        self._idle, self._child, self._abandoned, self._lock = idle, None, False, threading.Lock()
        self._request = json.dumps({"function": function, "args": args}).encode() + b"\n"

    def run(self) -> Any:
        with self._lock:
            if self._abandoned:
                return None
            child = self._child = self._take()
        reply = child.ask(self._request)
        with self._lock:
            # Only a child that answered goes back, and only if no one is about to kill it.
            self._child = None
            self._idle.append(child)
        if "refused" in reply:
            what, where, fix = reply["refused"]
            raise WindfallError(what, where=where, fix=fix)
        if "costly" in reply:
            raise TooCostly(reply["costly"])
        if "raised" in reply:
            raise RuntimeError(reply["raised"])
        return reply["value"]

    def abandon(self) -> None:
        with self._lock:
            self._abandoned = True
            if self._child is not None:
                self._child.kill()

    def _take(self) -> _Child:
        with contextlib.suppress(IndexError):
            while not (child := self._idle.pop()).alive:
                child.kill()
            return child
        return _Child()


class _Child:
    def __init__(self) -> None:
        env = {name: os.environ[name] for name in PASSED_ON if name in os.environ}
        env |= {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p), "PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-W", "ignore", "-c", f"from {__name__} import serve; serve()"]
        # A session of its own: Ctrl-C is for the parent to handle. When the parent is gone, its end of stdin closes.
        self._process = subprocess.Popen(
            command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
        )

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def ask(self, request: bytes) -> dict[str, Any]:
        assert self._process.stdin and self._process.stdout
        reply = b""
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(request)
            self._process.stdin.flush()
            reply = self._process.stdout.readline()
        if reply:
            return json.loads(reply)
        self.kill()
        code = self._process.returncode
        if code == -signal.SIGXCPU:
            return {"costly": "over its limit of CPU time"}
        return {"raised": f"the child process ended with status {code}"}

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()


def serve() -> None:
    """The child: answer requests until the parent closes the pipe."""
    requests, replies = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    # Nothing that is evaluated here may read our requests or print a reply of its own.
    nothing = os.open(os.devnull, os.O_RDWR)
    os.dup2(nothing, 0)
    os.dup2(nothing, 1)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with contextlib.suppress(ValueError, OSError):  # macOS has the name but not the limit
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, resource.getrlimit(resource.RLIMIT_AS)[1]))
    for line in requests:
        replies.write(_answer(json.loads(line)) + b"\n")
        replies.flush()


def _answer(request: dict[str, Any]) -> bytes:
    module, name = request["function"].split(":")
    try:
        function = getattr(importlib.import_module(module), name)
        return json.dumps({"value": function(*request["args"])}).encode()
    except WindfallError as e:
        reply = {"refused": [e.what, e.where, e.fix]}
    except MemoryError:
        reply = {"costly": "over its limit of memory"}
    except Exception as e:  # handed to the caller, who decides
        reply = {"raised": f"{type(e).__name__}: {e}"}
    return json.dumps(reply).encode()


@contextlib.contextmanager
def cpu_limit(cpu_s: float) -> Iterator[None]:
    """For use in a child: over the limit (whole seconds, rounded up) the kernel ends the process, and the caller gets
    TooCostly. No Python code has to run for that. CPU time, not time on the clock: on a busy machine nothing changes.
    """
    hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
    resource.setrlimit(resource.RLIMIT_CPU, (math.ceil(time.process_time() + cpu_s), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_CPU, (hard, hard))


MAKING = Apart(children=1)
"""For tasks: making one never waits for a slow answer to be scored."""

SCORING = Apart(children=2)
"""For answers."""
