"""Acts on `offload`: lets the trainer's own engine roll out at the start of a step, then pauses it so that it trains.

    begin() ──▶ local generates ──(seed_s, and somebody else is there)──▶ paused: `over` is set, training may begin
                     ▲             (and something to train on, if the plan holds)    │
                     └───────── nobody else is there, and work is open ◀─────────────┘

Without a worker called `local` training may begin at once. Rule: whenever responses are open, either somebody else can
take them or local is not paused; so a run never waits for a fleet that is not there.
"""

from __future__ import annotations

import asyncio
import math

from windfall.events.log import EventLog
from windfall.rollout.dispatch import Dispatch
from windfall.scheduling.fleet_speed import FleetSpeed
from windfall.scheduling.members import Member, WorkerState
from windfall.scheduling.seed_time import Measured, Offload, Others, SeedPlan
from windfall.scheduling.step_model import Mark
from windfall.types import LOCAL

AGAIN_S = 0.05
NEWS = 0.1
"""If the measured speed of the fleet has changed by more than this share since the plan was made, plan again."""
REVIEW_S = 0.5
"""Seconds between two looks at what has been measured since the plan was made."""


class Seeding:
    def __init__(self, dispatch: Dispatch, policy: Offload, events: EventLog, responses: int) -> None:
        """`responses`: of one step."""
        self.over = asyncio.Event()
        self._dispatch, self._policy, self._events, self._responses = dispatch, policy, events, responses
        self._timer: asyncio.TimerHandle | None = None
        self._plan: SeedPlan | None = None
        self._trainable = self._due = self._missing = False
        self._began_s = self._seeded_s = 0.0
        self._step = 0
        self._since_s: float | None = None
        """Since when local generates; None while it does not."""
        self._made: dict[str, int] = {}
        self._area = 0.0
        """Workers times seconds, for their mean."""
        self._looked_s = self._review_s = 0.0
        self.last: Measured | None = None
        self._found: Others | None = None
        self._marks: list[Mark] = []
        self._makers: list[tuple[float, tuple[str, ...]]] = []
        """Who makes tokens, each from a time of the step on."""
        self._accepted = self._whole = 0
        """Tokens that had been accepted when the step began; those of groups that are whole."""

    # of a step

    def begin(self, step: int) -> None:
        """A step begins: plan it, let local generate."""
        now = self._now()
        found = self._found = self._find()
        self._step = step
        plan = self._policy.plan(self.last, found)
        self._began_s = self._looked_s = now
        self._since_s = None  # it may have generated before: for an evaluation, or a step that was given up
        self._seeded_s = self._area = 0.0
        self._accepted, self._whole = self._dispatch.ledger.counts.accepted, 0
        self._marks, self._makers = [], []
        self._made = {m.id: m.made for m in self._dispatch.members.all.values()}
        self._go(plan)
        self._tell(plan, found)

    def _tell(self, plan: SeedPlan, found: Others) -> None:
        self._events.instant(
            "plan", step=self._step, seed_s=plan.seed_s, most_workers=plan.most_workers, others=found.workers,
            why=plan.why,
        )  # fmt: skip

    def _find(self) -> Others:
        others, giving, local = self._others(), self._dispatch.giving, self._local()
        return Others(
            workers=len(others), responses=self._responses,
            pull_s=0.0 if any(m.name != LOCAL for m in self._working()) else self._dispatch.members.pull_s,
            tok_per_s=sum(giving.rate(member, self._responses, len(others) + 1) for member in others),
            crowd=giving.crowd(others), local=giving.crowd([local]) if local is not None else None,
        )  # fmt: skip

    def _replan(self, now: float) -> None:
        """While local generates, who is there has changed, or is better known: until when should it?"""
        if self._found is None or self._since_s is None or self._due or self._missing or self.over.is_set():
            return
        before, changed = self._plan, len(self._others()) != self._found.workers
        measures = before is not None and math.isinf(before.seed_s) and self._found.workers > 0
        if not changed and now < self._review_s:
            return
        found, self._review_s = self._find(), now + REVIEW_S
        known = abs(found.tok_per_s - self._found.tok_per_s) <= NEWS * self._found.tok_per_s
        if not changed and not measures and known:
            return
        self._found = found
        plan = self._policy.again(found, self._stands(now))
        if plan is not None and before is not None:
            self._cancel()
            self._plan = plan
            if math.isfinite(plan.seed_s):
                left_s = max(0.0, self._began_s + plan.seed_s - now)
                self._timer = asyncio.get_running_loop().call_later(left_s, self._enough)
            if changed or plan.seed_s != before.seed_s:
                self._tell(plan, found)

    def everybody(self) -> None:
        """For work that nothing is trained on meanwhile, such as an evaluation."""
        self._found = None
        self._go(SeedPlan(seed_s=math.inf, most_workers=math.inf, why=""))

    def _go(self, plan: SeedPlan) -> None:
        self._plan, self._trainable = plan, False
        self._apply(plan)

    def _apply(self, plan: SeedPlan) -> None:
        self._cancel()
        self.over.clear()
        self._due = False
        local = self._local()
        self._missing = local is None
        if local is None:
            self.over.set()
        elif plan.seed_s > 0 or plan.hold:
            self._resume(local)
        if math.isfinite(plan.seed_s):
            self._timer = asyncio.get_running_loop().call_later(plan.seed_s, self._enough)

    def arrived(self, tokens: int) -> None:
        """A group of so many tokens is whole."""
        self._whole += tokens
        self._marks.append(self._stands(self._now()))

    def _stands(self, now: float) -> Mark:
        ledger = self._dispatch.ledger
        made, makers = ledger.counts.accepted - self._accepted, self._makers[-1][1] if self._makers else ()
        behind = sum(ledger.context(id) for id in makers)
        return Mark(now - self._began_s, max(made, self._whole), self._whole, len(ledger), behind)

    def _there(self) -> tuple[tuple[float, FleetSpeed], ...]:
        """Who made tokens, by what is known of them now."""
        members, out = self._dispatch.members.all, list[tuple[float, FleetSpeed]]()
        for at_s, ids in self._makers:
            crowd = self._dispatch.giving.crowd(members[id] for id in ids if id in members)
            if ids and crowd is None:
                return ()
            out.append((at_s, crowd or FleetSpeed()))
        return tuple(out)

    def trainable(self) -> None:
        """There is something to train on."""
        self._trainable = True
        if self._due:
            self._enough()

    def end(self, *, tokens: int, train_s: float, train_wait_s: float) -> None:
        """The step is over: what it was like."""
        now = self._now()
        self._look(now)
        self._stop_clock(now)
        members = self._dispatch.members.all.values()
        made = {m.id: m.made - self._made.get(m.id, 0) for m in members}
        local = {m.id for m in members if m.name == LOCAL}
        ends = [m.framed_s for m in members if m.id not in local and m.framed_s > self._began_s]
        self.last = Measured(
            tokens=tokens, seed_s=self._seeded_s, local_tokens=sum(made[i] for i in local), train_s=train_s,
            train_wait_s=train_wait_s, remote_wait_s=now - max(ends) if ends else 0.0,
            remote_s=max(ends) - self._began_s if ends else 0.0,
            workers=self._area / max(1e-9, now - self._began_s), course=tuple(self._marks), there=self._there(),
            responses=self._responses,
        )  # fmt: skip

    def generated(self) -> None:
        """Every response of the step is made: from here on local only trains."""
        self._cancel()
        now = self._now()
        self._stop_clock(now)
        self.over.set()
        local = self._local()
        if local is not None and local.state is WorkerState.READY:
            self._dispatch.accounts.paused(now, local.id)  # what it does from here on is training

    # local

    def tick(self) -> None:
        """Every now and then: has the fleet collapsed, is there no local any more, or is there one now?"""
        now = self._now()
        self._look(now)
        self._replan(now)
        local = self._local()
        if local is None:
            self._missing = True
            self.over.set()
        elif self._missing and self._plan is not None and len(self._dispatch.ledger):
            self._apply(self._plan)
        elif local.state is WorkerState.PAUSED and self._dispatch.ledger.queue and (why := self._alone()):
            self._events.instant("local_resumed", why=why)
            self.over.clear()  # from here on the step is one of local alone, whoever else may come
            self._resume(local)

    def _enough(self) -> None:
        """T_seed is over. If nobody else is there, local goes on until somebody is; if the plan says so, until there is
        something to train on."""
        local = self._local()
        if local is not None and self._plan is not None and self._plan.hold and not self._trainable:
            self._due = True
            return
        if local is not None and local.state in (WorkerState.READY, WorkerState.PAUSED) and self._others():
            if local.state is WorkerState.READY:
                self._pause(local)
        elif local is not None and (len(self._dispatch.ledger) or local.state is WorkerState.PULLING):
            self._timer = asyncio.get_running_loop().call_later(AGAIN_S, self._enough)
            return
        self.over.set()

    def _resume(self, local: Member) -> None:
        self._dispatch.accounts.resumed(self._now(), local.id)
        if local.state is WorkerState.PAUSED:
            self._dispatch.resume(local.id)
        if self._since_s is None:
            self._since_s = self._now()

    def _pause(self, local: Member) -> None:
        self._stop_clock(self._now())
        self._dispatch.pause(local.id)

    def _stop_clock(self, now: float) -> None:
        if self._since_s is not None:
            self._seeded_s += now - self._since_s
            self._since_s = None

    def _cancel(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _local(self) -> Member | None:
        return next((m for m in self._dispatch.members.here() if m.name == LOCAL), None)

    def _others(self) -> list[Member]:
        """Workers that can do something for this step, now or any moment."""
        members = self._dispatch.members
        ready = [m for m in members.here() if m.state is WorkerState.READY and not m.suspect]
        return [m for m in (*ready, *members.coming(self._now())) if m.name != LOCAL]

    def _working(self) -> list[Member]:
        """Those that make tokens of this step, or could."""
        offer = self._dispatch.offer
        return self._dispatch.members.routable(offer.version, offer.digest) if offer is not None else []

    def _alone(self) -> str:
        """Why nobody but local can make what is queued, if so."""
        others = self._others()
        if not others:
            return "no other worker is there"
        small = self._dispatch.room.too_long(max(m.longest for m in others))
        return "no other worker has room for a response that is queued" if small else ""

    def _look(self, now: float) -> None:
        self._area += len(self._others()) * (now - self._looked_s)
        self._looked_s = now
        makers = tuple(m.id for m in self._working())
        if len(self._dispatch.ledger) and (not self._makers or makers != self._makers[-1][1]):
            self._marks.append(self._stands(now))
            self._makers.append((now - self._began_s, makers))

    def _now(self) -> float:
        return asyncio.get_running_loop().time()
