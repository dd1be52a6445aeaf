"""Workers on this machine: keeps the requested number of processes running (slots.py has the rules)."""

from __future__ import annotations

from windfall.processes.restart import GRACE_S
from windfall.providers.base import OnEvent, Spawn, ignore_event
from windfall.providers.slots import SlotProvider
from windfall.types import Lease

RESERVED = Lease(kind="reserved")


class LocalProvider(SlotProvider):
    name = "local"

    def __init__(
        self, spawn: Spawn, count: int, *, terms: Lease = RESERVED, on_event: OnEvent = ignore_event,
        grace_s: float = GRACE_S, prefix: str = "w",
    ) -> None:  # fmt: skip
        super().__init__(spawn, count, terms=terms, on_event=on_event, grace_s=grace_s, prefix=prefix)
