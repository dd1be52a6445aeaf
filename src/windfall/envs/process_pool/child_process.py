"""The parent's side of one child process that holds an environment: messages, the running call, the stack, the end.

The child runs below a reaper (processes/reaper.py), which keeps a limited part of what the environment prints. When the
child ends, or this process, or the thread that started it, the reaper kills all that the environment has started, also
daemons.

Environments that ship with windfall evaluate text written by a model: their children have a memory limit and almost
none of our environment variables. A user's own environment may need keys and proxies, so it gets all variables except
windfall's secrets. All children have the same hash seed.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from windfall.envs.process_pool.running_call import LAYOUT, LINK_LOST
from windfall.processes import reaper

PASSED_ON = ("PATH", "HOME", "LANG", "LC_ALL", "TMPDIR", "LD_LIBRARY_PATH")
SECRETS = "WINDFALL_"
DUMP_S = 1.0
"""Seconds that a child may take to write its stack before it is killed."""
END_S = 7.0
"""Seconds that a child may take to end after it has closed its link: more than its reaper waits for processes
(reaper.KILL_S)."""
STACK_CHARS = 4000
MAX_LINE_BYTES = 64 << 20
"""Longest message of a child: more than a task or a feedback can have."""
OnEnd = Callable[[int, int, str], None]
"""Gets the exit status, the number of the call that was running, and the stack if the child crashed."""


class ChildProcess:
    def __init__(
        self, *, strict: bool, on_line: Callable[[bytes], None], on_end: OnEnd, output: Path | None = None
    ) -> None:
        """`on_line` gets every line, whatever it contains. `strict`: for an environment that ships with windfall.
        `output`: log for what the environment prints; None shows a little of it on standard error."""
        self._on_line = on_line
        self._on_end = on_end
        self._partial_line = list[bytes]()
        self._partial_bytes = 0
        self._unsent = b""
        self._record = tempfile.TemporaryFile()  # noqa: SIM115
        self._trace = tempfile.TemporaryFile()  # noqa: SIM115
        self._record.write(bytes(LAYOUT.size))
        self._record.flush()
        self._link, theirs = socket.socketpair()
        fds = (theirs.fileno(), self._record.fileno(), self._trace.fileno())
        warnings = ["-W", "ignore"] if strict else []
        with theirs:
            self._process = reaper.start(
                "windfall.envs.process_pool.child_main:main",
                fds,
                name="environment",
                fds=fds,
                env=child_environment(strict),
                python=warnings,
                log=output,
            )
        self._link.setblocking(False)
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._link, self._readable)
        self._open = True
        self._ending: asyncio.Task[None] | None = None

    def send(self, messages: list[tuple[Any, ...]]) -> None:
        data = b"".join(json.dumps(message).encode() + b"\n" for message in messages)
        if self._open and not self._unsent:
            with contextlib.suppress(BlockingIOError, ConnectionError):  # the reader notices that the child has ended
                data = data[self._link.send(data) :]
        if self._open and data and not self._unsent:
            self._loop.add_writer(self._link, self._writable)
        self._unsent += data

    def _writable(self) -> None:
        try:
            self._unsent = self._unsent[self._link.send(self._unsent) :]
        except BlockingIOError:
            return
        except ConnectionError:
            self._unsent = b""
        if not self._unsent:
            self._loop.remove_writer(self._link)

    def _readable(self) -> None:
        try:
            data = self._link.recv(1 << 18)
        except BlockingIOError:
            return
        except ConnectionError:
            data = b""
        if not data:
            self._close_link()
            self._ending = asyncio.create_task(self._handle_end())
            return
        first, *others = data.split(b"\n")
        self._partial_line.append(first)
        self._partial_bytes += len(first)
        if not others and self._partial_bytes <= MAX_LINE_BYTES:
            return
        *lines, rest = b"".join(self._partial_line), *(others or [b""])
        for line in lines:
            self._on_line(line)
        self._partial_line = [rest]
        self._partial_bytes = len(rest)

    async def _handle_end(self) -> None:
        """The child closed its side of the link, so it has ended or will end soon."""
        ended = await self._process.ends_within(END_S)
        number, stack = self.running_call()[0], self._stack()
        code = await self._reap()
        self._on_end(code if ended or code != -signal.SIGKILL else LINK_LOST, number, stack)

    async def dump_stack(self) -> str:
        """The stack of the child, if it can write it within DUMP_S. The child must be killed after this."""
        if self._ending is not None:  # it has ended by itself meanwhile
            return ""
        self._close_link()
        self._process.signal(signal.SIGUSR1)  # its reapers pass it on
        await self._wait_until(lambda: self._stack() or not self._process.running, DUMP_S)
        return self._stack()

    async def kill(self) -> None:
        """Kill the child, without calling `on_end`."""
        if self._ending is not None:
            await self._ending
            return
        self._close_link()
        await self._reap()

    async def end(self, limit_s: float) -> None:
        """Ask the child to end, and wait for it, at most for `limit_s`."""
        self.send([(0, "end")])
        await self._wait_until(lambda: not self._open, limit_s)

    async def _wait_until(self, condition: Callable[[], object], limit_s: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                while not condition():
                    await asyncio.sleep(0.01)

    async def _reap(self) -> int:
        """Have the reaper kill the child and all that it started, and wait for it."""
        try:
            code = await asyncio.shield(self._process.terminate(0.0))
        except TimeoutError as e:
            print(f"{e}; it is left behind. Does it hang in a file system or a driver?", file=sys.stderr, flush=True)
            os.kill(self._process.pid, signal.SIGKILL)
            code = -signal.SIGKILL
        self._record.close()
        self._trace.close()
        return code

    def _close_link(self) -> None:
        if self._open:
            self._open = False
            self._loop.remove_reader(self._link)
            self._loop.remove_writer(self._link)
            self._link.close()

    def running_call(self) -> tuple[int, float]:
        """The number of the running call (0: none), and when it began to run (monotonic clock, seconds)."""
        return LAYOUT.unpack(os.pread(self._record.fileno(), LAYOUT.size, 0))

    def _stack(self) -> str:
        text = os.pread(self._trace.fileno(), STACK_CHARS, 0).decode(errors="replace")
        return text.partition(f'  File "{Path(__file__).parent}')[0].strip()


def child_environment(strict: bool) -> dict[str, str]:
    """The environment variables of a child: no secrets, and with `strict` only those that every program needs."""
    if strict:
        kept = {name: os.environ[name] for name in PASSED_ON if name in os.environ} | {"OMP_NUM_THREADS": "1"}
    else:
        kept = {name: value for name, value in os.environ.items() if not name.startswith(SECRETS)}
    return kept | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p), "PYTHONHASHSEED": "0"}
