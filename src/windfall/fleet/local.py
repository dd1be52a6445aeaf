"""Workers on this machine: a wanted number of them, kept running.

- Slot k holds the workers `w<k>.1`, `w<k>.2`, ...: one after the other, each when the last has ended.
- One that ends by itself is started again (`keep.py` says when), unless it ended with status 3: refused.
- A smaller target ends the highest slots, in order: SIGTERM, then SIGKILL after `grace_s`.
"""

from __future__ import annotations

import asyncio

from windfall.errors import WindfallError
from windfall.fleet.base import OnEvent, Spawn, unheard
from windfall.fleet.restart import GRACE_S, Crew
from windfall.types import Lease

RESERVED = Lease(kind="reserved")


class LocalProvider:
    name = "local"

    def __init__(
        self,
        spawn: Spawn,
        count: int,
        *,
        terms: Lease = RESERVED,
        on_event: OnEvent = unheard,
        grace_s: float = GRACE_S,
        prefix: str = "w",
    ) -> None:
        self._crew = Crew(spawn, terms=terms, on_event=on_event, grace_s=grace_s)
        self.prefix, self._grace_s = prefix, grace_s
        self._changed = asyncio.Event()
        self.target(count)

    @property
    def started(self) -> int:
        return self._crew.started

    @property
    def lost(self) -> int:
        return self._crew.lost

    def target(self, n: int) -> None:
        if n < 0:
            raise WindfallError(f"{n} workers are wanted", where="fleet", fix="Ask for 0 or more.")
        self._count = n
        self._changed.set()

    async def run(self) -> None:
        async with self._crew as crew:
            while True:
                self._changed.clear()
                wanted = [f"{self.prefix}{k + 1}" for k in range(self._count)]
                for name in crew.up:
                    if name not in wanted:
                        crew.take_down(name, self._grace_s)
                for name in wanted:
                    crew.bring_up(name)
                await crew.until(self._changed)
