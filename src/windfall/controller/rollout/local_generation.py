"""The trainer's own engine ("local") generates at the start of a step, then it is paused so that the GPU can train.
The engines of a trainer with several ranks ("local", "local-1", ...) are paused and resumed together.

scheduling/local_time.py decides how long it generates, the local time; this module acts on the decision.

             local time passed, but nothing is trainable yet (plan.hold)
    begin() ──▶ GENERATING ─────────────────────────────────────────────▶ DUE
                        │ local time passed,                               │
                        │ another worker can continue                      │
                        ▼                     trainable(), another worker  │
                     TRAINING ◀────────────────────────────────────────────┘

    TRAINING  ──▶ the phase before it (GENERATING or DUE) when no other worker can take the queued responses
    any phase ──▶ NO_ENGINE when the trainer's engine is gone ──▶ GENERATING when it is back and responses are open
    any phase ──▶ TRAINING  when every response of the step is generated

`may_train` is set in TRAINING and NO_ENGINE, and only there. If the local time has passed but no other
worker is available, the phase stays as it is, and the check is repeated every RETRY_S.

Rule: while responses are open, either another worker can take them or the trainer's engine is not paused. A run
therefore never waits for workers that do not exist.

In asynchronous training (`IdleGeneration`) the trainer may begin to train at any moment: engine and trainer take turns
on the machine, one engine step or one micro-batch at a time. Responses on the trainer's engine stand still while it
trains, and become old there. So the engine takes part only if the trainer waits enough of the time:

    PAUSED    ── the trainer waited more than START_SHARE of the last step ──▶ GENERATES
              ◀── it waited less than STOP_SHARE of the last period ──────────

Responses that begin together are trained on over a period of `staleness` + 1 steps. One step of a period waits for the
longest of them, the others hardly wait, so one step does not say that the engine can be stopped. At the start of a run
and after the engine has been switched on, a whole period passes before the next decision. The first step of a run does
not count: it always waits for the first responses.

With few workers this adds most of what the machine can generate; with enough workers it costs nothing, while an engine
that always took part would hold responses back (docs/async.md has the figures). Without `techniques.trainer_generates`
the engine generates only if no other worker can.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from dataclasses import dataclass, field, replace
from enum import Enum, auto

from windfall.controller.rollout.dispatch import Dispatch
from windfall.controller.scheduling.local_time import (
    FleetSpeed,
    LocalPlan,
    LocalTimePolicy,
    OnlyWithoutWorkers,
    Progress,
    RemoteFleet,
    StepMeasurement,
)
from windfall.controller.workers.members import Member, WorkerState
from windfall.events.log import EventLog

RETRY_S = 0.05
"""Seconds between two checks for another worker after the local time has passed."""
SPEED_CHANGE = 0.1
"""Plan again if the measured speed of the fleet has changed by more than this share since the last plan."""
REVIEW_S = 0.5
"""Seconds between two comparisons of the plan with new measurements."""
START_SHARE = 0.25
"""Asynchronous: generate in the next step if the trainer waited for more than this share of the last one."""
STOP_SHARE = 0.05
"""Asynchronous: do not generate in the next step if the trainer waited for less than this share of the last period."""
WITHOUT_LIMIT = LocalPlan(local_s=math.inf, why="")


class Phase(Enum):
    """What the trainer's machine does in the current step; the module docstring draws the transitions."""

    IDLE = auto()
    """No step has begun."""
    GENERATING = auto()
    """The trainer's engine generates. The local time may still be planned again."""
    DUE = auto()
    """The local time has passed, but nothing is trainable: the trainer's engine keeps generating."""
    TRAINING = auto()
    """Training may begin. The trainer's engine is paused, or everything is generated."""
    NO_ENGINE = auto()
    """The trainer has no engine, so training may begin."""


@dataclass(kw_only=True, slots=True)
class _Step:
    """The plan of one step, and what the step accumulates."""

    number: int
    began_s: float
    plan: LocalPlan
    fleet: RemoteFleet | None
    """The other workers for which the plan was made; None in an evaluation, which is never planned again."""
    observed_s: float
    """When `worker_seconds` and `generators` were last updated (loop time, seconds)."""
    accepted_before: int = 0
    """Tokens that the ledger had accepted when the step began."""
    generated_before: dict[str, int] = field(default_factory=dict)
    """Tokens that each worker had generated when the step began, by worker id."""
    review_s: float = 0.0
    """The earliest time of the next comparison with new measurements (loop time, seconds)."""
    trainable: bool = False
    generating: Phase = Phase.GENERATING
    """The phase to which TRAINING returns: GENERATING, or DUE if the step has reached it."""
    generating_since_s: float | None = None
    """When the trainer's engine began to generate (loop time, seconds); None while it does not."""
    local_s: float = 0.0
    """Seconds for which the trainer's engine generated before `generating_since_s`."""
    worker_seconds: float = 0.0
    """Number of other workers, summed over time (worker-seconds). Divided by the step time, it is their mean number."""
    trainable_tokens: int = 0
    progress: list[Progress] = field(default_factory=list)
    generators: list[tuple[float, tuple[str, ...]]] = field(default_factory=list)
    """(seconds from the start of the step, ids of the workers that can generate from then on)."""

    def stop_generating(self, now: float) -> None:
        if self.generating_since_s is not None:
            self.local_s += now - self.generating_since_s
            self.generating_since_s = None


class LocalGeneration:
    def __init__(self, dispatch: Dispatch, policy: LocalTimePolicy, events: EventLog, responses: int) -> None:
        """`responses`: the number of responses in a step."""
        self.may_train = asyncio.Event()
        """Set while training may begin."""
        self.last: StepMeasurement | None = None
        """Measurements of the last complete step."""
        self._dispatch = dispatch
        self._policy = policy
        self._events = events
        self._responses = responses
        self._phase, self._step = Phase.IDLE, self._new_step(0, 0.0, WITHOUT_LIMIT, None)
        self._timer: asyncio.TimerHandle | None = None

    # called by the controller

    def begin(self, step: int) -> None:
        """Plans a step and lets the trainer's engine generate."""
        fleet = self._remote_fleet()
        self._step = self._new_step(step, self._now(), self._policy.plan(self.last, fleet), fleet)
        self._start()
        self._log_plan(self._step.plan, fleet)

    def begin_evaluation(self) -> None:
        """Lets the trainer's engine generate without a limit: nothing is trained on during an evaluation."""
        self._step = self._new_step(0, self._now(), WITHOUT_LIMIT, None)
        self._start()

    def arrived(self, tokens: int) -> None:
        """A group with this number of tokens is complete."""
        self._step.trainable_tokens += tokens
        self._step.progress.append(self._progress(self._now()))

    def trainable(self) -> None:
        """Something can be trained on."""
        self._step.trainable = True
        if self._step.generating is Phase.DUE:
            self._local_time_passed()

    def generated(self) -> None:
        """Every response of the step is generated. From now on the trainer's machine only trains."""
        self._set_timer(math.inf)
        now = self._now()
        self._step.stop_generating(now)
        self._enter(Phase.TRAINING)
        for local in self._engines():
            if local.state is WorkerState.READY:
                self._dispatch.accounts.paused(now, local.id)

    def end(self, *, tokens: int, train_s: float, train_wait_s: float) -> None:
        """The step is complete. Its measurements become `last`."""
        now, step = self._now(), self._step
        self._observe(now)
        step.stop_generating(now)
        members = self._dispatch.members.all.values()
        local_tokens = sum(m.generated - step.generated_before.get(m.id, 0) for m in members if m.local)
        ends = [m.last_tokens_s for m in members if not m.local and m.last_tokens_s > step.began_s]
        self.last = StepMeasurement(
            tokens=tokens,
            local_s=step.local_s,
            local_tokens=local_tokens,
            train_s=train_s,
            train_wait_s=train_wait_s,
            remote_wait_s=now - max(ends) if ends else 0.0,
            remote_s=max(ends) - step.began_s if ends else 0.0,
            workers=step.worker_seconds / max(1e-9, now - step.began_s),
            progress=tuple(step.progress),
            speeds=self._speeds(),
            responses=self._responses,
        )

    # transitions

    def _enter(self, phase: Phase) -> None:
        self._phase = phase
        if phase in (Phase.TRAINING, Phase.NO_ENGINE):
            self.may_train.set()
        else:
            self.may_train.clear()

    def _start(self) -> None:
        """GENERATING if the trainer has an engine, else NO_ENGINE."""
        self._set_timer(math.inf)
        step, engines = self._step, self._engines()
        step.generating = Phase.GENERATING
        if not engines:
            self._enter(Phase.NO_ENGINE)
            return
        self._enter(Phase.GENERATING)
        if step.plan.local_s > 0 or step.plan.hold:
            self._resume(engines)
        self._set_timer(step.plan.local_s)

    def _local_time_passed(self) -> None:
        """DUE if the plan waits for something trainable; TRAINING if another worker can continue; else check again."""
        engines, step = self._engines(), self._step
        if not engines or self._phase is Phase.NO_ENGINE:
            self._enter(Phase.NO_ENGINE)
        elif step.plan.hold and not step.trainable:
            step.generating = Phase.DUE
            self._enter(Phase.DUE)
        elif all(e.state in (WorkerState.READY, WorkerState.PAUSED) for e in engines) and self._others():
            self._pause(engines)
            self._enter(Phase.TRAINING)
        elif len(self._dispatch.ledger) or any(e.state is WorkerState.PULLING for e in engines):
            self._set_timer(RETRY_S)
        else:
            self._enter(Phase.TRAINING)

    def tick(self) -> None:
        """Called periodically: updates measurements and the plan, and notices engines and workers that come and go."""
        now = self._now()
        self._observe(now)
        self._replan(now)
        engines = self._engines()
        if not engines:
            self._enter(Phase.NO_ENGINE)
        elif self._phase is Phase.NO_ENGINE:
            if len(self._dispatch.ledger):
                self._start()
        elif _paused(engines) and self._dispatch.ledger.queued and (why := self._why_alone()):
            self._events.instant("local_resumed", why=why)
            self._enter(self._step.generating)
            self._resume(engines)

    def _replan(self, now: float) -> None:
        """While GENERATING: plan the local time again if the fleet has changed, or its measured speed by more than
        SPEED_CHANGE."""
        step, before, fleet = self._step, self._step.plan, self._step.fleet
        if self._phase is not Phase.GENERATING or fleet is None or step.generating_since_s is None:
            return
        changed = len(self._others()) != fleet.workers
        if not changed and now < step.review_s:
            return
        measuring = math.isinf(before.local_s) and fleet.workers > 0
        new, step.review_s = self._remote_fleet(), now + REVIEW_S
        same_speed = abs(new.tok_per_s - fleet.tok_per_s) <= SPEED_CHANGE * fleet.tok_per_s
        if not changed and not measuring and same_speed:
            return
        step.fleet = new
        plan = self._policy.replan(new, self._progress(now))
        if plan is not None:
            step.plan = plan
            self._set_timer(max(0.0, step.began_s + plan.local_s - now))
            if changed or plan.local_s != before.local_s:
                self._log_plan(plan, new)

    def _pause(self, engines: list[Member]) -> None:
        for local in engines:
            if local.state is WorkerState.READY:
                self._step.stop_generating(self._now())
                self._dispatch.pause(local.id)

    def _resume(self, engines: list[Member]) -> None:
        now = self._now()
        for local in engines:
            self._dispatch.accounts.resumed(now, local.id)
            if local.state is WorkerState.PAUSED:
                self._dispatch.resume(local.id)
        if self._step.generating_since_s is None:
            self._step.generating_since_s = now

    def _set_timer(self, seconds: float) -> None:
        """Calls `_local_time_passed` after `seconds`; never, if infinite. Replaces an earlier timer."""
        if self._timer is not None:
            self._timer.cancel()
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(seconds, self._local_time_passed) if math.isfinite(seconds) else None

    # what is known about the workers

    def _new_step(self, number: int, now: float, plan: LocalPlan, fleet: RemoteFleet | None) -> _Step:
        step = _Step(number=number, began_s=now, observed_s=now, plan=plan, fleet=fleet)
        step.accepted_before = self._dispatch.ledger.counts.accepted
        step.generated_before = {m.id: m.generated for m in self._dispatch.members.all.values()}
        return step

    def _log_plan(self, plan: LocalPlan, fleet: RemoteFleet) -> None:
        step = self._step.number
        self._events.instant("plan", step=step, seed_s=plan.local_s, others=fleet.workers, why=plan.why)

    def _engines(self) -> list[Member]:
        """The trainer's engines."""
        return [m for m in self._dispatch.members.here() if m.local]

    def _others(self) -> list[Member]:
        """The other workers that can take part in this step, now or as soon as their pull ends."""
        members = self._dispatch.members
        ready = [m for m in members.here() if m.state is WorkerState.READY and not m.suspect]
        others = [m for m in (*ready, *members.nearly_ready(self._now())) if not m.local]
        return self._dispatch.borrowing.usable(others, self._now())

    def _generators(self) -> list[Member]:
        """Workers that hold a version of the window: they generate, or could."""
        return [m for m in self._dispatch.members.routable(self._dispatch.lead) if m.in_use]

    def _why_alone(self) -> str:
        """Why only the trainer's engine can generate what is queued; empty if another worker can."""
        others = self._others()
        if not others:
            return "no other worker is available"
        too_long = self._dispatch.placement.too_long(max(m.longest for m in others))
        return "no other worker has room for a queued response" if too_long else ""

    def _remote_fleet(self) -> RemoteFleet:
        others, placement, engines = self._others(), self._dispatch.placement, self._engines()
        sharing = len(others) + max(1, len(engines))
        return RemoteFleet(
            workers=len(others),
            responses=self._responses,
            pull_s=0.0 if any(not m.local for m in self._generators()) else self._dispatch.members.pull_s,
            tok_per_s=sum(placement.rate(member, self._responses, sharing) for member in others),
            speed=placement.fleet_speed(others),
            local_speed=placement.fleet_speed(engines) if engines else None,
        )

    def _observe(self, now: float) -> None:
        """Records how many other workers there were, and which workers can generate from now on."""
        step = self._step
        step.worker_seconds += len(self._others()) * (now - step.observed_s)
        step.observed_s = now
        generators = tuple(m.id for m in self._generators())
        if len(self._dispatch.ledger) and (not step.generators or generators != step.generators[-1][1]):
            step.progress.append(self._progress(now))
            step.generators.append((now - step.began_s, generators))

    def _progress(self, now: float) -> Progress:
        ledger, step = self._dispatch.ledger, self._step
        generated = max(ledger.counts.accepted - step.accepted_before, step.trainable_tokens)
        context = sum(map(ledger.context, step.generators[-1][1])) if step.generators else 0
        return Progress(now - step.began_s, generated, step.trainable_tokens, len(ledger), context)

    def _speeds(self) -> tuple[tuple[float, FleetSpeed], ...]:
        """For each period of the step, the combined speed of its workers, from current measurements. Empty if any
        speed is unknown."""
        members, out = self._dispatch.members.all, list[tuple[float, FleetSpeed]]()
        for at_s, ids in self._step.generators:
            speed = self._dispatch.placement.fleet_speed(members[id] for id in ids if id in members)
            if ids and speed is None:
                return ()
            out.append((at_s, speed or FleetSpeed()))
        return tuple(out)

    def _now(self) -> float:
        return asyncio.get_running_loop().time()


class IdleGeneration(LocalGeneration):
    """A TrainingPace that never holds training back."""

    generates = False
    """Whether the trainer's engine takes part."""

    def __init__(
        self, dispatch: Dispatch, policy: LocalTimePolicy, events: EventLog, responses: int, staleness: int
    ) -> None:
        super().__init__(dispatch, policy, events, responses)
        self._period = deque[tuple[float, float]](maxlen=staleness + 1)
        """For each step of the last period: seconds for which the trainer waited, and seconds of the step. Begins again
        when the engine is switched on."""

    def begin(self, step: int) -> None:
        if len(self._period) == self._period.maxlen and not isinstance(self._policy, OnlyWithoutWorkers):
            steps, share = (self._period, STOP_SHARE) if self.generates else ([self._period[-1]], START_SHARE)
            before, self.generates = self.generates, sum(w for w, _ in steps) > share * sum(s for _, s in steps)
            if self.generates and not before:
                self._period.clear()
        self._step = self._new_step(step, self._now(), WITHOUT_LIMIT, None)
        self.may_train.set()
        self._apply()

    def begin_evaluation(self) -> None:
        self.may_train.set()

    def trainable(self) -> None: ...

    def generated(self) -> None: ...

    def end(self, *, tokens: int, train_s: float, train_wait_s: float) -> None:
        if self.last is not None:  # not the first step of a run
            self._period.append((train_wait_s, self._now() - self._step.began_s))
        super().end(tokens=tokens, train_s=train_s, train_wait_s=train_wait_s)
        assert self.last is not None, "end() sets it"
        # Its engine stands still while the trainer trains, so its speed is measured over the rest of the step.
        not_training_s = max(0.0, self._now() - self._step.began_s - train_s)
        self.last = replace(self.last, local_s=min(self.last.local_s, not_training_s))

    def tick(self) -> None:
        self._observe(self._now())
        self._apply()

    def _apply(self) -> None:
        """Pause or resume the trainer's engine, unless it is the only one that can generate."""
        engines, queued = self._engines(), self._dispatch.ledger.queued > 0
        ready = any(e.state is WorkerState.READY for e in engines)
        if _paused(engines) and (self.generates or (queued and self._why_alone())):
            self._resume(engines)
        elif ready and not self.generates and not self._why_alone():
            self._pause(engines)
        elif ready and self._step.generating_since_s is None:
            self._step.generating_since_s = self._now()


def _paused(engines: list[Member]) -> bool:
    return any(e.state is WorkerState.PAUSED for e in engines)
