"""Advice on a planned run: from the events of its log, when the fleet, prices or lengths have changed."""

from __future__ import annotations

import math
import statistics
from dataclasses import replace
from typing import Any

from windfall.plan.model import cluster
from windfall.plan.model.cost_model import Efficiency
from windfall.plan.model.workload import MODELS, Workload
from windfall.plan.run import advice, recipe
from windfall.plan.search import planner
from windfall.plan.search.plan import PlanRequest
from windfall.recipe.file import parse_recipe
from windfall.recipe.sections import Recipe

WORK = Workload(shape=MODELS["Qwen3-8B"], groups=256, group_size=8, sigma=0.3, median_tokens=1500, staleness=1)


def planned(text: str, **keys: Any) -> Recipe:
    made = cluster.from_text(text)
    first, *others = made.machines
    made = replace(made, machines=(replace(first, address="10.0.0.5"), *others))
    asked = PlanRequest(cluster=made, work=WORK, efficiency=Efficiency(), **keys)
    base = parse_recipe({"model": {"path": "Qwen/Qwen3-8B"}, "run": {"steps": 100}, "rollout": {
        "groups": 256, "group_size": 8, "max_tokens": 8192, "staleness": 1}}, "test")  # fmt: skip
    return recipe.write(planner.plans(asked)[0], asked, base)


class Log:
    """The events of a run."""

    def __init__(self, made: Recipe) -> None:
        self.recipe = made
        self.events: list[dict[str, Any]] = []
        self.steps = self.joined = 0

    def advice(self) -> advice.PlanAdvice | None:
        return advice.better_plan(self.recipe, self.events, WORK)

    def join(self, device: str, lease: str, usd_per_h: float, count: int = 1) -> None:
        for _ in range(count):
            self.joined += 1
            joined = {"name": "worker_joined", "worker": f"w{self.joined}", "device": device, "lease": lease}
            self.events.append({"kind": "instant", **joined, "usd_per_h": usd_per_h})

    def join_as_planned(self, **price: float) -> None:
        for w in self.recipe.plan.workers:
            self.join(f"NVIDIA {w.device} 80GB HBM3", w.lease, price.get(w.lease, w.price_usd_per_h), w.count)

    def leave(self, first: int, last: int) -> None:
        for n in range(first, last + 1):
            self.events.append({"kind": "instant", "name": "worker_lost", "worker": f"w{n}"})

    def step(self, count: int = 1, scale: float = 1.0) -> None:
        planned = statistics.NormalDist(math.log(WORK.median_tokens), WORK.sigma)
        lengths = [round(scale * math.exp(planned.inv_cdf((n + 0.5) / 64))) for n in range(64)]
        for _ in range(count):
            self.steps += 1
            step = {"name": "step", "step": self.steps, "t": 100.0 * self.steps, "lengths": [lengths]}
            self.events.append({"kind": "scalar", **step})


def test_a_run_as_planned_is_left_alone() -> None:
    log = Log(planned("8xH100 + 4x2xH100:spot"))
    log.join_as_planned()
    assert log.advice() is None, "no step yet"
    log.step(5)
    assert log.advice() is None
    log.leave(1, log.joined)
    assert log.advice() is None, "the workers of the last step count, also when the run has ended"


def test_a_smaller_fleet_is_replanned() -> None:
    log = Log(planned("8xH100 + 4x2xH100:spot"))
    assert log.recipe.plan.trainer_gpus == 8
    log.join_as_planned()
    log.step(2)
    log.leave(1, 7)
    log.step(1)
    found = log.advice()
    assert found is not None
    assert found.gain > 0.1
    assert found.best.training.gpus < 8
    assert "8 -> 1 workers" in found.why
    assert found.best.tok_per_s > 1.1 * found.now.tok_per_s
    assert f"another plan would be {found.gain:.0%} better; the change pays for itself in" in str(found)


def test_longer_responses_move_gpus_from_training_to_rollout() -> None:
    log = Log(planned("16xH100"))
    log.join_as_planned()
    log.step(2)
    log.step(8, scale=3.0)
    found = log.advice()
    assert found is not None
    assert "mean response" in found.why
    assert found.best.training.gpus < found.now.training.gpus


def test_a_higher_price_is_replanned_if_cost_is_the_objective() -> None:
    made = planned("8xH100 + 4x2xH100:spot", objective="cost")
    assert {w.lease for w in made.plan.workers} == {"spot"}
    log = Log(made)
    log.join_as_planned()
    log.step(2)
    log.leave(1, log.joined)
    log.join_as_planned(spot=30.0)
    log.step(1)
    found = log.advice()
    assert found is not None
    assert "per hour" in found.why
    assert "spot" not in found.best.name
    assert found.best.usd_per_mtok < found.now.usd_per_mtok


def test_a_run_that_will_miss_its_deadline_has_no_gain_to_state() -> None:
    log = Log(planned("16xH100"))
    hours = 1.3 * log.recipe.run.steps * log.recipe.plan.step_s / 3600
    plan = log.recipe.plan.model_copy(update={"objective": "deadline", "deadline_h": hours})
    log.recipe = log.recipe.model_copy(update={"plan": plan})
    log.join("NVIDIA H100 80GB HBM3", "reserved", 7.36)
    log.step(1)
    found = log.advice()
    assert found is not None
    assert math.isinf(found.gain)
    assert "another plan would be possible, and this one is not" in str(found)


def test_workers_of_a_killed_controller_are_counted_once() -> None:
    log = Log(planned("8xH100 + 4x2xH100:spot"))
    log.join_as_planned()
    log.events.append({"kind": "instant", "name": "resumed"})
    log.join_as_planned()
    log.step(1)
    assert log.advice() is None
