"""Sends the history of a run to its viewers, as server-sent events.

    tick()      every TICK_S, if there are viewers: what has changed, encoded once for all of them
    follow()    one call per viewer: everything, then the changes

Back-pressure: a viewer has no queue. When its connection has room again, it gets the changes that it missed, or, if
those are no longer kept, everything. What viewers cost does not depend on how slow they are: the changes of a tick are
encoded once, and everything is encoded at most once in FULL_S. A viewer whose connection takes nothing for STUCK_S is
disconnected. At most MAX_VIEWERS are served.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec

from windfall.page.history import History

TICK_S = 1.0
FULL_S = 5.0
STUCK_S = 30.0
KEPT = 30
"""Number of the newest changes that are kept."""
MAX_VIEWERS = 200
MAX_SHOWN_WORKERS = 500
"""Upper limit for the workers in a snapshot that is sent."""


class Feed:
    def __init__(self, history: History, *, name: str, recipe: dict[str, Any], status: Callable[[], str]) -> None:
        self.history, self._name, self._recipe, self._status = history, name, recipe, status
        self.snapshot: dict[str, Any] | None = None
        """The last state of the fleet."""
        self.viewers = 0
        self._tick = 0
        self._since = 0
        """What `History.mark` returned at the last tick."""
        self._changes: deque[bytes] = deque(maxlen=KEPT)
        """The newest changes; the last one leads to `_tick`."""
        self._full: tuple[int, float, bytes] | None = None
        """Everything: as of which tick, when it was encoded (monotonic, seconds), and the bytes."""
        self._ticked = asyncio.Event()

    def tick(self) -> None:
        """Encode what has changed, if there are viewers."""
        if not self.viewers:
            if self._changes:  # the last viewer is gone: the next one begins with everything
                self._changes.clear()
                self._full = None
            return
        self._changes.append(self._encode("changes", self.history.changes(self._since)))
        self._since = self.history.mark()
        self._tick += 1
        self._ticked.set()
        self._ticked = asyncio.Event()

    async def follow(self, write: Callable[[bytes], Awaitable[None]]) -> None:
        """Serve one viewer until its connection closes or is stuck."""
        self.viewers += 1
        try:
            seen = -1
            while True:
                ticked = self._ticked
                if seen < 0 or self._tick - seen > len(self._changes):
                    seen, chunk = self._everything()
                else:
                    missed = self._tick - seen
                    seen, chunk = self._tick, b"".join(list(self._changes)[len(self._changes) - missed :])
                if chunk:
                    async with asyncio.timeout(STUCK_S):
                        await write(chunk)
                if seen == self._tick:
                    await ticked.wait()
        finally:
            self.viewers -= 1

    def _everything(self) -> tuple[int, bytes]:
        now = time.monotonic()
        if self._full is None or now - self._full[1] > FULL_S or self._tick - self._full[0] > len(self._changes):
            if not self._changes:  # there were no viewers: the changes begin here
                self._since = self.history.mark()
            self._full = (self._tick, now, self._encode("full", self.history.full()))
        return self._full[0], self._full[2]

    def _encode(self, kind: str, history: dict[str, Any]) -> bytes:
        snapshot = self.snapshot
        if snapshot is not None and len(snapshot.get("workers", ())) > MAX_SHOWN_WORKERS:
            snapshot = {**snapshot, "workers": snapshot["workers"][-MAX_SHOWN_WORKERS:]}
        data = {"name": self._name, "status": self._status(), "history": history, "snapshot": snapshot}
        if kind == "full":
            data["recipe"] = self._recipe
        return b"event: " + kind.encode() + b"\ndata: " + msgspec.json.encode(data) + b"\n\n"
