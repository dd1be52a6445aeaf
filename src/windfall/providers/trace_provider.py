"""Workers that come and go according to an availability trace. The processes are really started and really killed.

- When a node comes up in the trace, a worker is started: `n3.1`, then `n3.2` the next time. When the node goes down,
  the worker's process group gets SIGKILL, after SIGTERM and `notice_s` seconds if `notice_s` is not 0. Times are those
  of the trace divided by `speedup`, counted from the call to `run`.
- A worker that dies by itself while its node is up is restarted (slots.py says when).
- After the last change, the nodes that are up stay up.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Sequence

from windfall.errors import WindfallError
from windfall.providers.base import OnEvent, Spawn, ignore_event
from windfall.providers.slots import GRACE_S, RestartingNodes
from windfall.providers.trace_formats import Change, check
from windfall.types import Lease

SPOT = Lease(kind="spot")


class TraceProvider(RestartingNodes):
    name = "trace"

    def __init__(
        self,
        spawn: Spawn,
        changes: Sequence[Change],
        *,
        speedup: float = 1.0,
        terms: Lease = SPOT,
        on_event: OnEvent = ignore_event,
        grace_s: float = GRACE_S,
        notice_s: float = 0.0,
    ) -> None:
        check(changes)
        if not (math.isfinite(speedup) and speedup > 0):
            raise WindfallError(f"the speedup is {speedup}", where="fleet trace", fix="Use a number above 0.")
        super().__init__(spawn, terms=terms, on_event=on_event, grace_s=grace_s)
        self._changes = list(changes)
        self._speedup = speedup
        self._notice_s = notice_s

    def target(self, n: int) -> None:
        """Ignored: the trace decides how many workers run."""

    def owns(self, worker: str) -> bool:
        return worker.rpartition(".")[0] in {change.node for change in self._changes}

    async def run(self) -> None:
        async with self:
            began = time.monotonic()
            for change in self._changes:
                await self._sleep_until(began + change.at_s / self._speedup)
                if change.up:
                    self.bring_up(change.node)
                elif change.node in self.up:
                    self.take_down(change.node, self._notice_s)
            await self.wait_for(asyncio.Event())

    async def _sleep_until(self, moment: float) -> None:
        await asyncio.sleep(0)  # even if we are late, other tasks must run
        if (left_s := moment - time.monotonic()) > 0:
            await self.wait_for(asyncio.Event(), left_s)
