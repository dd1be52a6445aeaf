"""Accounts for every second of every worker, and its cost. Pure: the caller reports events with their time.

Every second of a worker goes into one bucket:

    booting         from the start of its process, if known, otherwise from joining, until it is first READY (this
                    includes the first pull, of all the weights, while the engine is built)
    pulling         later pulls
    generating      READY with work
    prefill_again   READY with work, prefilling what another worker had prefilled. An estimate: tokens moved in /
                    prefill speed, subtracted from the time with work that follows the move
    waiting         READY without work; for the trainer's machine also: nothing to train on
    paused          asked to generate nothing; for the trainer's machine: training
    draining        asked to leave, until it is gone
    lost            paid for without a result. For a worker that is gone: the time with work after its last frame, and
                    all time after its last message. For a worker that comes back: the time it was away

Whether time is lost is known only later. So intervals are provisional until an event shows that their work arrived:

    event ──▶ advance(): the time since the last event becomes a provisional interval, by the worker's phase
          ──▶ settle():  on a frame, idle, ready, join or the end of a step: provisional intervals are final; if the
                         worker is gone, provisional time without a result is moved to `lost`

Example: a worker is ready from 0 s, has work from 5 s, sends its last frame at 10 s and is given up at 18 s:

    >>> accounts = Accounts()
    >>> accounts.join(0, "w", kind="spot", usd_per_h=3.6)
    >>> accounts.ready(0, "w")
    >>> accounts.busy(5, "w")
    >>> accounts.frame(10, "w", tokens=100)
    >>> accounts.gone(18, "w", heard_s=12).seconds
    {'waiting': 5.0, 'generating': 5.0, 'lost': 8.0}

Rules:
- Every second from the start of a worker until it is gone is in exactly one bucket of exactly one step.
- A worker that reconnects before its old link is given up is not billed twice: from then on its new id is billed.
- A closed step is not changed: `lost` reaches back to the last `step()` at most.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import msgspec

from windfall.controller.cost.activity import Activity
from windfall.controller.cost.bill import Account, Bucket, Gathering, Holder, Totals, add, priced
from windfall.types import LeaseKind, is_local

SAME_START_S = 1.0
"""Workers of the same name whose start times differ by less than this are one process that reported its age twice."""
MAX_NAMES = 1000
"""Number of gone workers that are remembered."""
PREFILL_OVER_DECODE = 10.0
"""If a worker's prefill speed was not measured, it is assumed to be this many times its decode speed."""


class _Interval(NamedTuple):
    bucket: Bucket
    start_s: float
    end_s: float


@dataclass(kw_only=True, slots=True)
class _OpenAccount:
    name: str
    holder: Holder
    usd_per_h: float | None
    start_s: float
    """When its process started (loop time, seconds)."""
    counted_s: float
    """The time until which all seconds are in `provisional` or `settled` (loop time, seconds)."""
    replaced: bool = False
    """The same process has joined again under a newer id, which is billed from then on."""
    phase: Literal["booting", "pulling", "ready", "paused", "draining"] = "booting"
    was_ready: bool = False
    busy: bool = False
    """It has work."""
    prefill_left_s: float = 0.0
    """Seconds of repeated prefill that are still to be counted in the time with work."""
    tokens: int = 0
    tokens_of: Counter[str] = field(default_factory=Counter)
    base: str = ""
    """The base that a trainer trains, if it has a name."""
    provisional: list[_Interval] = field(default_factory=list)
    """Time that may still turn out to be lost."""
    settled: dict[Bucket, float] = field(default_factory=dict)
    """Final seconds by bucket."""
    activity: Activity
    """Is told every final interval."""

    def uncounted(self, now_s: float) -> list[_Interval]:
        """The time from `counted_s` to `now_s`, by the current phase."""
        if self.replaced or now_s <= self.counted_s:
            return []
        bucket: Bucket = self.phase if self.phase != "ready" else "generating" if self.busy else "waiting"
        if bucket != "generating" or not self.prefill_left_s:
            return [_Interval(bucket, self.counted_s, now_s)]
        prefilled_s = min(now_s, self.counted_s + self.prefill_left_s)
        return [_Interval("prefill_again", self.counted_s, prefilled_s), _Interval(bucket, prefilled_s, now_s)]

    def advance(self, now_s: float) -> None:
        """Counts the time until `now_s` provisionally."""
        assert now_s >= self.counted_s, f"{now_s} s comes before {self.counted_s} s"
        for interval in self.uncounted(now_s):
            if interval.bucket == "prefill_again":
                self.prefill_left_s = max(0.0, self.prefill_left_s - (interval.end_s - interval.start_s))
            self.provisional.append(interval)
        self.counted_s = now_s

    def settle(self, heard_s: float | None = None) -> None:
        """Makes all counted time final. `heard_s`: the worker is gone, and this is when its last message arrived: time
        with work, and time after that message, is lost."""
        for bucket, start_s, end_s in self.provisional:
            lost_from_s = end_s
            if heard_s is not None:
                no_result = bucket in ("generating", "prefill_again")
                lost_from_s = start_s if no_result else min(max(heard_s, start_s), end_s)
            self._add(bucket, start_s, lost_from_s)
            if lost_from_s < end_s:
                self._add("lost", lost_from_s, end_s)
        self.provisional.clear()

    def _add(self, bucket: Bucket, start_s: float, end_s: float) -> None:
        if end_s > start_s:
            self.settled[bucket] = self.settled.get(bucket, 0.0) + end_s - start_s
            self.activity.record(self.name, bucket, start_s, end_s)

    def account(self, now_s: float) -> Account:
        """The account until `now_s`, with provisional and uncounted time as if it were final."""
        seconds = dict(self.settled)
        for bucket, start_s, end_s in (*self.provisional, *self.uncounted(now_s)):
            if end_s > start_s:
                seconds[bucket] = seconds.get(bucket, 0.0) + end_s - start_s
        return priced(seconds, self.usd_per_h, self.tokens, self.tokens_of)


class Accounts:
    """The first argument of every method is the current time in seconds."""

    def __init__(self, billed_s: float = -math.inf) -> None:
        """`billed_s`: the time until which a previous controller, since killed, has billed every second."""
        self.activity = Activity()
        self._billed_s = billed_s
        self._gone = self._closed = Totals()
        """Totals of workers that are gone; totals at the last `step()`."""
        self.gathering = Gathering()
        """Over all steps so far."""
        self.traffic_usd = 0.0
        """What moving the weights has cost so far, between regions and out of a bucket."""
        self._here: dict[str, _OpenAccount] = {}
        self._newest: dict[str, str] = {}
        """Id of the newest worker that is here, by name."""
        self._ended: dict[str, float] = {}
        """By name: the time at which the last worker of that name was gone and its bill ended."""

    def join(
        self,
        now_s: float,
        worker: str,
        *,
        kind: LeaseKind,
        usd_per_h: float | None,
        trainer: bool = False,
        started_s: float | None = None,
        name: str = "",
        base: str = "",
    ) -> None:
        """A worker has joined. `usd_per_h`: None if not known. `started_s`: when its process started, by the same
        clock. `name`: its name; a worker of this name may have been here before under another id. `base`: of a
        trainer, if that has a name."""
        assert worker not in self._here, f"{worker} is here already"
        name, start_s = name or worker, now_s if started_s is None else min(started_s, now_s)
        billed_s = max(self._billed_s, self._ended.get(name, -math.inf))
        holder: Holder = "trainer" if trainer else kind
        before = self._here.get(self._newest.get(name, ""))
        w = self._here[worker] = _OpenAccount(
            name=name,
            holder=holder,
            usd_per_h=usd_per_h,
            start_s=start_s,
            counted_s=start_s,
            base=base,
            activity=Activity() if trainer and not is_local(name) else self.activity,
        )
        self._newest[name] = worker
        if before is not None and abs(before.start_s - start_s) < SAME_START_S:  # reconnected before its old link ended
            before.advance(now_s)
            before.replaced, w.counted_s = True, now_s
        elif start_s < billed_s:  # came back: the time away was paid for without a result
            w.counted_s = now_s
            w.settled["lost"] = max(0.0, now_s - billed_s)
        self._advance(now_s, worker).settle()

    def pulling(self, now_s: float, worker: str) -> None:
        self._enter(now_s, worker, "pulling")

    def ready(self, now_s: float, worker: str) -> None:
        """The worker holds the current version."""
        w = self._advance(now_s, worker)
        w.settle()
        w.was_ready = True
        self._enter(now_s, worker, "ready")

    def busy(self, now_s: float, worker: str) -> None:
        """The worker has work from now on."""
        self._advance(now_s, worker).busy = True

    def idle(self, now_s: float, worker: str) -> None:
        """The worker has no work left: its results have arrived, or its work was canceled."""
        w = self._advance(now_s, worker)
        w.settle()
        w.busy, w.prefill_left_s = False, 0.0

    def frame(self, now_s: float, worker: str, tokens: int, tokens_of: Mapping[str, int] | None = None) -> None:
        """The ledger has accepted tokens of the worker. `tokens_of`: by policy, for policies with a name."""
        w = self._advance(now_s, worker)
        w.settle()
        w.tokens += tokens
        w.tokens_of.update(tokens_of or {})

    def moved_in(
        self,
        now_s: float,
        worker: str,
        tokens: int,
        prefill_tok_per_s: float = 0.0,
        *,
        sources: Sequence[str] = (),
    ) -> None:
        """The worker was assigned responses begun elsewhere, with this number of tokens to prefill again.
        `prefill_tok_per_s` is 0 if it was not measured; `sources` is the last worker of each response."""
        for source in sources:
            if source != worker:
                self.activity.moved(source.partition("#")[0], worker.partition("#")[0], now_s)
        w = self._advance(now_s, worker)
        speed = prefill_tok_per_s or PREFILL_OVER_DECODE * (w.account(now_s).tok_per_s or 0.0)
        w.prefill_left_s += tokens / speed if speed > 0 else 0.0

    def paused(self, now_s: float, worker: str) -> None:
        self._enter(now_s, worker, "paused")

    def trainer_waited(self, now_s: float, s: float, base: str = "") -> None:
        """The trainer had nothing to train on for `s` seconds since the last `step()`: it was waiting, not paused.
        `base`: that of the trainer, if it has a name."""
        self._correct_trainer(now_s, s, "paused", "waiting", base)

    def trainer_trained(self, now_s: float, s: float, base: str = "") -> float:
        """The trainer trained for `s` seconds since the last `step()` while its engine had work: the engine stood still
        meanwhile. Returns how many of these seconds had been counted as generating."""
        return self._correct_trainer(now_s, s, "generating", "paused", base)

    def _correct_trainer(self, now_s: float, s: float, counted: Bucket, correct: Bucket, base: str) -> float:
        """Move at most `s` seconds of each engine of the trainer since the last `step()` to another bucket."""
        both = [(t.trainers.get(base) if base else t.holders.get("trainer")) for t in (self._closed, self._gone)]
        closed_s, gone_s = ((account or Account()).seconds.get(counted, 0.0) for account in both)
        here = [worker for worker, w in self._here.items() if w.holder == "trainer" and base in ("", w.base)]
        engines = [self._advance(now_s, worker) for worker in here]
        for w in engines:
            w.settle()
        left_s = total_s = max(0.0, gone_s + sum(w.settled.get(counted, 0.0) for w in engines) - closed_s)
        for w in engines:
            counted_s = w.settled.get(counted, 0.0)
            moved_s = min(s, counted_s, left_s)
            left_s -= moved_s
            w.settled[counted] = counted_s - moved_s
            w.settled[correct] = w.settled.get(correct, 0.0) + moved_s
        return total_s - left_s

    def resumed(self, now_s: float, worker: str) -> None:
        if self._here[worker].phase == "paused":
            self._enter(now_s, worker, "ready")

    def draining(self, now_s: float, worker: str) -> None:
        self._enter(now_s, worker, "draining")

    def gone(self, now_s: float, worker: str, *, heard_s: float) -> Account:
        """The worker has left or was given up. `heard_s`: when its last message arrived. Returns its whole account."""
        w = self._advance(now_s, worker)
        w.settle(heard_s)
        del self._here[worker]
        if self._newest.get(w.name) == worker:
            del self._newest[w.name]
        if not w.replaced:
            self._ended[w.name] = now_s
            w.activity.gone(w.name, now_s)
        if len(self._ended) > MAX_NAMES:
            del self._ended[next(iter(self._ended))]
        account = w.account(now_s)
        self._gone += Totals(holders={w.holder: account}, trainers={w.base: account} if w.base else {})
        return account

    def gathered(self, gathering: Gathering) -> None:
        """Adds what gathering the last responses of a step brings, with its value at the present prices."""
        if not gathering.moves:
            return
        usd_per_h = sum(w.usd_per_h or 0.0 for w in self._here.values() if not w.replaced)
        self.gathering += msgspec.structs.replace(gathering, usd=gathering.sooner_s * usd_per_h / 3600)

    def step(self, now_s: float) -> Totals:
        """Closes a step. Returns its totals: everything since the previous `step()`."""
        for worker in self._here:
            self._advance(now_s, worker).settle()
        before, self._closed = self._closed, self.totals(now_s)
        return self._closed - before

    def totals(self, now_s: float) -> Totals:
        """The totals of the run so far."""
        by_holder: dict[Holder, list[Account]] = {h: [a] for h, a in self._gone.holders.items()}
        trainers = {base: [a] for base, a in self._gone.trainers.items()}
        for w in self._here.values():
            by_holder.setdefault(w.holder, []).append(account := w.account(now_s))
            if w.base:
                trainers.setdefault(w.base, []).append(account)
        if self.traffic_usd:
            by_holder["traffic"] = [Account(usd={"traffic": self.traffic_usd})]
        return Totals(
            holders={h: add(*accounts) for h, accounts in by_holder.items()},
            gathering=self.gathering,
            trainers={base: add(*accounts) for base, accounts in trainers.items()},
        )

    def of(self, worker: str, now_s: float) -> Account:
        """The account so far of a worker that is here."""
        return self._here[worker].account(now_s)

    def _advance(self, now_s: float, worker: str) -> _OpenAccount:
        w = self._here[worker]
        w.advance(now_s)
        return w

    def _enter(self, now_s: float, worker: str, phase: Literal["pulling", "ready", "paused", "draining"]) -> None:
        """A draining worker drains until it is gone. One that was never ready boots until it pauses or drains."""
        w = self._advance(now_s, worker)
        if w.phase != "draining":
            w.phase = "booting" if not w.was_ready and phase in ("pulling", "ready") else phase
