"""What a run reports about its fleet: counters and bill of every step, advice, and the snapshot in fleet.json."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

import msgspec

from windfall import algorithms
from windfall.controller.cost import prices
from windfall.controller.rollout.advisor import Advisor
from windfall.controller.rollout.dispatch import Dispatch
from windfall.controller.scheduling.local_time import StepMeasurement
from windfall.controller.workers.members import DraftCounts, Member, WorkerState
from windfall.events.log import Event, EventLog, scan
from windfall.events.steady_time import SteadyTime
from windfall.recipe.sections import Recipe
from windfall.types import LOCAL

MAX_ADVISED = 64
"""Upper limit for the workers of one kind that advice considers."""
Ended = Literal["finished", "stopped", "failed"]
GONE_SHOWN = 50
"""Number of newest gone workers in a snapshot."""
STALENESS = {
    "mean": "staleness_mean", "max": "staleness_max", "too_old": "too_old", "too_old_tokens": "too_old_tokens",
    "held_s": "held_s", "train_wait_s": "train_wait_s",
}  # fmt: skip
"""Keys of `staleness` in a snapshot, and the fields of a step event that they show. `counts` is added to them."""


@dataclass(slots=True)
class LogHistory:
    """What a controller needs to know about its predecessors, read from the event log."""

    billed_s: float = -math.inf
    """Time up to which a bill has been written, on this process's monotonic clock."""
    evaluated: dict[str, set[int]] = field(default_factory=dict)
    """By policy: steps with a valid evaluation."""
    steps: dict[str, int] = field(default_factory=dict)
    """By policy: its last step in the log."""
    left_fp8: bool = False
    """The run has gone back from a KV cache in fp8 to one in bf16."""


def read_history(events: EventLog, observe: Sequence[Callable[[Event], None]] = ()) -> LogHistory:
    """Read the log one event at a time, because a long log must not be held in memory. Each event, and each later one,
    is passed to `observe`."""
    history, time, billed_t = LogHistory(), SteadyTime(), -math.inf
    for e in scan(events.path):
        for observer in observe:
            observer(e)
        t, policy = time.at(e["t"], e["m"]), e.get("policy", "")
        if e.get("bill"):
            billed_t = max(billed_t, t)
        if (e["kind"], e["name"]) == ("scalar", "eval"):
            history.evaluated.setdefault(policy, set()).add(e.get("step", 0))
        elif (e["kind"], e["name"]) == ("scalar", "step"):
            history.steps[policy] = e.get("step", 0)
        elif e["name"] == "kv_dtype":
            history.left_fp8 = True
        elif e["name"] == "resumed":
            history.evaluated[policy] = {step for step in history.evaluated.get(policy, ()) if step <= e["step"]}
            history.steps[policy] = min(history.steps.get(policy, 0), e["step"])
    for observer in observe:
        events.attach(observer)
    now_s = events.clock.monotonic()
    history.billed_s = now_s + billed_t - time.at(events.clock.wall(), now_s)
    return history


def can_pipeline(recipe: Recipe) -> bool:
    """Whether groups can be trained on while others are still being generated."""
    algorithm = algorithms.make(recipe.algorithm.name, **recipe.algorithm.options)
    return algorithm.scope == "group" and recipe.train.minibatches == 1 and recipe.techniques.pipelining


@dataclass(slots=True)
class _PolicySteps:
    """What is known of the steps of one policy."""

    base: str
    bound: int
    """Its rollout.staleness."""
    last: dict[str, Any] = field(default_factory=dict)
    """Fields of the event of the last step."""
    tokens: int = 0
    """Tokens of all policies since its last step."""
    others_s: float = 0.0
    """Seconds since its last step in which its trainer trained other policies on the same base."""
    wait_share: float = math.inf
    """Recent share of the time in which its trainer had nothing to train on; infinite: not known, or it is done."""

    def measured(self, last: StepMeasurement) -> StepMeasurement:
        """The step from the view of its trainer: with the tokens of all policies that were generated meanwhile, and
        without waits in which it trained another policy."""
        train_s, wait_s = last.train_s + self.others_s, max(0.0, last.train_wait_s - self.others_s)
        measured = replace(last, tokens=self.tokens, train_s=train_s, train_wait_s=wait_s)
        share = wait_s / max(1e-9, train_s + wait_s)
        self.wait_share = share if self.wait_share == math.inf else (self.wait_share + share) / 2
        self.tokens, self.others_s = 0, 0.0
        return measured


class FleetReport:
    def __init__(self, recipe: Recipe, dispatch: Dispatch, events: EventLog, advisor: type[Advisor] = Advisor) -> None:
        f, o, bases = recipe.fleet, recipe.rollout, recipe.bases()
        self._recipe, self._dispatch, self._events = recipe, dispatch, events
        self._counted: dict[str, int] = {}
        self._drafts_counted = DraftCounts()
        of_policy = {name: recipe.of(name) for name in recipe.answering()}
        base_of = {name: base for base, names in bases.items() for name in names}
        self._policies = {n: _PolicySteps(base_of[n], of.rollout.staleness) for n, of in of_policy.items()}
        self._advisor = advisor(
            dispatch, responses=o.fresh_groups * o.group_size, max_count=MAX_ADVISED,
            trainer_usd_per_h=f.trainer_price_usd_per_h * len(bases),
            overlap=all(map(can_pipeline, of_policy.values())),
            asynchronous=any(p.bound for p in self._policies.values()),
        )  # fmt: skip

    def counters(
        self, last: StepMeasurement | None, now_s: float, step: dict[str, Any], policy: str = "", *, done: bool = False
    ) -> dict[str, Any]:
        """What happened to the fleet since the last step of any policy, and its cost. `last`: the measurements of the
        step that ended now. `step`: fields of its event, which are shown in the next snapshots. `done`: it was the last
        step of this policy."""
        own = self._policies[policy]
        own.last = step
        c, p = self._dispatch.ledger.counts, self._dispatch.members.prefill
        now = {
            "prefilled": p.prefilled, "prefill_saved": p.reused, "prefix_lookups": p.lookups, "prefix_hits": p.hits,
            "evictions": p.evictions, "kv_restored": p.kv_restored,
            "moved": c.moved, "prefilled_again": c.prefilled_again, "repeated": c.repeated, "late": c.late,
            "stale": c.stale, "gaps": c.gaps, "discarded": c.discarded,
            "lost_tokens": self._dispatch.ledger.lost_tokens(), "workers_lost": self._dispatch.members.lost,
        }  # fmt: skip
        differences = {k: v - self._counted.get(k, 0) for k, v in now.items()}
        self._counted = now
        if last is not None:
            for name, other in self._policies.items():
                other.tokens += last.tokens
                other.others_s += last.train_s if name != policy and other.base == own.base else 0.0
            last, accounts = own.measured(last), self._dispatch.accounts
            # More workers help only until the trainer that waits least is busy.
            if own.wait_share <= min(p.wait_share for p in self._policies.values()):
                self._advise(last, now_s, own)
            if done:
                own.wait_share = math.inf
            # In synchronous training the trainer's engine is paused while the trainer trains or waits.
            if not (own.bound and accounts.trainer_trained(now_s, last.train_s, own.base)):
                accounts.trainer_waited(now_s, last.train_wait_s, own.base)
        return {
            **differences,
            **self._drafts(),
            **self._sessions(),
            **self._predicted(),
            "workers": sum(1 for _ in self._dispatch.members.here()),
            "speeds": self._speeds(),
            **self.bill(now_s),
        }

    def _drafts(self) -> dict[str, float]:
        """What engines drafted in this step."""
        before, self._drafts_counted = self._drafts_counted, replace(self._dispatch.members.drafts)
        return self._drafts_counted.since(before).describe()

    def _sessions(self) -> dict[str, Any]:
        """The turns of this step, if responses have several."""
        if not self._dispatch.turns.several:
            return {}
        t = self._dispatch.turns.take_counts()
        return {"sessions": {"ended": t.sessions, "turns": t.turns, "routed": t.routed, "to_holder": t.to_holder}}

    def _predicted(self) -> dict[str, Any]:
        """How well lengths are predicted, once any response was."""
        described = self._dispatch.placement.lengths.describe()
        return {"predicted": described} if described else {}

    def _speeds(self) -> dict[str, list[list[float]]]:
        """For `windfall sim calibrate`: rows of [batch, seconds per engine step, windows] by kind of worker."""
        sums: dict[str, dict[int, list[float]]] = {}
        local = sum(member.local for member in self._dispatch.members.here())
        for member in self._dispatch.members.here():
            kind = LOCAL if member.local else prices.kind(member.lease)
            engines = local if member.local else 1  # those of the trainer count as one worker
            for size, (batch, step_s, windows) in self._dispatch.placement.speeds.measured(member.id).items():
                row = sums.setdefault(kind, {}).setdefault(size, [0.0, 0.0, 0.0])
                for n, x in enumerate((batch * engines * windows, step_s * windows, windows)):
                    row[n] += x
        return {kind: [[b / w, s / w, w] for b, s, w in rows.values()] for kind, rows in sums.items()}

    def bill(self, now_s: float) -> dict[str, Any]:
        """The bill for the time since the last one."""
        return {"bill": msgspec.to_builtins(self._dispatch.accounts.step(now_s))}

    def _advise(self, last: StepMeasurement, now_s: float, policy: _PolicySteps) -> None:
        held_s = policy.last["held_s"] if policy.bound else 0.0
        for kind, a in self._advisor.step(last, now_s, held_s).items():
            self._events.instant(
                "advice", lease=kind, now=a.now, count=a.count, why=a.why, tokens_per_usd_now=a.tokens_per_usd_now,
                tokens_per_usd_best=a.tokens_per_usd_best,
            )  # fmt: skip

    def lent(self) -> dict[str, list[float]]:
        """By lender: the share of its time that it lends, and the share of its memory that serving holds."""
        here = [(w.name, w.capacity) for w in self._dispatch.members.here()]
        return {name: [round(c.lent, 2), round(c.use, 2)] for name, c in here if c is not None}

    def snapshot(
        self, *, steps: Mapping[str, int], now_s: float, ended: Ended | None, graders: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """The current fleet, for `windfall top`; it also shows the supervisor that the controller is alive. `steps`: by
        policy that is trained. `ended`: how the run ended, or None while it runs. `graders`: how busy the environment
        is."""
        ledger, policies = self._dispatch.ledger, {n: self._policy(n, steps.get(n)) for n in self._policies}
        members = list(self._dispatch.members.all.values())
        gone_shown = {w.id for w in [w for w in members if w.state is WorkerState.GONE][-GONE_SHOWN:]}
        workers = [
            {
                "worker": w.id, "lease": prices.kind(w.lease, lends=w.lends), "kind": w.lease.kind,
                "device": w.lease.device, "engine": w.engine.label, "region": w.lease.region,
                "price_usd_per_h": prices.of(w.lease).usd_per_h, "state": "suspect" if w.suspect else str(w.state),
                "version": w.first.version, "base": w.base, "versions": {n: held.version for n, held in w.held.items()},
                "running": ledger.running(w.id), "slots": w.slots,
                "tok_per_s": w.tok_per_s, "made": w.generated, "moved": w.moved, "age_s": now_s - w.joined_s,
                "why": w.why, **_cache(w), **_lender(w),
            }
            for w in members
            if w.state is not WorkerState.GONE or w.id in gone_shown
        ]  # fmt: skip
        return {
            "t": self._events.clock.wall(), "pid": os.getpid(), "run": self._recipe.run.name,
            **next(iter(policies.values())), "policies": policies, "steps": self._recipe.run.steps, "ended": ended,
            "queued": ledger.queued, "open": len(ledger), "lost": self._dispatch.members.lost,
            "counts": asdict(ledger.counts), "prefill": asdict(self._dispatch.members.prefill), "workers": workers,
            "graders": graders, "drafts": self._dispatch.members.drafts.describe(),
            "gathering": msgspec.to_builtins(self._dispatch.accounts.gathering), "advised": self._advisor.steps,
            "advice": [
                {"lease": kind, "now": a.now, "count": a.count, "why": a.why}
                for kind, a in self._advisor.advice.items()
            ],
        }  # fmt: skip

    def _policy(self, name: str, step: int | None) -> dict[str, Any]:
        """A policy in the snapshot. `step` is None if it is not trained."""
        offer, own = self._dispatch.versions[name].offer, self._policies[name]
        return {
            "step": step, "version": offer.version if offer else None, "staleness": _staleness(own),
            "train_wait_s": own.last.get("train_wait_s"),
            "weights": self._dispatch.weights.directories[name].traffic.describe(),
        }  # fmt: skip


def _staleness(policy: _PolicySteps) -> dict[str, Any] | None:
    """`staleness` of the snapshot. None: the policy has made no step, or is trained synchronously."""
    if not (policy.last and policy.bound):
        return None
    values = {key: policy.last[name] for key, name in STALENESS.items()}
    # A mean over no responses is NaN, which JSON does not have.
    finite = {key: None if value is None or not math.isfinite(value) else value for key, value in values.items()}
    return {"bound": policy.bound, "counts": policy.last["staleness_counts"], **finite}


def _lender(member: Member) -> dict[str, Any]:
    """What a lender last reported."""
    c = member.capacity
    if c is None:
        return {}
    return {"lender": {"in_use": member.in_use, "slots": member.lendable, "state": c.state, "use": c.use,
                       "lent": c.lent, "slack_s": c.slack_s}}  # fmt: skip


def _cache(member: Member) -> dict[str, int]:
    """What a worker last reported of its prefix cache, and of weights that it sent to others."""
    s = member.stats
    if s is None:
        return {}
    return {"prefilled": s.prefilled, "prefill_saved": s.reused_tokens, "sent_bytes": s.sent_bytes}
