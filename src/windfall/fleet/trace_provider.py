"""Workers that come and go as a trace says: really started, and really killed.

- When a node comes up in the trace, a worker is started: `n3.1`, then `n3.2` the next time. When it goes down, the
  worker's process group gets SIGKILL, after SIGTERM and `notice_s` if that is not 0. Both at the trace's time divided
  by `speedup`, counted from the call of `run`.
- A worker that dies by itself while its node is up is started again (`keep.py` says when).
- After the last change what is up stays up; with `repeat` the trace starts over after `length_s` (by default the time
  of its last change): nodes that are up at both seams go on, the others are killed there.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Sequence

from windfall.errors import WindfallError
from windfall.fleet.base import OnEvent, Spawn, unheard
from windfall.fleet.restart import GRACE_S, Crew
from windfall.fleet.trace_formats import Change, check
from windfall.types import Lease

SPOT = Lease(kind="spot")


class TraceProvider:
    name = "trace"

    def __init__(
        self,
        spawn: Spawn,
        changes: Sequence[Change],
        *,
        speedup: float = 1.0,
        repeat: bool = False,
        length_s: float | None = None,
        terms: Lease = SPOT,
        on_event: OnEvent = unheard,
        grace_s: float = GRACE_S,
        notice_s: float = 0.0,
    ) -> None:
        check(changes)
        if not (math.isfinite(speedup) and speedup > 0):
            raise WindfallError(f"a speedup of {speedup}", where="fleet trace", fix="Use a number above 0.")
        self._changes, self._speedup, self._repeat = list(changes), speedup, repeat
        self._length_s = changes[-1].at_s if length_s is None else length_s
        if repeat and not self._length_s > 0:
            what = f"a trace of {self._length_s} s cannot be repeated"
            raise WindfallError(what, where="fleet trace", fix="Give its length in seconds, or do not repeat it.")
        self._crew, self._notice_s = Crew(spawn, terms=terms, on_event=on_event, grace_s=grace_s), notice_s

    @property
    def started(self) -> int:
        return self._crew.started

    @property
    def lost(self) -> int:
        return self._crew.lost

    def target(self, n: int) -> None:
        """A trace has its own mind."""

    async def run(self) -> None:
        async with self._crew as crew:
            began = time.monotonic()
            while True:
                for change in self._changes:
                    if self._repeat and change.at_s > self._length_s:
                        break
                    await self._sleep_until(began + change.at_s / self._speedup)
                    self._apply(change)
                if not self._repeat:
                    break
                began += self._length_s / self._speedup
                await self._sleep_until(began)
                for name in set(crew.up) - {c.node for c in self._changes if c.at_s == 0 and c.up}:
                    crew.take_down(name, self._notice_s)
            await crew.until(asyncio.Event())

    async def _sleep_until(self, moment: float) -> None:
        await asyncio.sleep(0)  # also when we are late: others must get their turn
        if (left_s := moment - time.monotonic()) > 0:
            await self._crew.until(asyncio.Event(), left_s)

    def _apply(self, change: Change) -> None:
        if change.up:
            self._crew.bring_up(change.node)
        elif change.node in self._crew.up:
            self._crew.take_down(change.node, self._notice_s)
