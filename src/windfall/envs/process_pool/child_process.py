"""One child process that holds an environment, as its parent sees it: messages, the board, the stack, the end.

The child runs in a session of its own, so that killing its group takes along whatever the environment started, and it
dies with the thread that started it (fleet/parent_death.py). Environments that ship with windfall evaluate text that a model
wrote: their children get a limit on memory and almost nothing of our environment variables. A user's own environment
gets all of them except for windfall's secrets: it may need keys and proxies. All children have the same hash seed.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from windfall.envs.process_pool.board import LAYOUT

PASSED_ON = ("PATH", "HOME", "LANG", "LC_ALL", "TMPDIR", "LD_LIBRARY_PATH")
SECRETS = "WINDFALL_"
DUMP_S = 1.0
"""How long a child may take to write its stack before it is killed."""
REAP_S = 5.0
"""How long a killed child may take to end. One in uninterruptible sleep may take for ever."""
STACK_CHARS = 4000


class ChildProcess:
    def __init__(self, *, strict: bool, heard: Callable[[bytes], None], ended: Callable[[int, int, str], None]) -> None:
        """`heard` gets every line, whatever it holds; `ended` the exit status, the call whose code was running, and the
        stack that a crash left. `strict`: for an environment that ships with windfall."""
        self._heard, self._ended = heard, ended
        self._read, self._unsent = b"", b""
        self._board, self._trace = tempfile.TemporaryFile(), tempfile.TemporaryFile()  # noqa: SIM115
        self._board.write(bytes(LAYOUT.size))
        self._board.flush()
        self._link, theirs = socket.socketpair()
        fds = (theirs.fileno(), self._board.fileno(), self._trace.fileno())
        command = [sys.executable, *(["-W", "ignore"] if strict else [])]
        command += [
            "-c",
            "from windfall.envs.process_pool.child_main import main; main()",
            str(os.getpid()),
            *map(str, fds),
        ]
        with theirs:
            self._process = subprocess.Popen(
                command, env=variables(strict), stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, pass_fds=fds,
                start_new_session=True,
            )  # fmt: skip
        self._link.setblocking(False)
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._link, self._readable)
        self._open = True
        self._burying: asyncio.Task[None] | None = None

    # messages

    def send(self, messages: list[tuple[Any, ...]]) -> None:
        data = b"".join(json.dumps(message).encode() + b"\n" for message in messages)
        if self._open and not self._unsent:
            with contextlib.suppress(BlockingIOError, ConnectionError):  # its end is heard of by the reader
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
            self._hang_up()
            self._burying = asyncio.create_task(self._bury())
            return
        *lines, self._read = (self._read + data).split(b"\n")
        for line in lines:
            self._heard(line)

    # its end

    async def _bury(self) -> None:
        """Its end of the link is closed, so it has ended, or soon will have."""
        await self._until(self._over)
        number, stack = self.board()[0], self._stack()
        self._ended(await self._reap(), number, stack)

    async def last_words(self) -> str:
        """What it is doing, as far as it can still say within DUMP_S. It is to be killed next."""
        if self._burying is not None:  # it has ended by itself meanwhile
            return ""
        self._hang_up()
        if not self._over():
            os.kill(self._process.pid, signal.SIGUSR1)
            await self._until(lambda: self._stack() or self._over())
        return self._stack()

    async def kill(self) -> None:
        """End it, without a word to `ended`."""
        if self._burying is not None:
            await self._burying
            return
        self._hang_up()
        await self._reap()

    async def _until(self, true: Callable[[], object]) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(DUMP_S):
                while not true():
                    await asyncio.sleep(0.01)

    def _over(self) -> bool:
        """It has ended, and is not reaped yet: its number cannot be another's."""
        return os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None

    async def _reap(self) -> int:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        try:  # in a thread: it takes a while to take a large process down
            code = await asyncio.shield(asyncio.to_thread(self._process.wait, REAP_S))
        except subprocess.TimeoutExpired:
            said = f"process {self._process.pid} of an environment was killed and has not ended after {REAP_S:g} s"
            print(f"{said}; it is left behind. Does it hang in a file system or a driver?", file=sys.stderr, flush=True)
            code = -signal.SIGKILL
        self._board.close()
        self._trace.close()
        return code

    def _hang_up(self) -> None:
        if self._open:
            self._open = False
            self._loop.remove_reader(self._link)
            self._loop.remove_writer(self._link)
            self._link.close()

    # what it is doing

    def board(self) -> tuple[int, float]:
        """Whose code is running, and since when."""
        return LAYOUT.unpack(os.pread(self._board.fileno(), LAYOUT.size, 0))

    def _stack(self) -> str:
        said = os.pread(self._trace.fileno(), STACK_CHARS, 0).decode(errors="replace")
        return said.partition(f'  File "{Path(__file__).parent}')[0].strip()


def variables(strict: bool) -> dict[str, str]:
    """What a child sees of our environment variables: no secrets; `strict`: only what every program needs."""
    if strict:
        kept = {name: os.environ[name] for name in PASSED_ON if name in os.environ} | {"OMP_NUM_THREADS": "1"}
    else:
        kept = {name: value for name, value in os.environ.items() if not name.startswith(SECRETS)}
    return kept | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p), "PYTHONHASHSEED": "0"}
