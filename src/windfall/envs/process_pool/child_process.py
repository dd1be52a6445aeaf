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
import os
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from windfall.envs.calls import CallPlace, EnvCall
from windfall.envs.process_pool import protocol
from windfall.link.message_base import Message
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
MAX_WAITING = 1024
"""Maximum number of waiting `async def` calls in one child."""


class ChildProcess(CallPlace):
    def __init__(
        self,
        *,
        strict: bool,
        on_line: Callable[[ChildProcess, bytes], None],
        on_end: Callable[[ChildProcess, int, int, str], None],
        output: Path | None = None,
    ) -> None:
        """`strict`: for an environment that ships with windfall. `on_line` gets every line, whatever it contains.
        `on_end` gets the exit status, the number of the call that was running, and the stack if the child crashed.
        `output`: log for what the environment prints; None shows a little of it on standard error."""
        super().__init__()
        self.born_s = time.monotonic()
        self.ready = False
        self.waiting: set[int] = set()
        """Numbers of the calls that wait in an `async def`, so that other calls can begin."""
        self.moved: set[int] = set()
        self.last_message_s = 0.0
        self.seen_running: tuple[int, float] = (0, 0.0)
        self._on_line = on_line
        self._on_end = on_end
        self._record = tempfile.TemporaryFile()  # noqa: SIM115
        self._trace = tempfile.TemporaryFile()  # noqa: SIM115
        self._record.write(bytes(protocol.RECORD.size))
        self._record.flush()
        self._link, theirs = socket.socketpair()
        fds = (theirs.fileno(), self._record.fileno(), self._trace.fileno())
        with theirs:
            self.process = reaper.start(
                "windfall.envs.process_pool.child_main:main",
                fds,
                name="environment",
                fds=fds,
                env=child_environment(strict),
                python=["-W", "ignore"] if strict else [],
                log=output,
            )
        self._unsent: list[bytes] = []
        """Messages from before the writer was there."""
        self._writer: asyncio.StreamWriter | None = None
        self._open = True
        self._ending = False
        self._reading = asyncio.create_task(self._read())

    # Calls.

    @property
    def queued(self) -> int:
        """Number of calls that are running or have not begun."""
        return len(self.sent) - len(self.waiting)

    @property
    def begun(self) -> list[EnvCall]:
        """The sent calls that may have run. Calls begin in the order in which they were sent, and the messages of the
        child arrive in the order in which it ran them."""
        running = next((number for number in self.sent if number not in self.waiting), None)
        return [call for number, call in self.sent.items() if number in self.waiting or number == running]

    def has_room(self, call: EnvCall) -> bool:
        """A call that was in children that ended shares its child with few others: 63 after the first time, 3, 0."""
        self.moved &= self.sent.keys()
        most = max((call.moves, *(self.sent[number].moves for number in self.moved)))
        limit = max(1, MAX_WAITING >> 4 * most) if most else sys.maxsize
        return len(self.waiting) < MAX_WAITING and len(self.sent) < limit

    # Messages.

    def send(self, message: Message) -> None:
        if self._writer is None:
            self._unsent.append(protocol.encode(message))
        elif self._open:
            self._writer.write(protocol.encode(message))

    async def _read(self) -> None:
        try:
            reader, self._writer = await asyncio.open_connection(sock=self._link, limit=MAX_LINE_BYTES)
            self._writer.writelines(self._unsent)
            while line := await reader.readline():
                self._on_line(self, line)
        except ConnectionError:
            pass
        except ValueError:
            self._on_line(self, b"(a line without end)")
        self._ending = True
        self._close_link()
        ended = await self.process.ends_within(END_S)
        number, stack = self.running_call()[0], self._stack()
        code = await self._reap()
        self._on_end(self, code if ended or code != -signal.SIGKILL else protocol.LINK_LOST, number, stack)

    def _close_link(self) -> None:
        self._open = False
        if self._writer is not None:
            self._writer.transport.abort()
        else:
            self._link.close()

    def running_call(self) -> tuple[int, float]:
        return protocol.RECORD.unpack(os.pread(self._record.fileno(), protocol.RECORD.size, 0))

    # The end.

    async def dump_stack(self) -> str:
        """The stack of the child, if it can write it within DUMP_S. The child must be killed after this."""
        if self._ending:  # it has ended by itself meanwhile
            return ""
        self._stop_reading()
        self.process.signal(signal.SIGUSR1)  # its reapers pass it on
        await _wait_until(lambda: self._stack() or not self.process.running, DUMP_S)
        return self._stack()

    async def kill(self) -> None:
        """Kill the child, without calling `on_end`."""
        if self._ending:
            await asyncio.wait([self._reading])
            return
        self._stop_reading()
        await self._reap()

    async def end(self, limit_s: float) -> None:
        """Ask the child to end, and wait for it, at most for `limit_s`."""
        self.send(protocol.EndEnv())
        await _wait_until(lambda: self._ending, limit_s)

    def _stop_reading(self) -> None:
        self._reading.cancel()
        self._close_link()

    async def _reap(self) -> int:
        """Have the reaper kill the child and all that it started, and wait for it."""
        try:
            code = await asyncio.shield(self.process.terminate(0.0))
        except TimeoutError as e:
            print(f"{e}; it is left behind. Does it hang in a file system or a driver?", file=sys.stderr, flush=True)
            os.kill(self.process.pid, signal.SIGKILL)
            code = -signal.SIGKILL
        self._record.close()
        self._trace.close()
        return code

    def _stack(self) -> str:
        text = os.pread(self._trace.fileno(), STACK_CHARS, 0).decode(errors="replace")
        return text.partition(f'  File "{Path(__file__).parent}')[0].strip()


async def _wait_until(condition: Callable[[], object], limit_s: float) -> None:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(limit_s):
            while not condition():
                await asyncio.sleep(0.01)


def child_environment(strict: bool) -> dict[str, str]:
    """The environment variables of a child: no secrets, and with `strict` only those that every program needs."""
    if strict:
        kept = {name: os.environ[name] for name in PASSED_ON if name in os.environ} | {"OMP_NUM_THREADS": "1"}
    else:
        kept = {name: value for name, value in os.environ.items() if not name.startswith(SECRETS)}
    return kept | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p), "PYTHONHASHSEED": "0"}
