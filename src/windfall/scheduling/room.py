"""Responses that are too long for some workers, or for all of them. Pure.

How much a worker has room for, it says when it is ready; if it rejects a response all the same, it has less. That is a
fact about the worker, so the response goes to another (`Giving.give`). Only a response that no worker has room for ends
the run: when that has been so for NO_ROOM_S, and no worker is still starting whose room is not known yet.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from windfall.ledger.ledger import Ledger, LedgerEntry, room
from windfall.scheduling.members import Member, WorkerState

NO_ROOM_S = 60.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    response: str
    tokens: int
    """That it needs."""
    most: float
    """That any worker has."""
    why: str
    """Why the run cannot go on; empty: it may still, and this is the first time that it is told."""


class Room:
    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._since_s: float | None = None

    def look(self, here: Iterable[Member], now_s: float) -> Verdict | None:
        """What there is to say of a queued response that fits nowhere, if anything."""
        staying = [w for w in here if w.state is not WorkerState.DRAINING]
        known = [w for w in staying if w.booted]
        most = max((w.longest for w in known), default=math.inf)
        entry = self.too_long(most)
        if entry is None:
            self._since_s = None
            return None
        first = self._since_s is None
        since_s = self._since_s = now_s if self._since_s is None else self._since_s
        over = now_s - since_s >= NO_ROOM_S and len(known) == len(staying)
        if not first and not over:
            return None
        if over:
            self._since_s = None
        needed = room(entry.episode)
        why = (
            f"it needs room for {needed} tokens (its prompt and rollout.max_tokens), and for {NO_ROOM_S:g} s no worker "
            f"has had more than {most:g}. Set engine.kv_tokens to {needed + 1} or more, raise fleet.worker_memory "
            "(--memory of a worker), lower rollout.max_tokens, or add a worker with more memory"
        )
        return Verdict(response=entry.episode.id, tokens=needed, most=most, why=why if over else "")

    def too_long(self, most: float) -> LedgerEntry | None:
        """A queued response that needs more room than this."""
        if self._ledger.longest <= most:
            return None
        queued = (self._ledger.entries[id] for id in self._ledger.queue)
        return next((entry for entry in queued if room(entry.episode) > most), None)
