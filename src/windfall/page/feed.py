"""Sends the history of a run to its viewers, as server-sent events.

    follow()    one call per viewer: sends everything, then waits until the viewer is gone or stuck
    tick()      every TICK_S, if there are viewers: encodes what has changed once, and writes it to every connection

A viewer costs the run little: after it has everything, nothing is computed for it and no task wakes for it. A tick
hands the same bytes to each connection, and they contain only what has changed.

Back-pressure: a viewer has no queue. A connection that has not taken the last bytes yet is passed over, and gets the
changes that it missed when it has room again. A connection that takes nothing for STUCK_S is closed; the browser opens
another one and gets everything. Everything is encoded at most once in FULL_S. At most MAX_VIEWERS are served.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec

from windfall.page.history import RunHistory

TICK_S = 1.0
FULL_S = 5.0
STUCK_S = 30.0
KEPT = 60
"""Number of the newest changes that are kept: more than a viewer can miss in STUCK_S."""
PIECE = 256 << 10
"""Bytes of everything that are written at once."""
MAX_VIEWERS = 200
MAX_SHOWN_WORKERS = 100
"""Upper limit for the workers in a snapshot that is sent."""
WORKERS_TICKS = 5
"""The workers are sent with every tick if there are few of them, and otherwise with every fifth."""
FEW_WORKERS = 20
SHOWN = (
    "worker", "lease", "kind", "device", "state", "version", "base", "versions", "running", "slots", "tok_per_s",
    "age_s", "lender",
)  # fmt: skip
"""Fields of a worker that are sent."""


class ViewerConnection(Protocol):
    """A transport of asyncio."""

    def write(self, data: bytes) -> None: ...
    def get_write_buffer_size(self) -> int: ...
    def is_closing(self) -> bool: ...


@dataclass(eq=False, slots=True)
class _Viewer:
    connection: ViewerConnection
    seen: int
    """The tick whose changes it has got last."""
    since_s: float
    """When its connection last took everything (monotonic)."""
    over: asyncio.Event = field(default_factory=asyncio.Event)
    """It is gone or stuck."""


class Feed:
    def __init__(self, history: RunHistory, *, name: str, recipe: dict[str, Any], status: Callable[[], str]) -> None:
        self.history, self._name, self._recipe, self._status = history, name, recipe, status
        self.snapshot: dict[str, Any] | None = None
        """The last state of the fleet."""
        self.viewers = 0
        self._following: set[_Viewer] = set()
        self._tick = 0
        self._changes: deque[bytes] = deque(maxlen=KEPT)
        """The newest changes, as chunks of HTTP; the last one leads to `_tick`."""
        self._full: tuple[int, float, bytes] | None = None
        """Everything: as of which tick, when it was encoded (monotonic, seconds), and the bytes."""

    def tick(self) -> None:
        """Send what has changed, if there are viewers."""
        if not self.viewers:
            if self._changes:  # the last viewer is gone: the next one begins with everything
                self._changes.clear()
                self._full = None
            return
        self._changes.append(_chunk(self._encode("changes", self.history.changes())))
        self._tick += 1
        now_s = time.monotonic()
        for viewer in list(self._following):
            self._send(viewer, now_s)

    def _send(self, viewer: _Viewer, now_s: float) -> None:
        """Give a viewer the changes that it does not have, if its connection has room."""
        missed, kept = self._tick - viewer.seen, len(self._changes)
        if viewer.connection.is_closing() or missed > kept:
            viewer.over.set()
        elif viewer.connection.get_write_buffer_size():
            if now_s - viewer.since_s >= STUCK_S:
                viewer.over.set()
        else:
            viewer.connection.write(b"".join(list(self._changes)[kept - missed :]))
            viewer.seen, viewer.since_s = self._tick, now_s

    async def follow(self, write: Callable[[bytes], Awaitable[None]], connection: ViewerConnection) -> None:
        """Serve one viewer until its connection closes or is stuck. `write` waits until there is room, and frames what
        it gets as a chunk of HTTP; ticks write their chunks to `connection`."""
        self.viewers += 1
        try:
            seen, data = self._everything()
            for start in range(0, len(data), PIECE):
                async with asyncio.timeout(STUCK_S):
                    await write(data[start : start + PIECE])
            viewer = _Viewer(connection, seen, time.monotonic())
            self._following.add(viewer)
            try:
                await viewer.over.wait()
            finally:
                self._following.discard(viewer)
        finally:
            self.viewers -= 1

    def _everything(self) -> tuple[int, bytes]:
        now = time.monotonic()
        if self._full is None or now - self._full[1] > FULL_S or self._tick - self._full[0] > len(self._changes):
            if not self._changes:  # there were no viewers: the changes begin here
                self.history.forget_changes()
            self._full = (self._tick, now, self._encode("full", self.history.full()))
        return self._full[0], self._full[2]

    def _encode(self, kind: str, history: dict[str, Any]) -> bytes:
        data = {"name": self._name, "status": self._status(), "history": history}
        if self.snapshot is not None:
            due = kind == "full" or self._tick % WORKERS_TICKS == 0
            data["snapshot"] = shown(self.snapshot, shift_s=self.history.shift_s, most=None if due else FEW_WORKERS)
        if kind == "full":
            data["recipe"] = self._recipe
        return b"event: " + kind.encode() + b"\ndata: " + msgspec.json.encode(data) + b"\n\n"


def shown(snapshot: dict[str, Any], *, shift_s: float = 0.0, most: int | None = None) -> dict[str, Any]:
    """What the page shows of a snapshot of the fleet, with a row for each of the first workers. `most`: no rows if
    there are more workers than this. `shift_s`: see `RunHistory`.

    >>> shown({"open": 3, "pid": 7, "workers": [{"worker": "n1", "lease": "spot", "state": "ready", "why": ""}]})
    {'open': 3, 'leases': [['spot', 'ready', 1]], 'workers': [{'worker': 'n1', 'lease': 'spot', 'state': 'ready'}]}
    """
    here = [w for w in snapshot.get("workers", ()) if w.get("state") != "gone"]
    counts = Counter((str(w.get("lease")), str(w.get("state"))) for w in here)
    keys = ("t", "step", "steps", "version", "queued", "open", "lost", "graders")
    out = {key: snapshot[key] for key in keys if snapshot.get(key) is not None}
    if "t" in out:
        out["t"] += shift_s
    if snapshot.get("counts"):
        out["moved"] = snapshot["counts"].get("moved", 0)
    out["leases"] = [[lease, state, count] for (lease, state), count in sorted(counts.items())]
    if most is None or len(here) <= most:
        out["workers"] = [{key: w[key] for key in SHOWN if key in w} for w in here[:MAX_SHOWN_WORKERS]]
    return out


def _chunk(data: bytes) -> bytes:
    """A chunk of HTTP/1.1.

    >>> _chunk(b"twelve bytes")
    b'c\\r\\ntwelve bytes\\r\\n'
    """
    return b"%x\r\n%b\r\n" % (len(data), data)
