"""The turns of a process that shares its devices with other jobs. It takes the turn before it computes, and gives it
when it has nothing to do or another process should go on. The server of the machine (server.py) decides everything.

    process ── {"hello": key, "kind", "device"} ──▶ server       once for each connection
            ── {"take": n, "rows": r, "bytes": b, "awake": a} ──▶  b: bytes of its state that can sleep; whether they
                                                                 are on the device
            ◀── {"turn": n} ──                                   the turn has begun
            ◀── {"wanted": n} ──                                 give it after this step
            ◀── {"others": b} ──                                 only for rollout, when it changes: another job waits
                                                                for the device or has it
            ── {"give": n, "work": w} ──▶                        also withdraws a turn that has not begun
               "free": f, "lent": l, "woke": s                   f: free bytes of the device; l: those of them that its
                                                                 next rollout turn needs; s: how long the state took to
                                                                 come back, in seconds
            ◀── {"sleep": true} ──                               only to a trainer without the turn: free the device's
            ── {"slept": s} ──▶                                  memory; it took s seconds
            ── {"stays": true} ──▶                               or it could not

The number n counts the turns of a process, so that a late answer is recognized. A process without a connection has no
turn: a reader thread connects again, with back-off, and asks for the turn anew. Each object is used by one thread.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from windfall import backoff
from windfall.errors import WindfallError
from windfall.turns.sharing import Kind

SOCKET, KEY, DEVICES = "WINDFALL_TURNS", "WINDFALL_TURN_KEY", "WINDFALL_TURN_DEVICES"
"""Environment variables: path of the server's Unix socket, the job's secret, and names of devices, with commas."""
MAX_LINE_BYTES = 4096
FIRST_RETRY_S, MOST_RETRY_S = 0.1, 2.0


class DeviceTurn(Protocol):
    """The turn of all devices that a process uses."""

    def take(self, wait_s: float, rows: int = 0) -> bool:
        """Whether this process has the turn. If not, it waits for it at most `wait_s`, and stays in the queue. `rows`:
        responses that the engine decodes at once."""
        ...

    def give(self, work: float = 0.0) -> None:
        """End the turn, or leave the queue. `work`: tokens that were generated or trained in it."""
        ...

    @property
    def wanted(self) -> bool:
        """Whether another process should have the turn now."""
        ...

    @property
    def contended_s(self) -> float:
        """Seconds, since this process first asked for a turn, in which another job waited for the device or had it."""
        ...

    def close(self) -> None:
        """End the turn and the connection."""
        ...


class CanSleep(Protocol):
    """What a process keeps on its device between turns, and can put elsewhere."""

    @property
    def nbytes(self) -> int: ...
    @property
    def awake(self) -> bool:
        """Whether it is on the device."""
        ...

    def room(self) -> tuple[int, int]:
        """Free bytes of the device, and how many of them this process uses again in its next rollout turn. (0, 0): not
        known."""
        ...

    def sleep(self) -> None:
        """Free the device's memory. Raises RuntimeError if that is impossible; then nothing has changed."""
        ...

    def wake(self) -> bool:
        """Have the state on the device. Returns whether it had to come back."""
        ...


class _Free:
    """A device that the process does not share."""

    wanted = False
    contended_s = 0.0

    def take(self, wait_s: float, rows: int = 0) -> bool:
        return True

    def give(self, work: float = 0.0) -> None:
        pass

    def close(self) -> None:
        pass


FREE: DeviceTurn = _Free()


def of_environment(
    kind: Kind, environ: Mapping[str, str] = os.environ, *, device: int | None = None, state: CanSleep | None = None
) -> DeviceTurn:
    """The turn of the devices that the environment names. `device`: only the one with this number. `state`: what can
    sleep while other jobs have the device. A process with several devices keeps it awake."""
    path = environ.get(SOCKET, "")
    if not path:
        return FREE
    key, names = environ.get(KEY, ""), [name for name in environ.get(DEVICES, "").split(",") if name]
    for variable, value in ((KEY, key), (DEVICES, names)):
        if not value:
            fix = f"Set it, or remove {SOCKET}."
            raise WindfallError(
                f"{SOCKET} is set, but {variable} is not", where=f"environment variable {variable}", fix=fix
            )
    if device is not None:
        names = names[device : device + 1] or names[-1:]
    if len(names) == 1:
        return SharedDevice(path, key, kind, names[0], state)
    return SharedDevices([SharedDevice(path, key, kind, name) for name in sorted(set(names))])


class SharedDevice:
    """The turn of one device."""

    def __init__(self, path: str, key: str, kind: Kind, device: str, state: CanSleep | None = None) -> None:
        self.device = device
        self._state = state
        self._state_lock = threading.Lock()
        self._uses_state = False
        """Whether this process has the lock, and is awake."""
        self._path = path
        self._hello = {"hello": key, "kind": kind, "device": device}
        self._changed = threading.Condition()
        self._socket: socket.socket | None = None
        self._reader: threading.Thread | None = None
        self._asked = self._has = self._wanted = self._closed = False
        self._contended_s = 0.0
        self._others_since_s: float | None = None
        """When another job began to wait for the device or to have it. None: no other job does."""
        self._number = self._rows = self._bytes = 0
        self._awake = False
        self._woke_s = 0.0
        """How long the state took to wake in this turn."""
        self._said = ""

    def take(self, wait_s: float, rows: int = 0) -> bool:
        if self._state is not None and not self._asked:
            with self._state_lock:
                self._bytes, self._awake = self._state.nbytes, self._state.awake
        with self._changed:
            self._rows = rows
            if not self._asked:
                self._asked, self._closed = True, False
                self._ask()
            if self._reader is None:
                self._reader = threading.Thread(target=self._read, name=f"turn of {self.device}", daemon=True)
                self._reader.start()
            has = self._changed.wait_for(lambda: self._has, wait_s)
        if has and self._state is not None and not self._uses_state:
            self._state_lock.acquire()  # until `give`: a server that was restarted may ask a state in use to sleep
            self._uses_state, began_s = True, time.monotonic()
            self._woke_s = time.monotonic() - began_s if self._state.wake() else 0.0
        return has

    def give(self, work: float = 0.0) -> None:
        measured: dict[str, float] = {}
        if self._uses_state and self._state is not None:
            free, lent = self._state.room()
            measured = {"free": free, "lent": lent, "woke": self._woke_s}
            self._uses_state, self._woke_s = False, 0.0
            self._state_lock.release()
        with self._changed:
            if self._asked:
                self._send({"give": self._number, "work": work, **measured})
            self._asked = self._has = self._wanted = False

    @property
    def wanted(self) -> bool:
        return self._wanted

    @property
    def contended_s(self) -> float:
        with self._changed:
            since_s = self._others_since_s
            return self._contended_s + (0.0 if since_s is None else time.monotonic() - since_s)

    def close(self) -> None:
        self.give()
        with self._changed:
            self._closed = True
            if self._socket is not None:
                with contextlib.suppress(OSError):
                    self._socket.shutdown(socket.SHUT_RDWR)
            self._changed.notify_all()

    def _ask(self) -> None:
        self._number += 1
        self._has = self._wanted = False
        self._send({"take": self._number, "rows": self._rows, "bytes": self._bytes, "awake": self._awake})

    def _send(self, message: Mapping[str, Any]) -> None:
        """If there is no connection, the reader sends what counts then."""
        if self._socket is not None:
            with contextlib.suppress(OSError):  # the reader notices, too
                self._socket.sendall(json.dumps(message).encode() + b"\n")

    def _read(self) -> None:
        """Runs in the reader thread: connects again whenever the connection ends."""
        failures = 0
        while True:
            try:
                with socket.socket(socket.AF_UNIX) as connection:
                    connection.connect(self._path)
                    connection.sendall(json.dumps(self._hello).encode() + b"\n")
                    with self._changed:
                        self._socket = connection
                        if self._asked:
                            self._ask()
                    with connection.makefile("rb") as lines:
                        while line := lines.readline(MAX_LINE_BYTES):
                            self._heard(json.loads(line))
                            failures = 0
                    raise ConnectionError("the server has closed the connection")
            except Exception as e:  # fault boundary: whatever a server sends, this thread connects again
                with self._changed:
                    self._socket, self._has, self._wanted = None, False, False
                    self._others(False)
                    if self._changed.wait_for(lambda: self._closed, backoff.delay_s(
                        failures, first_s=FIRST_RETRY_S, limit_s=MOST_RETRY_S
                    )):  # fmt: skip
                        self._reader = None
                        return
                failures += 1
                self._say(f"no turns of {self.device} from {self._path}: {e}; trying again, and waiting meanwhile")

    def _heard(self, message: Mapping[str, Any]) -> None:
        if "sleep" in message and self._state is not None:
            self._sleep(self._state)
        with self._changed:
            if "refused" in message:
                raise ConnectionError(f"refused: {message['refused']}")
            if "others" in message:
                self._others(bool(message["others"]))
            if self._asked and message.get("turn") == self._number:
                self._has, self._said = True, ""
                self._changed.notify_all()
            elif message.get("wanted") == self._number:
                self._wanted = self._has

    def _others(self, others: bool) -> None:
        now_s = time.monotonic()
        if self._others_since_s is not None:
            self._contended_s += now_s - self._others_since_s
        self._others_since_s = now_s if others else None

    def _sleep(self, state: CanSleep) -> None:
        """This process has no turn until the answer, so its own thread leaves the state alone meanwhile."""
        began_s = time.monotonic()
        answer: dict[str, Any] = {"stays": True}
        try:
            with self._state_lock:
                state.sleep()
            answer = {"slept": time.monotonic() - began_s}
        except RuntimeError as e:  # no memory for it; the other job may then find too little on the device
            self._say(f"the trainer's state stays on {self.device}: {e}")
        with self._changed:
            self._send(answer)

    def _say(self, line: str) -> None:
        if line != self._said:
            self._said = line
            print(f"{line}\n", end="", file=sys.stderr, flush=True)  # in one write: other threads write lines, too


class SharedDevices:
    """The turns of several devices. All processes take them in the same order, so two never wait for each other."""

    def __init__(self, turns: Sequence[SharedDevice]) -> None:
        self._turns = sorted(turns, key=lambda turn: turn.device)

    def take(self, wait_s: float, rows: int = 0) -> bool:
        until_s = time.monotonic() + wait_s
        return all(turn.take(max(0.0, until_s - time.monotonic()), rows) for turn in self._turns)

    def give(self, work: float = 0.0) -> None:
        for turn in reversed(self._turns):
            turn.give(work / len(self._turns))

    @property
    def wanted(self) -> bool:
        return any(turn.wanted for turn in self._turns)

    @property
    def contended_s(self) -> float:
        return max(turn.contended_s for turn in self._turns)

    def close(self) -> None:
        for turn in reversed(self._turns):
            turn.close()
