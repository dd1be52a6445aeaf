"""Computes the figures of a run from its event log. `from_events` works for any run; `figures` is for a simulated run,
where it is also known when each machine was paid for. All figures are in real tokens and cover the steps after the
first few.

Several simulated runs are compared over the same steps (`figures_of_equal_steps`). Within `sim.seconds` a faster policy
completes more steps, and steps differ: if the last one is slow, the policy that completes it looks slower. So figures
cover only the steps that every run has completed. In each of these steps, all runs generate the same responses.

With several policies, the steps that count are those of the first one, and tokens, money and workers are those of the
time that these steps took.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from windfall.controller.cost.bill import Account, Bucket, Totals
from windfall.errors import WindfallError
from windfall.events.log import Event, Sink, read
from windfall.sim.calibrate.event_log import steps_of
from windfall.sim.core import run
from windfall.sim.core.scenario import Scenario
from windfall.sim.machines.fleet import Stay

LOST: tuple[Bucket, ...] = ("booting", "pulling", "prefill_again", "lost", "draining")


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicyFigures:
    """One of several policies."""

    steps: int
    """Steps that it completed in the time that the figures cover."""
    step_s: float
    """Seconds of a step, on average."""
    wait: float
    """Share of its trainer's time in which the trainer waited for responses."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Figures:
    steps: int
    virtual_s: float
    """Seconds of these steps."""
    whole_s: float
    """Seconds of the whole run."""
    tok_per_s: float
    tok_per_usd: float
    """Tokens per dollar. 0: no price is known."""
    usd: float
    """Cost in dollars. A lower bound if a price is unknown."""
    unpriced_s: float
    step_s: tuple[float, ...]
    trainer_idle: float
    workers_there: float
    """Average number of workers."""
    workers_idle: float
    """Share of the workers' paid time."""
    workers_lost: float
    """Share of the workers' paid time spent on booting, pulling, repeated prefill, draining and lost work."""
    killed: int
    moved: int
    again: float
    """Tokens generated again, as a share of all tokens."""
    advice: tuple[str, ...]
    """The last advice for each kind of worker."""
    policies: dict[str, PolicyFigures]
    """By policy, if there are several."""

    @property
    def step_mean_s(self) -> float:
        return statistics.mean(self.step_s)

    def row(self) -> dict[str, Any]:
        return {**asdict(self), "step_mean_s": self.step_mean_s}


def completed_steps(events: Sequence[Event], scenario: Scenario) -> list[Event]:
    """The completed steps of a simulated run. An error if there are none after those that figures skip."""
    steps, skip = steps_of(events, scenario.real.names()[0]), scenario.real.sim.skip_steps
    if len(steps) <= skip:
        fix = "Raise run.steps or sim.seconds, or lower sim.skip_steps."
        raise WindfallError(f"only {len(steps)} steps were completed, and {skip} are skipped", where="sim", fix=fix)
    return steps


def figures(log: Path, scenario: Scenario, stays: Sequence[Stay], *, last: int | None = None) -> Figures:
    """The figures of a simulated run. `last`: leave out the steps after this one."""
    events = read(log)
    skip = scenario.real.sim.skip_steps
    lead, steps = scenario.real.names()[0], completed_steps(events, scenario)[:last]
    start_s, end_s = steps[skip]["m"] - steps[skip]["s"], steps[-1]["m"]
    usd = 0.0
    for stay in stays:  # no bill contains a machine that was preempted before its worker dialed in
        seconds = min(stay.end_s, end_s) - max(stay.start_s, start_s)
        if seconds > 0 and not stay.joined:
            usd += stay.usd_per_h * seconds / 3600
    return from_events(events, skip=skip, last=last, granule=scenario.granule, more_usd=usd, policy=lead)


def from_events(
    events: Sequence[Event], *, skip: int, last: int | None = None, granule: int = 1, more_usd: float = 0.0,
    policy: str = "",
) -> Figures:  # fmt: skip
    """The figures of any run, real or simulated, from its log alone. The first `skip` steps and those after step `last`
    are left out; at least one must remain. `policy`: the one whose steps count; if left out, the first one in the log.
    """
    logged = steps_of(events)
    lead = policy or next((e.get("policy", "") for e in logged), "")
    all_steps = steps_of(events, lead)[:last]
    steps = all_steps[skip:]
    first = logged.index(all_steps[skip - 1]) + 1 if skip else 0
    covered = logged[first : logged.index(steps[-1]) + 1]
    start_s, end_s = steps[0]["t"] - steps[0]["s"], steps[-1]["t"]
    tokens = _tokens(all_steps, skip)
    seconds = end_s - start_s
    bill = sum((msgspec.convert(e["bill"], Totals) for e in covered), Totals())
    trainer = bill.holders.get("trainer", Account())
    others = [a for h, a in bill.holders.items() if h != "trainer"]
    usd = bill.all.total_usd + more_usd
    paid_s = max(1e-9, sum(a.total_s for a in others))
    return Figures(
        steps=len(steps),
        virtual_s=seconds,
        whole_s=events[-1]["t"] - events[0]["t"],
        tok_per_s=tokens / seconds,
        tok_per_usd=tokens / usd if usd else 0.0,
        usd=usd,
        unpriced_s=bill.all.unpriced_s,
        step_s=tuple(e["s"] for e in steps),
        trainer_idle=trainer.seconds.get("waiting", 0.0) / max(1e-9, trainer.total_s),
        workers_there=sum(a.total_s for a in others) / seconds,
        workers_idle=_seconds(others, "waiting") / paid_s,
        workers_lost=_seconds(others, *LOST) / paid_s,
        killed=sum(1 for e in events if e["name"] == "worker_lost" and start_s < e["t"] <= end_s),
        moved=sum(e["moved"] for e in covered),
        again=sum(e["discarded"] for e in covered) * granule / max(1, tokens),
        advice=_advice(events),
        policies={name: _policy(covered, name) for name in sorted({e["policy"] for e in covered if "policy" in e})},
    )


def _policy(steps: Sequence[Event], name: str) -> PolicyFigures:
    own = steps_of(steps, name)
    seconds = max(1e-9, sum(e["s"] for e in own))
    wait = sum(e["train_wait_s"] for e in own) / seconds
    return PolicyFigures(steps=len(own), step_s=seconds / len(own), wait=wait)


def _tokens(steps: Sequence[Event], skip: int) -> int:
    """Real tokens generated in the steps after the first `skip`."""
    if "real_tokens" in steps[-1]:
        return steps[-1]["real_tokens"] - (steps[skip - 1]["real_tokens"] if skip else 0)
    return sum(e["made"] - e["restored"] for e in steps[skip:])


def _seconds(accounts: Sequence[Account], *buckets: Bucket) -> float:
    return sum(a.seconds.get(b, 0.0) for a in accounts for b in buckets)


def _advice(events: Sequence[Event]) -> tuple[str, ...]:
    last = {e["lease"]: e for e in events if e["name"] == "advice"}
    return tuple(f"{e['count']} workers ({lease}) instead of {e['now']}: {e['why']}" for lease, e in last.items())


class Spread(NamedTuple):
    """The mean and range of a figure over several seeds."""

    mean: float
    least: float
    most: float

    def __str__(self) -> str:
        return f"{self.mean:,.4g} ({self.least:,.4g} to {self.most:,.4g})"


def spread(values: Sequence[float]) -> Spread:
    """Mean and range of these values.

    >>> spread([1.0, 3.0])
    Spread(mean=2.0, least=1.0, most=3.0)
    """
    return Spread(mean=statistics.mean(values), least=min(values), most=max(values))


class SimulatedRun(NamedTuple):
    scenario: Scenario
    log: Path
    stays: Sequence[Stay]
    completed: int
    """Number of completed steps, those that figures skip included."""


def simulate(scenario: Scenario, log: Path, sink: Sink | None = None) -> SimulatedRun:
    """Simulate a scenario. An error if it completes no step after those that figures skip."""
    done = run.simulate(scenario, log, sink=sink)
    return SimulatedRun(scenario, log, done.stays, len(completed_steps(read(log), scenario)))


def figures_of_equal_steps(runs: Sequence[SimulatedRun]) -> list[Figures]:
    """The figures of each run, over the steps that all of them have completed."""
    last = min(r.completed for r in runs)
    return [figures(r.log, r.scenario, r.stays, last=last) for r in runs]
