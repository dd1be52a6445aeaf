"""What a machine that has joined reports to the service every second.

Device time is cumulative (bill.py). Every turn that has ended has a number, which grows while the machine's process
lives, and is reported until the service has confirmed it. So a report that is lost loses nothing, and one that is
repeated doubles nothing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import islice
from typing import Any, Literal

import msgspec

from windfall.jobs.bill import Times
from windfall.turns.sharing import Kind

MOST_KEPT = 50_000
"""Turns that are kept while the service does not answer: the newest. The others are missing in its timelines."""
MOST_REPORTED = 5000
"""Turns in one report, about 1 MB."""


class EndedTurn(msgspec.Struct, kw_only=True):
    device: str
    job: str
    kind: Kind
    start_s: float
    end_s: float
    work: float = 0.0
    beside: str = ""


class WaitingJob(msgspec.Struct, kw_only=True):
    job: str


class HeldDevice(msgspec.Struct, kw_only=True):
    """Who has a device at the moment, and who waits for it."""

    job: str = ""
    kind: Kind | Literal[""] = ""
    beside: str = ""
    waiting: list[WaitingJob] = []


class MachineReport(msgspec.Struct, kw_only=True):
    life: str
    """Names the process that reports."""
    times: Times
    price_usd_per_h: float = 0.0
    now_s: float = 0.0
    """The machine's clock (Unix time)."""
    devices: dict[str, HeldDevice] = {}
    first_turn: int = 0
    """The number of the first one of `turns`."""
    turns: list[EndedTurn] = []


class UnconfirmedTurns:
    """Turns that have ended and that the service has not confirmed."""

    def __init__(self) -> None:
        self.first = 0
        """The number of the oldest one."""
        self._turns: deque[dict[str, Any]] = deque()

    def add(self, turns: Sequence[dict[str, Any]]) -> None:
        self._turns.extend(turns)
        self.confirm(self.first + len(self._turns) - MOST_KEPT)

    def confirm(self, number: int) -> None:
        """The service has all turns before this number.

        >>> turns = UnconfirmedTurns()
        >>> turns.add([{"device": "gpu0"}, {"device": "gpu1"}, {"device": "gpu2"}])
        >>> turns.confirm(2)
        >>> turns.first, turns.oldest()
        (2, [{'device': 'gpu2'}])
        """
        while self._turns and self.first < number:
            self._turns.popleft()
            self.first += 1

    def oldest(self) -> list[dict[str, Any]]:
        return list(islice(self._turns, MOST_REPORTED))
