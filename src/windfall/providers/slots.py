"""A provider that keeps the requested number of workers running, one per slot. Base class of most providers.

- Slot k holds the workers `w<k>.1`, `w<k>.2`, ...: one at a time, each started after the previous one has ended.
- A worker that ends by itself is restarted (restart.py says when), unless it exits with status 3 (refused).
- A smaller target ends the workers of the highest slots: SIGTERM, then SIGKILL after `grace_s`.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable

from windfall.errors import WindfallError
from windfall.processes.restart import GRACE_S, RestartDelay, RestartingNodes
from windfall.providers.base import OnEvent, Spawn, ignore_event
from windfall.types import Lease


class SlotProvider(RestartingNodes):
    name = "slots"

    def __init__(
        self, spawn: Spawn, count: int, *, terms: Lease, on_event: OnEvent = ignore_event, grace_s: float = GRACE_S,
        prefix: str = "w", delay: Callable[[], RestartDelay] = RestartDelay, patient: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(spawn, terms=terms, on_event=on_event, grace_s=grace_s, delay=delay, patient=patient)
        self.prefix, self._changed = prefix, asyncio.Event()
        self.target(count)

    def target(self, n: int) -> None:
        if n < 0:
            raise WindfallError(f"{n} workers were requested", where="fleet", fix="Request 0 or more.")
        self._count = n
        self._changed.set()

    def owns(self, worker: str) -> bool:
        return re.fullmatch(rf"{re.escape(self.prefix)}\d+\.\d+(-r\d+)?", worker) is not None

    async def run(self) -> None:
        async with self:
            while True:
                self._changed.clear()
                wanted = [f"{self.prefix}{k + 1}" for k in range(self._count)]
                for name in self.up:
                    if name not in wanted:
                        self.take_down(name, self.grace_s)
                for name in wanted:
                    self.bring_up(name)
                await self.wait_for(self._changed)


def slot_of(worker: str) -> int:
    """The number of the slot of a worker.

    >>> slot_of("slurm12.3")
    12
    """
    found = re.search(r"(\d+)\.\d+$", worker)
    assert found, worker
    return int(found[1])
