"""What the log of a run says to the planner: measured times of its devices, and its lengths. `check` (`windfall plan
--check`) compares a planned run with its plan, part by part. Pure but for `planned_run` and `events_of`, which read
files.

Times of a log hold for its model, its lengths and its engine. They replace the cost model's for machines of the same
kind: same terms, same device, same price. The first step, which includes start-up, is left out.

The plan of a run is in the sections [plan] and [sim] of its recipe, as `windfall plan --write` puts it there. Parts
that the log does not contain are not compared.
"""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import msgspec

from windfall.controller.cost.bill import Totals
from windfall.errors import WindfallError
from windfall.events.log import Event, read
from windfall.plan.model.cluster import Cluster, ClusterMachine
from windfall.plan.model.cost_model import LINK_SHARE
from windfall.plan.model.workload import Workload
from windfall.plan.run.recipe import recipe_workload
from windfall.recipe.file import load_recipe
from windfall.recipe.sections import Recipe
from windfall.run_folder import check_exists, recipe_file
from windfall.sim.calibrate import event_log
from windfall.sim.core.scenario import service
from windfall.step_time import StepTime
from windfall.types import LOCAL

HEADER = f"{'part':44} {'planned':>12} {'measured':>12} {'unit':6} {'error':>8}"


def is_device(gpu: str, device: str) -> bool:
    """Whether a device, named as in torch, is this GPU.

    >>> is_device("H100", "NVIDIA H100 80GB HBM3"), is_device("A100-80GB", "NVIDIA A100-SXM4-40GB")
    (True, False)
    """
    return set(re.findall(r"\w+", gpu.lower())) <= set(re.findall(r"\w+", device.lower()))


def same_kind(found: str, *, device: str, lease: str, usd_per_h: float) -> bool:
    """Whether the kind of a log (controller/cost/prices.py, `kind`) is this device on these terms.

    >>> same_kind("spot NVIDIA H100 80GB HBM3 at $2.63/h", device="H100", lease="spot", usd_per_h=2.63)
    True
    >>> same_kind("spot cpu at $0.20/h", device="cpu", lease="spot", usd_per_h=0.5)
    False
    """
    terms, _, price = found.partition(" at $")
    same_price = not price or abs(float(price[:-2]) - usd_per_h) < 0.006
    return terms.startswith(f"{lease} ") and is_device(device, terms) and same_price


def lengths_of(steps: Iterable[Event]) -> list[int]:
    return [n for e in steps for row in e.get("lengths", ()) for n in row if n]


@dataclass(frozen=True, kw_only=True, slots=True)
class RunSpeeds:
    """Measured times of one run."""

    workers: dict[str, StepTime]
    """Step times of an engine by kind, with prefill and context included."""
    trainer: StepTime | None
    trainer_device: str
    lengths: list[int]
    prompt_tokens: float
    weights_s: float = 0.0
    """Median seconds from an offer of new weights until a worker holds them; a worker's first pull is longer."""

    def worker(self, machine: ClusterMachine) -> StepTime | None:
        price = 0.0 if machine.lease == "borrowed" else machine.kind.usd_per_h
        for kind, times in self.workers.items():
            if same_kind(kind, device=machine.gpu.name, lease=machine.lease, usd_per_h=price):
                return times
        return None


def measured_steps(events: Sequence[Event]) -> list[Event]:
    """The steps that can be compared: the first one, of each policy, includes start-up."""
    steps = event_log.steps_of(events)
    return [e for e in steps if e["step"] > steps[0]["step"]] or steps


def speeds(events: Sequence[Event], where: str) -> RunSpeeds:
    steps = measured_steps(events)
    if not steps:
        raise WindfallError("no step of this run is complete yet", where=where, fix="Wait for the first step.")
    trained = event_log.training(events, steps)
    start = next((e for e in events if e["name"] == "start"), {})
    ranks = len(str(start.get("rank_pids", "")).split())
    trainer = None
    if trained is not None and ranks <= 1:  # the times of several ranks do not say what one of them does
        trainer = StepTime(fixed_s=1e-9, each_s=0.0, **trained._asdict())
    pulls = [e["s"] for e in events if e["name"] == "worker_ready" and e.get("version", 0) > 0 and e.get("s", 0) > 0]
    return RunSpeeds(
        workers={kind: times for kind, times in event_log.services(steps, None).items() if kind != LOCAL},
        trainer=trainer,
        trainer_device=str(start.get("machine") or start.get("device", "")),
        lengths=lengths_of(steps),
        prompt_tokens=statistics.mean(e.get("prompt_tokens") or 1.0 for e in steps),
        weights_s=statistics.median(pulls) if pulls else 0.0,
    )


def with_speeds(cluster: Cluster, seen: RunSpeeds, work: Workload) -> Cluster:
    """The cluster with measured times for the machines that the run had, and links on which a pull takes as long."""
    machines = []
    for machine in cluster.machines:
        gpu = machine.gpu
        trains = machine.lease == "reserved" and is_device(gpu.name, seen.trainer_device)
        gpu = replace(
            gpu,
            worker=seen.worker(machine) or gpu.worker,
            trainer=(seen.trainer if trains else None) or gpu.trainer,
        )
        machines.append(replace(machine, gpu=gpu))
    links = cluster.links
    if seen.weights_s:
        links = replace(links, pull=work.update_bytes / LINK_SHARE / seen.weights_s)
    return replace(cluster, machines=tuple(machines), links=links)


def with_lengths(work: Workload, lengths: Sequence[int], prompt_tokens: float = 0.0) -> Workload:
    """The workload with the lengths of a run: spread from their logarithms, and exactly their mean."""
    if len(lengths) < 2:
        return work
    median, sigma = statistics.median(lengths), round(statistics.pstdev(map(math.log, lengths)), 3)
    made = replace(work, median_tokens=float(median), sigma=sigma)
    if prompt_tokens:
        made = replace(made, prompt_tokens=max(1, round(prompt_tokens)))
    low, high = 0.1 * median, 10.0 * median
    for _ in range(40):  # the mean grows with the median
        middle = (low + high) / 2
        below = replace(made, median_tokens=middle).mean_tokens < statistics.mean(lengths)
        low, high = (middle, high) if below else (low, middle)
    return replace(made, median_tokens=high)


class CheckedPart(NamedTuple):
    """One part of a run: as planned and as measured."""

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


def events_of(run: Path) -> list[Event]:
    """The log of a run, from its folder or its file."""
    file = run if run.is_file() else run / "events.jsonl"
    if not file.is_file():
        check_exists(run)
        raise WindfallError("this folder has no events.jsonl", where=str(run), fix="Give the folder of a run.")
    return read(file)


def planned_run(run: Path) -> tuple[Recipe, list[Event]]:
    """The recipe and the log of a run that was planned."""
    recipe = load_recipe(recipe_file(run))
    if not recipe.plan.name:
        fix = "Only runs of a recipe from `windfall plan --write` can be checked."
        raise WindfallError("this run was not planned: its recipe has no [plan] section", where=str(run), fix=fix)
    return recipe, events_of(run)


def check(recipe: Recipe, events: Sequence[Event], where: str) -> list[CheckedPart]:
    """The parts of a run beside its plan."""
    seen, steps = speeds(events, where), measured_steps(events)
    plan, trainer = recipe.plan, service(recipe.sim.trainer, "sim.trainer")
    out = _whole(recipe, steps)
    mean = recipe.sim.median_tokens
    if seen.lengths:
        mean = statistics.mean(seen.lengths)
        out.append(CheckedPart("mean response", recipe_workload(recipe).mean_tokens, mean, "tokens"))
    trained = event_log.training(events, steps)
    if trained is not None:
        out.append(CheckedPart("training, per million tokens", trainer.train_s * 1e6, trained.train_s * 1e6, "s"))
        if trainer.update_s and trained.update_s:
            out.append(CheckedPart("optimizer and publishing", trainer.update_s, trained.update_s, "s"))
    for kind, points in event_log.speeds(steps).items():
        mine = [w for w in plan.workers if same_kind(kind, device=w.device, lease=w.lease, usd_per_h=w.price_usd_per_h)]
        if not mine:
            continue
        busiest = max(points, key=lambda p: p.weight * p.batch)
        context = busiest.batch * (recipe.sim.prompt_tokens + mean / 2)
        step_s = service(mine[0].worker, "plan.workers").step_s(busiest.batch, context)
        name = f"engine step, {kind}, batch {busiest.batch:.0f}"
        out.append(CheckedPart(name, step_s * 1e3, busiest.step_s * 1e3, "ms"))
    if seen.weights_s:
        planned_s = recipe.sim.weights_bytes / min(recipe.sim.egress_bytes_per_s, recipe.sim.ingress_bytes_per_s)
        out.append(CheckedPart("pull of new weights, one worker", planned_s, seen.weights_s, "s"))
    return out


def _whole(recipe: Recipe, steps: Sequence[Event]) -> list[CheckedPart]:
    """The run as a whole: step time, tokens per second, workers, and price. Steps that were resumed into count with the
    time that they took."""
    plan, seconds = recipe.plan, sum(e.get("s", 0.0) for e in steps)
    tokens = sum(e.get("trained", 0) for e in steps)
    if not plan.tok_per_s or not seconds or not tokens:
        return []
    out = [
        CheckedPart("step", plan.step_s, seconds / len(steps), "s"),
        CheckedPart("tokens per second", plan.tok_per_s, tokens / seconds, "tok/s"),
    ]
    here = [e["workers"] for e in steps if "workers" in e]
    if any(here):
        out.append(CheckedPart("workers", sum(w.count for w in plan.workers), statistics.mean(here), ""))
    bills = [msgspec.convert(e["bill"], Totals) for e in steps if e.get("bill")]
    usd = sum(sum(account.usd.values()) for bill in bills for account in bill.holders.values())
    if usd and plan.usd_per_h:
        planned = plan.usd_per_h / 3600 / plan.tok_per_s * 1e6
        out.append(CheckedPart("price per million tokens", planned, usd / tokens * 1e6, "$"))
    return out
