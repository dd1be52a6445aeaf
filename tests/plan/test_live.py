"""Advice during a run: from events of its log, when the fleet, prices or lengths change, and not before."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from windfall import recipe as config
from windfall.plan.model import cluster
from windfall.plan.model.cost_model import Efficiency
from windfall.plan.model.workload import MODELS, Workload
from windfall.plan.run import live, recipe
from windfall.plan.search import planner
from windfall.plan.search.request import Request
from windfall.recipe import Recipe

WORK = Workload(shape=MODELS["Qwen3-8B"], groups=256, group_size=8, sigma=0.3, median_tokens=1500, staleness=1)


def planned(text: str, **keys: Any) -> Recipe:
    made = cluster.from_text(text)
    first, *others = made.machines
    made = replace(made, machines=(replace(first, address="10.0.0.5"), *others))
    asked = Request(cluster=made, work=WORK, efficiency=Efficiency(), **keys)
    base = config.parse({"model": {"path": "Qwen/Qwen3-8B"}, "run": {"steps": 100}, "rollout": {
        "groups": 256, "group_size": 8, "max_tokens": 8192, "staleness": 1}}, "test")  # fmt: skip
    return recipe.write(planner.plans(asked)[0], asked, base)


class Run:
    """The events of a run, fed to an observer. Searches happen at once."""

    def __init__(self, made: Recipe) -> None:
        self.recipe, self.logged, self.searches, self.steps = made, list[dict[str, Any]](), 0, 0
        self.observer = live.Observer(made, self._instant, work=WORK, submit=self._submit)
        self.joined = 0

    def _instant(self, name: str, **fields: Any) -> None:
        self.logged.append({"name": name, **fields})

    def _submit(self, search: Any, done: Any) -> None:
        self.searches += 1
        done(search())
        self.observer._not_before_s = 0.0  # no pause between two searches

    def join(self, device: str, lease: str, usd_per_h: float, count: int = 1) -> None:
        for _ in range(count):
            self.joined += 1
            self.observer({"name": "worker_joined", "worker": f"w{self.joined}", "device": device, "lease": lease,
                           "usd_per_h": usd_per_h})  # fmt: skip

    def join_as_planned(self, **price: float) -> None:
        for w in self.recipe.plan.workers:
            self.join(f"NVIDIA {w.device} 80GB HBM3", w.lease, price.get(w.lease, w.price_usd_per_h), w.count)

    def leave(self, first: int, last: int) -> None:
        for n in range(first, last + 1):
            self.observer({"name": "worker_lost", "worker": f"w{n}"})

    def step(self, count: int = 1, scale: float = 1.0) -> None:
        lengths = [round(scale * n) for n in live.planned_conditions(self.recipe).lengths]
        for _ in range(count):
            self.steps += 1
            self.observer({"name": "step", "step": self.steps, "t": 100.0 * self.steps, "lengths": [lengths]})


def test_a_run_as_planned_is_left_alone() -> None:
    run = Run(planned("8xH100 + 4x2xH100:spot"))
    run.join_as_planned()
    run.step(5)
    assert (run.logged, run.searches) == ([], 0)


def test_a_smaller_fleet_is_replanned_once_and_not_at_once() -> None:
    run = Run(planned("8xH100 + 4x2xH100:spot"))
    trained = run.recipe.plan.trainer_gpus
    run.join_as_planned()
    run.step(2)
    spot = [n for w in run.recipe.plan.workers if w.lease == "spot" for n in range(w.count)]
    assert trained == 8
    assert len(spot) == 8
    run.leave(1, len(spot) - 1)
    run.step(2)
    assert run.logged == []
    run.step(1)
    assert [e["name"] for e in run.logged] == ["replan"]
    advice = run.logged[0]
    assert advice["gain"] > 0.1
    assert "train 8" not in advice["plan"]
    assert "8 -> 1 workers" in advice["why"]
    assert advice["tok_per_s_best"] > 1.1 * advice["tok_per_s_now"]
    run.step(6)
    assert len(run.logged) == 1


def test_longer_responses_move_gpus_from_training_to_rollout() -> None:
    run = Run(planned("16xH100"))
    run.join_as_planned()
    run.step(2)
    run.step(8, scale=3.0)
    assert [e["name"] for e in run.logged] == ["replan"]
    assert "mean response" in run.logged[0]["why"]
    now, best = (int(run.logged[0][key].split()[1]) for key in ("now", "plan"))
    assert best < now


def test_a_higher_price_is_replanned_if_cost_is_the_objective() -> None:
    made = planned("8xH100 + 4x2xH100:spot", objective="cost")
    assert {w.lease for w in made.plan.workers} == {"spot"}
    run = Run(made)
    run.join_as_planned()
    run.step(2)
    run.leave(1, run.joined)
    run.join_as_planned(spot=30.0)
    run.step(4)
    assert [e["name"] for e in run.logged] == ["replan"]
    assert "per hour" in run.logged[0]["why"]
    assert "spot" not in run.logged[0]["plan"]
    assert run.logged[0]["usd_per_mtok_best"] < run.logged[0]["usd_per_mtok_now"]


def test_a_fleet_that_flaps_gets_no_advice() -> None:
    run = Run(planned("8xH100 + 4x2xH100:spot"))
    run.join_as_planned()
    for _ in range(4):
        first = run.joined - 6
        run.leave(first, run.joined)
        run.step(1)
        run.join("NVIDIA H100 80GB HBM3", "spot", 2.63, 7)
        run.step(1)
    assert run.logged == []
    assert run.searches >= 4


def test_recipes_without_a_plan_are_not_observed() -> None:
    class Events:
        def attach(self, sink: object) -> None:
            raise AssertionError(sink)

    live.attach(Recipe(), Events())  # type: ignore[arg-type]
