"""Handles responses that are too long for some workers, or for all of them. Pure.

When a worker is ready, it reports how many tokens it has room for. If it rejects a shorter response, it has less room
than that. Room is a property of the worker, so the response goes to another one (`Placement.assign`). The run ends only
if a response has fitted on no worker for NO_ROOM_S and every worker has booted, so that the room of each is known.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from windfall.controller.ledger.ledger import Ledger, LedgerEntry, room
from windfall.controller.scheduling.members import Member, WorkerState

NO_ROOM_S = 60.0
"""Maximum seconds for which a queued response may fit on no worker."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    response: str
    tokens: int
    """Tokens for which the response needs room."""
    most: float
    """Tokens for which the largest worker has room."""
    why: str
    """Why the run cannot continue; empty in the first report, when it still may."""


class Room:
    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._since_s: float | None = None
        """When a queued response first fitted on no worker (loop time, seconds). None if all fit."""

    def look(self, here: Iterable[Member], now_s: float) -> Verdict | None:
        """Reports a queued response that fits on no worker: when it is first seen, and when NO_ROOM_S have passed."""
        staying = [w for w in here if w.state is not WorkerState.DRAINING]
        booted = [w for w in staying if w.booted]
        most = max((w.longest for w in booted), default=math.inf)
        entry = self.too_long(most)
        if entry is None:
            self._since_s = None
            return None
        first = self._since_s is None
        since_s = self._since_s = now_s if self._since_s is None else self._since_s
        failed = now_s - since_s >= NO_ROOM_S and len(booted) == len(staying)
        if not first and not failed:
            return None
        if failed:
            self._since_s = None
        needed = room(entry.episode)
        why = (
            f"it needs room for {needed} tokens (its prompt and rollout.max_tokens), and for {NO_ROOM_S:g} s no worker "
            f"has had more than {most:g}. Set engine.kv_tokens to {needed + 1} or more, raise fleet.worker_memory "
            "(--memory of a worker), lower rollout.max_tokens, or add a worker with more memory"
        )
        return Verdict(response=entry.episode.id, tokens=needed, most=most, why=why if failed else "")

    def too_long(self, most: float) -> LedgerEntry | None:
        """The first queued response that needs room for more tokens than `most`."""
        if self._ledger.longest <= most:
            return None
        queued = (self._ledger.entries[id] for id in self._ledger.queue)
        return next((entry for entry in queued if room(entry.episode) > most), None)
