"""Whether another plan has become better for a run, by the conditions at the end of its log.

The run as it is now is scored beside the best plan for the conditions of now: machines that are paid for anyway as in
the section [plan], others as they are present, prices of their leases, lengths of the last steps. How many workers of a
kind pay off is the subject of the advice of controller/rollout/advisor.py; this is about who trains and which kinds
generate, so plans that differ only in numbers of workers are the same here. Pure.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple

from windfall.errors import WindfallError
from windfall.events.log import Event
from windfall.plan.model import cluster as clusters
from windfall.plan.model import devices
from windfall.plan.model.cluster import Cluster, ClusterMachine, Kind
from windfall.plan.model.cost_model import Efficiency
from windfall.plan.model.inputs import recipe_workload
from windfall.plan.model.workload import Workload
from windfall.plan.run import run_log
from windfall.plan.run.run_log import is_device
from windfall.plan.search import planner
from windfall.plan.search.plan import PlanRequest, RunPlan
from windfall.recipe.sections import Recipe
from windfall.sim.calibrate.event_log import steps_of
from windfall.types import LOCAL

STEPS = 4
"""Steps whose lengths count."""
CHANGED = 0.10
"""Relative change of the mean length, or of a price, that is worth a word."""
GAIN = 0.10
"""Smallest relative gain that is worth a change."""
WORKERS_S, TRAINER_S = 60.0, 240.0
"""Seconds without progress that a change of the workers costs, and one of the trainer, which restarts the run."""


class PresentWorker(NamedTuple):
    device: str
    lease: str
    usd_per_h: float | None

    @property
    def kind(self) -> str:
        return f"{self.lease} {self.device}"


class PlanAdvice(NamedTuple):
    """Another plan is better than the run as it is now."""

    now: RunPlan
    best: RunPlan
    gain: float
    """Relative gain by the objective; inf: the run cannot meet its objective as it is."""
    payback_s: float
    """Seconds after which the change has paid for itself."""
    why: str
    """What has changed since the plan was made; empty: nothing that matters."""

    def __str__(self) -> str:
        better = "possible, and this one is not"
        if math.isfinite(self.gain):
            better = f"{self.gain:.0%} better; the change pays for itself in {self.payback_s:,.0f} s"
        return f"another plan would be {better}: {self.best.name}" + (f" (since {self.why})" if self.why else "")


def better_plan(recipe: Recipe, events: Sequence[Event], work: Workload | None = None) -> PlanAdvice | None:
    """What to change in a planned run. None: nothing. `work`: by default that of the recipe."""
    plan, steps = recipe.plan, steps_of(events)
    planned = work or recipe_workload(recipe)
    cluster = clusters.parse(plan.cluster, "plan.cluster")
    workers = present_workers(events, [m.gpu.name for m in cluster.machines])
    if not steps or not workers:
        return None
    hours_used = (steps[-1]["t"] - steps[0]["t"]) / 3600
    lengths = run_log.lengths_of(steps[-STEPS:])
    left = replace(planned, steps=max(1, recipe.run.steps - steps[-1]["step"]))
    request = PlanRequest(
        cluster=_present(recipe, cluster, workers),
        work=run_log.with_lengths(left, lengths),
        efficiency=Efficiency(),
        objective=plan.objective,
        budget_usd_per_h=plan.budget_usd_per_h or math.inf,
        deadline_h=max(1e-3, plan.deadline_h - hours_used) if plan.deadline_h else 0.0,
    )
    counts = Counter[tuple[Kind, int]]()
    for w in workers:
        kinds = [k for k in request.cluster.kinds() if k.lease == w.lease and is_device(k.gpu.name, w.device)]
        if not kinds:
            return None
        counts[kinds[0], _engine_size(recipe, kinds[0])] += 1
    try:
        best = planner.plans(request)[0]
        now = planner.fixed(request, plan.trainer_device, plan.trainer_gpus, counts, own=recipe.fleet.local)
    except WindfallError:  # nothing can be planned: there is nothing to advise
        return None
    if now is None or _shape(best) == _shape(now):
        return None
    value = _value(request, now)
    gain = _value(request, best) / value - 1 if value > 0 else math.inf
    if gain < GAIN or not _value(request, best):
        return None
    change_s = WORKERS_S if best.training.gpus == now.training.gpus else TRAINER_S
    payback_s = change_s * (1 + gain) / gain if math.isfinite(gain) else 0.0
    return PlanAdvice(now, best, gain, payback_s, _changes(recipe, workers, planned.mean_tokens, lengths))


def present_workers(events: Sequence[Event], names: Iterable[str]) -> list[PresentWorker]:
    """The workers that were present at the last step. `names`: devices as the plan names them."""
    here: dict[str, PresentWorker] = {}
    last: list[PresentWorker] = []
    for event in events:
        match event["name"]:
            case "worker_joined" if event["worker"].partition("#")[0] != LOCAL:
                device = next((n for n in [*names, *devices.TABLE] if is_device(n, event["device"])), event["device"])
                here[event["worker"]] = PresentWorker(device, event["lease"], event["usd_per_h"])
            case "worker_left" | "worker_lost":
                here.pop(event["worker"], None)
            case "resumed":  # after a restart of the controller, all workers join again
                here.clear()
            case "step":
                last = list(here.values())
    return last


def _present(recipe: Recipe, cluster: Cluster, workers: Iterable[PresentWorker]) -> Cluster:
    """Reserved machines as planned; all others as they are present, at the prices of now."""
    machines = [m for m in cluster.machines if m.lease == "reserved"]
    for w in workers:
        like = _like(recipe, cluster, w) if w.lease != "reserved" else None
        if like is not None:
            if like.lease == "spot" and w.usd_per_h:
                like = replace(like, gpu=replace(like.gpu, spot_usd_per_h=w.usd_per_h / like.count))
            machines.append(replace(like, name=f"w{len(machines)}", address=""))
    return replace(cluster, machines=tuple(machines))


def _like(recipe: Recipe, cluster: Cluster, w: PresentWorker) -> ClusterMachine | None:
    """A machine with one engine such as this worker has: one of the cluster, or one with a known GPU."""
    known = {m.kind: m for m in cluster.machines}.values()
    same = [m for m in known if m.lease == w.lease and is_device(m.gpu.name, w.device)]
    if same:
        planned = min(same, key=lambda m: abs((w.usd_per_h or 0.0) - m.kind.usd_per_h))
        return replace(planned, count=_engine_size(recipe, planned.kind))
    gpu = next((name for name in devices.TABLE if is_device(name, w.device)), None)
    if gpu is None or devices.TABLE[gpu].measured_only or w.lease not in ("spot", "borrowed"):
        return None
    return ClusterMachine(name="", gpu=devices.find(gpu), count=1, lease="spot" if w.lease == "spot" else "borrowed")


def _engine_size(recipe: Recipe, kind: Kind) -> int:
    """GPUs of one engine, as planned."""
    planned = [w.gpus for w in recipe.plan.workers if (w.device, w.lease) == (kind.gpu.name, kind.lease)]
    return planned[0] if planned else 1


def _shape(plan: RunPlan) -> tuple[object, ...]:
    """Who trains and which kinds generate: plans with the same shape differ only in numbers of workers."""
    return plan.training.gpus, plan.training.gpu.name, {g.kind.name for g in plan.replicas}


def _value(request: PlanRequest, plan: RunPlan) -> float:
    """Higher is better; 0: the plan misses the deadline."""
    match request.objective:
        case "throughput":
            return plan.tok_per_s
        case "cost":
            return 1 / plan.usd_per_mtok
        case "deadline":
            late = plan.work.steps * plan.step_s > 3600 * request.deadline_h * 1.001
            return 0.0 if late else 1 / plan.usd_per_h


def _changes(recipe: Recipe, workers: Sequence[PresentWorker], planned_tokens: float, lengths: Sequence[int]) -> str:
    """What has changed since the plan was made."""
    parts = []
    planned: list[PresentWorker] = []
    for w in recipe.plan.workers:
        planned += [PresentWorker(w.device, w.lease, w.price_usd_per_h)] * w.count
    before, now = (Counter(w.kind for w in rows) for rows in (planned, workers))
    for kind in dict.fromkeys([*before, *now]):
        if before[kind] != now[kind]:
            parts.append(f"{kind}: {before[kind]} -> {now[kind]} workers")
    before_usd, now_usd = ({w.kind: w.usd_per_h for w in rows if w.usd_per_h} for rows in (planned, workers))
    for kind, usd in now_usd.items():
        if (was := before_usd.get(kind)) and abs(usd / was - 1) > CHANGED:
            parts.append(f"{kind}: ${was:g} -> ${usd:g} per hour")
    mean = statistics.mean(lengths) if lengths else planned_tokens
    if abs(mean / planned_tokens - 1) > CHANGED:
        parts.append(f"mean response: {planned_tokens:.0f} -> {mean:.0f} tokens")
    return "; ".join(parts)
