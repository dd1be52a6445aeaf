"""Sends the page of a run to its viewers, as server-sent events: all of it each time, at a bounded rate.

    follow()    one call per viewer: sends what was encoded last, then waits for what is newer
    tick()      every TICK_S, if there are viewers: encodes the page again when that is due

The page is encoded once for all viewers. The larger it is, the rarer: a viewer gets at most RATE bytes per second. A
viewer has no queue: one that is slow gets the newest page when it has taken the last one, and one that takes nothing
for STUCK_S is closed. At most MAX_VIEWERS are served.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec

from windfall.page.history import RunHistory

TICK_S = 1.0
RATE = 200_000
STUCK_S = 30.0
PIECE = 256 << 10
"""Bytes that are written at once."""
MAX_VIEWERS = 200
MAX_SHOWN_WORKERS = 100
"""Upper limit for the workers in a snapshot that is sent."""
SHOWN = ("worker", "lease", "kind", "device", "state", "version", "running", "slots", "tok_per_s", "age_s", "lender")
"""Fields of a worker that are sent."""


class Feed:
    def __init__(self, history: RunHistory, *, name: str, recipe: dict[str, Any], status: Callable[[], str]) -> None:
        self.history, self._name, self._recipe, self._status = history, name, recipe, status
        self.snapshot: dict[str, Any] | None = None
        """The last state of the fleet."""
        self.viewers = 0
        self._data = b""
        """What was encoded last; empty while there are no viewers."""
        self._due_s = 0.0
        """When it is encoded again (monotonic)."""
        self._newer = asyncio.Event()
        """Set when `_data` is replaced."""

    def tick(self, *, at_once: bool = False) -> None:
        """Encode the page again if it has viewers, and if that is due or must happen `at_once`."""
        if not self.viewers:
            self._data = b""
        elif at_once or time.monotonic() >= self._due_s:
            self._encode()

    async def follow(self, write: Callable[[bytes], Awaitable[None]]) -> None:
        """Serve one viewer until its connection closes or is stuck. `write` waits until there is room."""
        self.viewers += 1
        try:
            if not self._data:
                self._encode()
            while True:
                data, newer = self._data, self._newer
                for start in range(0, len(data), PIECE):
                    async with asyncio.timeout(STUCK_S):
                        await write(data[start : start + PIECE])
                await newer.wait()
        finally:
            self.viewers -= 1

    def _encode(self) -> None:
        data = {"name": self._name, "status": self._status(), "history": self.history.full(), "recipe": self._recipe}
        if self.snapshot is not None:
            data["snapshot"] = shown(self.snapshot, shift_s=self.history.shift_s)
        self._data = b"event: full\ndata: " + msgspec.json.encode(data) + b"\n\n"
        self._due_s = time.monotonic() + len(self._data) / RATE
        self._newer.set()
        self._newer = asyncio.Event()


def shown(snapshot: dict[str, Any], *, shift_s: float = 0.0) -> dict[str, Any]:
    """What the page shows of a snapshot of the fleet, with a row for each of the first workers. `shift_s`: see
    `RunHistory`.

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
    out["workers"] = [{key: w[key] for key in SHOWN if key in w} for w in here[:MAX_SHOWN_WORKERS]]
    return out
