"""Where every second of every worker went, and what it cost. Pure: told what happened and when, reads no clock.

    booting         from its process's start, if known, else from joining, until it is READY for the first time (its
                    first pull, of all the weights while the engine is being built, is part of that)
    pulling         later pulls
    generating      READY with work
    prefill_again   READY with work, computing again what another had computed: an estimate, tokens moved in / prefill
                    speed, taken off the time that follows the move while it has work
    waiting         READY without work. Of the trainer's machine also: nothing to train on
    paused          told to make no tokens. Of the trainer's machine: training
    draining        told to go, until it is gone
    lost            paid for, and nothing came of it: of a worker that is gone, the time with work after its last frame,
                    and all the time after it was last heard; of one that comes back, the time it was away

Rules:
- every second from a worker's start until it is gone is in exactly one of these, of exactly one step;
- a worker that dials again before its last link is given up is billed once: from then on by the new one;
- what a closed step said is not taken back: `lost` reaches back no further than to the last `step()`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

from windfall.cost.bill import Account, Bucket, Holder, Totals, add, priced
from windfall.types import Terms

SAME_S = 1.0
"""Processes of one name that began so close to each other are one: it has told its age twice."""
NAMES = 1000
"""Of workers that are gone, so many are remembered."""
PREFILL_OVER_DECODE = 10.0
"""Where nobody has measured a worker's prefill speed: so many times the speed at which it makes tokens."""


@dataclass(kw_only=True, slots=True)
class _Worker:
    name: str
    holder: Holder
    usd_per_h: float | None
    start_s: float
    since_s: float
    """Up to here its time is in `tail` or `settled`."""
    succeeded: bool = False
    """The same process is here under another id, and its time is that one's."""
    phase: Literal["booting", "pulling", "ready", "paused", "draining"] = "booting"
    was_ready: bool = False
    busy: bool = False
    owed_s: float = 0.0
    """Of prefill again, still to be taken off the time with work."""
    tokens: int = 0
    tail: list[tuple[Bucket, float, float]] = field(default_factory=list)
    """From, to: what may yet turn out to be lost."""
    settled: dict[Bucket, float] = field(default_factory=dict)

    def stretches(self, now_s: float) -> list[tuple[Bucket, float, float]]:
        """The time since `since_s`, by what it does now."""
        since_s = self.since_s
        if self.succeeded:
            return []
        if self.phase != "ready":
            return [(self.phase, since_s, now_s)]
        if not self.busy:
            return [("waiting", since_s, now_s)]
        until_s = min(now_s, since_s + self.owed_s)
        return [("prefill_again", since_s, until_s), ("generating", until_s, now_s)]

    def advance(self, now_s: float) -> None:
        assert now_s >= self.since_s, f"{now_s} s comes before {self.since_s} s"
        for bucket, start_s, end_s in self.stretches(now_s):
            if bucket == "prefill_again":
                self.owed_s = max(0.0, self.owed_s - (end_s - start_s))
            if end_s > start_s:
                self.tail.append((bucket, start_s, end_s))
        self.since_s = now_s

    def settle(self) -> None:
        for bucket, start_s, end_s in self.tail:
            self._put(bucket, end_s - start_s)
        self.tail.clear()

    def lose(self, heard_s: float) -> None:
        """Settle, with what is lost as lost."""
        for bucket, start_s, end_s in self.tail:
            made_nothing = bucket in ("generating", "prefill_again")
            kept_s = start_s if made_nothing else min(max(heard_s, start_s), end_s)
            self._put(bucket, kept_s - start_s)
            self._put("lost", end_s - kept_s)
        self.tail.clear()

    def _put(self, bucket: Bucket, s: float) -> None:
        if s > 0:
            self.settled[bucket] = self.settled.get(bucket, 0.0) + s

    def account(self, now_s: float) -> Account:
        seconds = dict(self.settled)
        for bucket, start_s, end_s in (*self.tail, *self.stretches(max(now_s, self.since_s))):
            if end_s > start_s:
                seconds[bucket] = seconds.get(bucket, 0.0) + end_s - start_s
        return priced(seconds, self.usd_per_h, self.tokens)


class Accounts:
    def __init__(self, billed_s: float = -math.inf) -> None:
        """`billed_s`: up to here every second has been accounted for already, by a controller that was killed."""
        self._billed_s = billed_s
        self._gone = self._closed = Totals()
        self._here: dict[str, _Worker] = {}
        self._named: dict[str, str] = {}
        """The newest worker of every name that is here."""
        self._ended: dict[str, float] = {}
        """Until when the last ones of these names have been accounted for."""

    def join(
        self, now_s: float, worker: str, *, kind: Terms, usd_per_h: float | None, trainer: bool = False,
        started_s: float | None = None, name: str = "",
    ) -> None:  # fmt: skip
        """`usd_per_h`: None, if not known. `started_s`: when its process began, by the same clock. `name`: of a worker
        that may have been here before under another id; the time since then was paid for, and nothing came of it."""
        assert worker not in self._here, f"{worker} is here already"
        name, start_s = name or worker, now_s if started_s is None else min(started_s, now_s)
        billed_s = max(self._billed_s, self._ended.get(name, -math.inf))
        holder: Holder = "trainer" if trainer else kind
        before = self._here.get(self._named.get(name, ""))
        w = self._here[worker] = _Worker(
            name=name, holder=holder, usd_per_h=usd_per_h, start_s=start_s, since_s=start_s
        )
        self._named[name] = worker
        if before is not None and abs(before.start_s - start_s) < SAME_S:
            before.advance(now_s)
            before.succeeded, w.since_s = True, now_s
        elif start_s < billed_s:
            w.since_s = now_s
            w.settled["lost"] = max(0.0, now_s - billed_s)
        self._at(now_s, worker).settle()

    def pulling(self, now_s: float, worker: str) -> None:
        self._turn(now_s, worker, "pulling")

    def ready(self, now_s: float, worker: str) -> None:
        """It holds the version."""
        w = self._at(now_s, worker)
        w.settle()
        w.was_ready = True
        self._turn(now_s, worker, "ready")

    def busy(self, now_s: float, worker: str) -> None:
        """It has work from now on."""
        self._at(now_s, worker).busy = True

    def idle(self, now_s: float, worker: str) -> None:
        """It has none any more: what it made has come, or was called off."""
        w = self._at(now_s, worker)
        w.settle()
        w.busy, w.owed_s = False, 0.0

    def frame(self, now_s: float, worker: str, tokens: int) -> None:
        """Tokens of it that the ledger took."""
        w = self._at(now_s, worker)
        w.settle()
        w.tokens += tokens

    def moved_in(self, now_s: float, worker: str, tokens: int, prefill_tok_per_s: float | None = None) -> None:
        """It has been given responses that were begun elsewhere: prompts and tokens to prefill again."""
        w = self._at(now_s, worker)
        speed = prefill_tok_per_s or PREFILL_OVER_DECODE * (w.account(now_s).tok_per_s or 0.0)
        w.owed_s += tokens / speed if speed > 0 else 0.0

    def paused(self, now_s: float, worker: str) -> None:
        self._turn(now_s, worker, "paused")

    def trainer_waited(self, now_s: float, s: float) -> None:
        """Of the time since the last `step()` in which the trainer's engine was paused, `s` seconds were no training:
        there was nothing to train on."""
        closed, gone = (
            t.holders.get("trainer", Account()).seconds.get("paused", 0.0) for t in (self._closed, self._gone)
        )
        for worker, w in self._here.items():
            if w.holder == "trainer":
                self._at(now_s, worker).settle()
                paused_s = w.settled.get("paused", 0.0)
                moved_s = min(s, paused_s, max(0.0, gone + paused_s - closed))
                w.settled["paused"] = paused_s - moved_s
                w.settled["waiting"] = w.settled.get("waiting", 0.0) + moved_s
                return

    def resumed(self, now_s: float, worker: str) -> None:
        if self._here[worker].phase == "paused":
            self._turn(now_s, worker, "ready")

    def draining(self, now_s: float, worker: str) -> None:
        self._turn(now_s, worker, "draining")

    def gone(self, now_s: float, worker: str, *, heard_s: float) -> Account:
        """It is given up, or has left. `heard_s`: when it last said anything. Returns its whole account."""
        w = self._at(now_s, worker)
        w.lose(heard_s)
        del self._here[worker]
        if self._named.get(w.name) == worker:
            del self._named[w.name]
        if not w.succeeded:
            self._ended[w.name] = now_s
        if len(self._ended) > NAMES:
            del self._ended[next(iter(self._ended))]
        account = w.account(now_s)
        self._gone += Totals(holders={w.holder: account})
        return account

    def step(self, now_s: float) -> Totals:
        """Closes a step: what there was since the step before."""
        for worker in self._here:
            self._at(now_s, worker).settle()
        before, self._closed = self._closed, self.totals(now_s)
        return self._closed - before

    def totals(self, now_s: float) -> Totals:
        """Of the run so far."""
        by_holder: dict[Holder, list[Account]] = {h: [a] for h, a in self._gone.holders.items()}
        for w in self._here.values():
            by_holder.setdefault(w.holder, []).append(w.account(now_s))
        return Totals(holders={h: add(*accounts) for h, accounts in by_holder.items()})

    def of(self, worker: str, now_s: float) -> Account:
        """Of one worker that is here, so far."""
        return self._here[worker].account(now_s)

    def _at(self, now_s: float, worker: str) -> _Worker:
        w = self._here[worker]
        w.advance(now_s)
        return w

    def _turn(self, now_s: float, worker: str, phase: Literal["pulling", "ready", "paused", "draining"]) -> None:
        """Who drains drains until it is gone; who was never ready is booting still, unless it is paused."""
        w = self._at(now_s, worker)
        if w.phase != "draining":
            w.phase = "booting" if not w.was_ready and phase in ("pulling", "ready") else phase
