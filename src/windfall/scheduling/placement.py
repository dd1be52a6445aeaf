"""Who gets what, and who gives what back: `balance` and `rebalance`, or `algorithm2`, applied to the ledger. No clock,
no I/O.

It remembers what those two need: how fast everybody is, who has pages of which group, for whom a response was moved,
and how long responses are.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Literal

import msgspec

from windfall.ledger.ledger import Ledger, LedgerEntry, room
from windfall.scheduling import rlboost
from windfall.scheduling.balance import WorkerLoad, place
from windfall.scheduling.fleet_speed import FleetSpeed
from windfall.scheduling.members import Member
from windfall.scheduling.rebalance import Running, rebalance
from windfall.scheduling.worker_speed import Speeds

MUCH = 0.1
"""Of the tokens behind what a worker runs: to compute so many again takes time that says nothing of its steps."""


@dataclass(slots=True)
class _Again:
    """What a worker computes again."""

    last: LedgerEntry
    tokens: int = 0
    seconds: float = 0.0
    """Since it was given that, less what its steps should have taken."""


class Giving:
    def __init__(self, ledger: Ledger, *, balancing: bool | Literal["algorithm2"] = True) -> None:
        """`balancing` off: everybody counts as equally fast, and what runs stays where it is."""
        self.speeds = Speeds()
        self._ledger, self._balancing = ledger, balancing
        self._holds: dict[str, dict[str, None]] = {}
        """Group to workers that have pages of it, in the order in which they got them: the same in every process."""
        self._meant: dict[str, str] = {}
        """Response to the worker that it was moved for."""
        self._ended = self._ended_tokens = 0
        self._prefilling: dict[str, _Again] = {}
        """Workers that were given what others had begun, where that is much of all they have."""

    @property
    def typical(self) -> float:
        """How long a response is, on average, as far as is known; 0: nothing is."""
        return self._ended_tokens / self._ended if self._ended else 0.0

    def rate(self, member: Member, responses: int, sharing: int) -> float:
        """What it should make, in tokens per second, with its part of so many responses that `sharing` workers share;
        0: nobody knows."""
        batch = min(member.slots, -(-responses // max(1, sharing)))
        return self.speeds.tok_per_s(member.id, batch) if batch else 0.0

    def crowd(self, members: Iterable[Member]) -> FleetSpeed | None:
        """What these make together; None: of one of them, nobody knows."""
        out = FleetSpeed()
        for member in members:
            profile = self.speeds.profile(member.id)
            if profile is None:
                return None
            out += FleetSpeed.of(profile, member.slots)
        return out if out.workers else None

    def observe(self, worker: str, batch: int, tokens: int, seconds: float, context: int) -> None:
        """What a frame says of a worker's speed; nothing while it computes again what others had begun."""
        again = self._prefilling.get(worker)
        if again is None:
            self.speeds.observe(worker, batch, tokens, seconds, context)
            return
        rate = self.speeds.tok_per_s(worker, batch)
        again.seconds += seconds - (tokens / rate if rate else 0.0)
        if again.last.worker != worker:  # it has ended, or gone elsewhere, before it was seen to go on here
            del self._prefilling[worker]
        elif len(again.last.episode.tokens) > again.last.recorded:
            self.speeds.prefilled(worker, again.tokens, again.seconds)
            del self._prefilling[worker]

    def forget(self, worker: str) -> None:
        """It is gone."""
        self.speeds.forget(worker)
        self._prefilling.pop(worker, None)

    def loads(self, ready: Iterable[Member]) -> list[WorkerLoad]:
        speed = self.speeds.profile if self._balancing else lambda worker: None
        running = self._ledger.running
        return [
            WorkerLoad(
                worker=w.id, running=(count := running(w.id)), slots=w.slots, profile=speed(w.id),
                waiting=min(w.stats.waiting, count) if w.stats and w.stats.waiting else 0,
                prefill_tok_per_s=self.speeds.prefill_tok_per_s(w.id),
            )
            for w in ready
        ]  # fmt: skip

    def give(
        self, loads: Sequence[WorkerLoad], version: int, *, coming: int, longest: Mapping[str, float] | None = None
    ) -> dict[str, list[LedgerEntry]]:
        """Takes from the queue what should go now, and assigns it. `longest`: the most tokens that a worker has room
        for, where that is known. A response goes only where it fits: those that fit into the fewest workers first."""
        out: dict[str, list[LedgerEntry]] = {}
        sizes = [(longest or {}).get(load.worker, math.inf) for load in loads]
        small = sorted({size for size in sizes if size < self._ledger.longest})
        for n in range(len(small), -1, -1):  # in most fleets no worker is too small, and this is one pass
            fit = [load for load, size in zip(loads, sizes, strict=True) if n == 0 or size > small[n - 1]]
            fit = [_with(load, len(out.get(load.worker, ()))) for load in fit]
            self._place(self._queued(small, n) if small else self._ledger.queue, fit, version, coming, out)
        for worker, entries in out.items():
            moved = [e for e in entries if e.moved]
            tokens = sum(len(e.episode.prompt) + len(e.episode.tokens) for e in moved)
            if tokens > MUCH * self._ledger.context(worker):
                before = self._prefilling.get(worker, _Again(moved[-1]))
                self._prefilling[worker] = _Again(moved[-1], before.tokens + tokens, before.seconds)
        return out

    def _queued(self, small: Sequence[float], n: int) -> list[str]:
        """In order: what needs more room than all of the first n of these sizes, and not more than the next."""
        entries = self._ledger.entries
        return [id for id in self._ledger.queue if bisect_left(small, room(entries[id].episode)) == n]

    def _place(
        self,
        queued: Sequence[str],
        loads: Sequence[WorkerLoad],
        version: int,
        coming: int,
        out: dict[str, list[LedgerEntry]],
    ) -> None:
        free = sum(max(0, load.slots - load.running) for load in loads)
        first = list(islice(queued, free))
        behind = len(queued) - len(first)
        if self._balancing == "algorithm2":
            chosen = rlboost.select(first, loads, coming=coming, meant=self._meant)
        else:
            chosen = place(
                first, loads, behind=behind, coming=coming, holds=self._holds, meant=self._meant, typical=self.typical
            )
        for id, worker in chosen:
            self._ledger.queue.remove(id)  # at its head, unless something before it has to wait for more room
            self._meant.pop(id, None)
            self._holds.setdefault(id.rpartition("/")[0], {})[worker] = None
            out.setdefault(worker, []).append(self._ledger.assign(id, worker, version))

    def take_back(
        self, loads: Sequence[WorkerLoad], longest: Mapping[str, float] | None = None
    ) -> list[tuple[str, LedgerEntry]]:
        """(worker, what it should give back), when nothing is queued. `longest`: as in `give`."""
        if not self._balancing:
            return []
        if self._balancing == "algorithm2":
            moves = rlboost.balance(loads, self._held)
        else:
            moves = rebalance(loads, self._held, typical=self.typical)
        rooms, entries = longest or {}, self._ledger.entries
        moves = [move for move in moves if room(entries[move.id].episode) <= rooms.get(move.target, math.inf)]
        self._meant |= {move.id: move.target for move in moves}
        return [(move.source, entries[move.id]) for move in moves]

    def _held(self, worker: str) -> list[Running]:
        return [
            Running(
                id=e.episode.id, context=len(e.episode.prompt) + len(e.episode.tokens), moves=e.moves,
                waiting=len(e.episode.tokens) == e.recorded,  # nothing has come of it there, as far as can be seen
            )
            for e in self._ledger.held(worker)
        ]  # fmt: skip

    def finished(self, tokens: int) -> None:
        """A response came to this length."""
        self._ended += 1
        self._ended_tokens += tokens

    def done_with(self, groups: Iterable[str]) -> None:
        """Nobody needs the pages of these any more, nor moves their responses."""
        over = set(groups)
        for group in over:
            self._holds.pop(group, None)
        # One that was asked back may have ended where it was.
        self._meant = {id: worker for id, worker in self._meant.items() if id.rpartition("/")[0] not in over}


def _with(load: WorkerLoad, more: int) -> WorkerLoad:
    return msgspec.structs.replace(load, running=load.running + more) if more else load
