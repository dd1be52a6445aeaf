"""What a run tells of its fleet: the counters and the bill of every step, advice, and fleet.json."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import msgspec

from windfall import algorithms
from windfall.config import Recipe
from windfall.cost import prices
from windfall.events.log import EventLog, Foreign, scan
from windfall.rollout.advisor import Advisor
from windfall.rollout.dispatch import Dispatch
from windfall.scheduling.members import WorkerState as Stage
from windfall.scheduling.seed_time import StepMeasurement
from windfall.types import LOCAL

MOST = 64
"""Workers of one kind that advice speaks of."""
Ended = Literal["finished", "stopped", "failed"]
GONE_TOLD = 50
"""Of the workers that are gone, so many are in a snapshot."""


@dataclass(slots=True)
class Before:
    """What a controller must know of the lives before its own."""

    billed_s: float = -math.inf
    """Until when a bill has been written, by this process's clock."""
    evaluated: set[int] = field(default_factory=set)
    """Steps whose evaluation still stands."""
    step: int = 0
    """The last one that the log has."""


def look_back(events: EventLog, hear: Callable[[dict[str, Any]], None] = lambda event: None) -> Before:
    """Reads the log event by event, each of which `hear` gets as well: a long log must not cost its size in memory.
    Names lines that are not ours."""
    out, foreign, billed_s = Before(), Foreign(), -math.inf
    for e in scan(events.path, foreign):
        hear(e)
        if e.get("bill"):
            billed_s = max(billed_s, e["t"])
        if (e["kind"], e["name"]) == ("scalar", "eval"):
            out.evaluated.add(e.get("step", 0))
        elif (e["kind"], e["name"]) == ("scalar", "step"):
            out.step = e.get("step", 0)
        elif e["name"] == "resumed":
            out.evaluated = {step for step in out.evaluated if step <= e["step"]}
            out.step = min(out.step, e["step"])
    if foreign.lines:
        events.instant("log_foreign", lines=foreign.lines, first=foreign.first)
    out.billed_s = events.clock.monotonic() + billed_s - events.clock.wall()
    return out


def overlaps(recipe: Recipe) -> bool:
    """Whether groups can be trained on while others are still being made."""
    algorithm = algorithms.make(recipe.algorithm.name, **recipe.algorithm.options)
    return algorithm.scope == "group" and recipe.train.minibatches == 1 and recipe.techniques.pipelining


class Telling:
    def __init__(self, recipe: Recipe, dispatch: Dispatch, events: EventLog) -> None:
        f, o = recipe.fleet, recipe.rollout
        self._recipe, self._dispatch, self._events = recipe, dispatch, events
        self._counted: dict[str, int] = {}
        self._advisor = Advisor(
            dispatch, responses=o.groups * o.group_size, trainer_usd_per_h=f.trainer_price_usd_per_h,
            max_count=MOST, overlap=overlaps(recipe),
        )  # fmt: skip

    def counters(self, last: StepMeasurement | None, now_s: float) -> dict[str, Any]:
        """A step is over: what happened to the fleet since the one before, and what it cost. `last`: what the step was
        like."""
        c = self._dispatch.ledger.counts
        now = {
            "moved": c.moved, "prefilled_again": c.prefilled_again, "repeated": c.repeated, "late": c.late,
            "stale": c.stale, "gaps": c.gaps, "discarded": c.discarded,
            "lost_tokens": self._dispatch.ledger.lost_tokens(), "workers_lost": self._dispatch.members.lost,
        }  # fmt: skip
        since = {k: v - self._counted.get(k, 0) for k, v in now.items()}
        self._counted = now
        here = sum(1 for _ in self._dispatch.members.here())
        if last is not None:
            self._advise(last, now_s)
            self._dispatch.accounts.trainer_waited(now_s, last.train_wait_s)
        return {
            **since,
            "workers": here,
            "speeds": self._speeds(),
            "bill": msgspec.to_builtins(self._dispatch.accounts.step(now_s)),
        }

    def _speeds(self) -> dict[str, list[list[float]]]:
        """What was seen of every kind of worker: [batch, seconds of a step, windows], for `windfall sim calibrate`."""
        sums: dict[str, dict[int, list[float]]] = {}
        for member in self._dispatch.members.here():
            kind = LOCAL if member.name == LOCAL else prices.kind(member.lease)
            for size, (batch, step_s, windows) in self._dispatch.placement.speeds.measured(member.id).items():
                row = sums.setdefault(kind, {}).setdefault(size, [0.0, 0.0, 0.0])
                for n, x in enumerate((batch * windows, step_s * windows, windows)):
                    row[n] += x
        return {kind: [[b / w, s / w, w] for b, s, w in rows.values()] for kind, rows in sums.items()}

    def last_bill(self, now_s: float) -> dict[str, Any]:
        """Of what came after the last step."""
        return {"bill": msgspec.to_builtins(self._dispatch.accounts.step(now_s))}

    def _advise(self, last: StepMeasurement, now_s: float) -> None:
        for kind, a in self._advisor.step(last, now_s).items():
            self._events.instant(
                "advice", lease=kind, now=a.now, count=a.count, why=a.why, tokens_per_usd_now=a.tokens_per_usd_now,
                tokens_per_usd_best=a.tokens_per_usd_best,
            )  # fmt: skip

    def snapshot(self, *, step: int, now_s: float, ended: Ended | None) -> dict[str, Any]:
        """The fleet as it is, for `windfall top`; and a sign of life for the supervisor. `ended`: None: it runs."""
        ledger, offer = self._dispatch.ledger, self._dispatch.offer
        members = list(self._dispatch.members.all.values())
        told = {w.id for w in [w for w in members if w.state is Stage.GONE][-GONE_TOLD:]}
        workers = [
            {
                "worker": w.id, "lease": prices.kind(w.lease), "kind": w.lease.kind,
                "device": w.lease.device, "region": w.lease.region,
                "price_usd_per_h": prices.of(w.lease).usd_per_h, "state": "suspect" if w.suspect else str(w.state),
                "version": w.version, "running": ledger.running(w.id), "slots": w.slots,
                "tok_per_s": w.tok_per_s, "made": w.generated, "moved": w.moved, "age_s": now_s - w.joined_s, "why": w.why,
            }
            for w in members
            if w.state is not Stage.GONE or w.id in told
        ]  # fmt: skip
        return {
            "t": self._events.clock.wall(), "pid": os.getpid(), "run": self._recipe.run.name,
            "step": step, "steps": self._recipe.run.steps, "version": offer.version if offer else None, "ended": ended,
            "queued": len(ledger.queue), "open": len(ledger), "lost": self._dispatch.members.lost,
            "counts": asdict(ledger.counts), "workers": workers,
            "advice": [
                {"lease": kind, "now": a.now, "count": a.count, "why": a.why}
                for kind, a in self._advisor.advice.items()
            ],
        }  # fmt: skip
