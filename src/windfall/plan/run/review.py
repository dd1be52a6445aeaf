"""What was planned beside what a run measured, part by part. Reads a run's recipe and event log; the rest is pure.

The plan is in the sections [plan] and [sim] of the run's recipe, as `windfall plan --write` puts it there. The first
step, which includes start-up, and parts that the log does not contain are left out. The last row is the plan with the
run's own times: it tells an error of the plan's times from one of its model.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from windfall import recipe as config
from windfall.controller.cost.bill import Totals
from windfall.errors import WindfallError
from windfall.events.log import Event, read
from windfall.plan.model import cluster as clusters
from windfall.plan.model.cost_model import Efficiency
from windfall.plan.model.inputs import recipe_workload
from windfall.plan.run import run_log
from windfall.plan.run.recipe import simulate
from windfall.plan.run.run_log import measured_steps, same_kind
from windfall.plan.search import planner
from windfall.plan.search.request import Request
from windfall.recipe import PlannedWorkers, Recipe
from windfall.sim.calibrate import event_log
from windfall.sim.core.scenario import service


class Part(NamedTuple):
    name: str
    planned: float
    measured: float
    unit: str

    @property
    def error(self) -> float:
        """Planned relative to measured."""
        return self.planned / self.measured - 1

    def __str__(self) -> str:
        return f"{self.name:44} {self.planned:12.4g} {self.measured:12.4g} {self.unit:6} {self.error:+8.1%}"


HEADER = f"{'part':44} {'planned':>12} {'measured':>12} {'unit':6} {'error':>8}"


def no_run(run: Path, missing: str) -> WindfallError:
    """The error for a folder that is not that of a run."""
    what = f"this folder has no {missing}" if run.is_dir() else "no such run"
    return WindfallError(what, where=str(run), fix="Give the folder of a run, such as runs/demo.")


def review(run: Path) -> list[Part]:
    recipe = config.load(run / "recipe.toml")
    if not recipe.plan.name:
        fix = "Only runs of a recipe from `windfall plan --write` can be checked."
        raise WindfallError("this run was not planned: its recipe has no [plan] section", where=str(run), fix=fix)
    if not (run / "events.jsonl").is_file():
        raise no_run(run, "events.jsonl")
    events = read(run / "events.jsonl")
    if not event_log.steps_of(events):
        raise WindfallError("no step of this run is complete yet", where=str(run), fix="Wait for the first step.")
    own = with_own_times(recipe, events)
    return [*parts(recipe, events), *([own] if own else [])]


OWN_TIMES = "tokens per second, this run's own times"


def with_own_times(recipe: Recipe, events: Sequence[Event]) -> Part | None:
    """The same plan, simulated with the times and lengths that this run measured. If this is close to what was measured
    and the plan is not, then the times that the plan was made with do not hold for this run. None: the log has no times
    that can be used, as with a trainer of several ranks."""
    plan, steps = recipe.plan, measured_steps(events)
    seen = run_log.speeds(events, "the run")
    seconds = sum(e.get("s", 0.0) for e in steps)
    if seen.trainer is None or plan.trainer_gpus > 1 or not seen.workers or not seconds:
        return None
    work = run_log.with_lengths(recipe_workload(recipe), seen.lengths, seen.prompt_tokens)
    cluster = run_log.with_speeds(clusters.parse(plan.cluster, "plan.cluster"), seen, work)
    request = Request(cluster=cluster, work=work, efficiency=Efficiency())
    counts = {
        (kind, w.gpus): w.count for w in plan.workers for kind in cluster.kinds()
        if (kind.lease, round(w.gpus * kind.usd_per_h, 4)) == (w.lease, w.price_usd_per_h) and w.device == kind.gpu.name
    }  # fmt: skip
    made = planner.fixed(request, plan.trainer_device, 1, counts, own=recipe.fleet.local)
    if made is None:
        return None
    tok_per_s = sum(e.get("trained", 0) for e in steps) / seconds
    return Part(OWN_TIMES, simulate(made, request, recipe).tok_per_s, tok_per_s, "tok/s")


def parts(recipe: Recipe, events: Sequence[Event]) -> list[Part]:
    """Pure: the parts of a run with this recipe and log."""
    steps = measured_steps(events)
    plan, trainer = recipe.plan, service(recipe.sim.trainer, "sim.trainer")
    lengths = [n for e in steps for row in e.get("lengths", ()) for n in row if n]
    mean = statistics.mean(lengths) if lengths else recipe.sim.median_tokens
    out = _whole(recipe, steps)
    if lengths:
        planned = statistics.NormalDist(0.0, recipe.sim.sigma or 1e-9)
        drawn = [min(recipe.rollout.max_tokens, recipe.sim.median_tokens * math.exp(planned.inv_cdf((n + 0.5) / 999)))
                 for n in range(999)]  # fmt: skip
        out.append(Part("mean response", statistics.mean(drawn), mean, "tokens"))
    trained = event_log.training(events, [e["step"] for e in steps])
    if trained is not None:
        out.append(Part("training, per million tokens", trainer.train_s * 1e6, trained.train_s * 1e6, "s"))
        if trainer.update_s and trained.update_s:
            out.append(Part("optimizer and publishing", trainer.update_s, trained.update_s, "s"))
    for kind, points in event_log.speeds(steps).items():
        mine = [w for w in plan.workers if _is(kind, w)]
        if not mine:
            continue
        busiest = max(points, key=lambda p: p.weight * p.batch)
        context = busiest.batch * (recipe.sim.prompt_tokens + mean / 2)
        step_s = service(mine[0].worker, "plan.workers").step_s(busiest.batch, context)
        out.append(Part(f"engine step, {kind}, batch {busiest.batch:.0f}", step_s * 1e3, busiest.step_s * 1e3, "ms"))
    pulled = [e["s"] for e in events if e["name"] == "worker_ready" and e.get("version", 0) > 0 and e.get("s", 0) > 0]
    if pulled:
        share = recipe.sim.egress_bytes_per_s / max(1, sum(w.count for w in plan.workers))
        planned_s = recipe.sim.weights_bytes / min(share, recipe.sim.ingress_bytes_per_s)
        out.append(Part("pull of new weights, one worker", planned_s, statistics.median(pulled), "s"))
    return out


def _is(kind: str, w: PlannedWorkers) -> bool:
    return same_kind(kind, device=w.device, lease=w.lease, usd_per_h=w.price_usd_per_h)


def _whole(recipe: Recipe, steps: Sequence[Event]) -> list[Part]:
    """The run as a whole: step time, tokens per second, workers, and price. Steps that were resumed into count with the
    time that they took."""
    plan, seconds = recipe.plan, sum(e.get("s", 0.0) for e in steps)
    tokens = sum(e.get("trained", 0) for e in steps)
    if not plan.tok_per_s or not seconds or not tokens:
        return []
    out = [
        Part("step", plan.step_s, seconds / len(steps), "s"),
        Part("tokens per second", plan.tok_per_s, tokens / seconds, "tok/s"),
    ]
    here = [e["workers"] for e in steps if "workers" in e]
    if here and any(here):
        out.append(Part("workers", sum(w.count for w in plan.workers), statistics.mean(here), ""))
    bills = [msgspec.convert(e["bill"], Totals) for e in steps if e.get("bill")]
    usd = sum(sum(account.usd.values()) for bill in bills for account in bill.holders.values())
    if usd and plan.usd_per_h:
        planned = plan.usd_per_h / 3600 / plan.tok_per_s * 1e6
        out.append(Part("price per million tokens", planned, usd / tokens * 1e6, "$"))
    return out
