"""A planned recipe, run for real on the CPUs of this machine: measured, planned, trained, checked, advised."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.fleet import plan_cpu as cpu
from windfall.plan.model import cluster
from windfall.plan.model.cost_model import Efficiency
from windfall.plan.model.inputs import recipe_workload
from windfall.plan.run import advice, recipe, run_log
from windfall.plan.search import planner
from windfall.plan.search.plan import PlanRequest
from windfall.recipe.file import dump_recipe, parse_recipe

pytestmark = [pytest.mark.slow, pytest.mark.timeout(420)]
Windfall = Callable[..., tuple[int, str, str]]
SIZES = {"groups": 4, "group_size": 4, "max_tokens": 60, "staleness": 1}


def test_a_plan_is_run_checked_and_advised(windfall: Windfall, here: Path) -> None:
    (here / "probe.toml").write_text(cpu.probe_recipe(here, steps=10, **SIZES))
    (here / "cluster.toml").write_text(cpu.CLUSTER)
    cpu.train(here / "probe.toml", here / "runs" / "probe", [cpu.SPOT], 1.0, here / "out")
    code, out, err = windfall(
        "plan", "probe.toml", "--cluster", "cluster.toml", "--measured", "runs/probe", "--write", "planned.toml"
    )
    assert (code, err) == (0, ""), out
    assert "as measured" in out
    commands = re.findall(r"then on m1: (windfall worker .*)", out)  # none if the slower worker is not worth it

    planned = (here / "planned.toml").read_text().replace('name = "probe"', 'name = "planned"', 1)
    (here / "planned.toml").write_text(planned)
    cpu.train(here / "planned.toml", here / "runs" / "planned", commands, 1.0, here / "out")
    code, out, err = windfall("plan", "--check", "runs/planned")
    assert (code, err) == (0, ""), out
    parts = ("tokens per second", "training, per million", "reserved cpu at $0.50/h", "price per million")
    for part in (*parts, run_log.OWN_TIMES):
        assert part in out
    # How close they are is measured by benchmarks/fleet/plan_cpu.py: other work on this machine may change by more.
    figures = re.search(r"tokens per second +([\d.]+) +([\d.]+)", out)
    assert figures, out
    assert min(map(float, figures.groups())) > 0


def test_a_run_is_advised_when_its_spot_worker_is_too_dear(here: Path) -> None:
    """The plan has both workers, and the spot worker joins at a hundred times its price."""
    base = parse_recipe(tomllib.loads(cpu.probe_recipe(here, name="dear", steps=24, **SIZES)), "test")
    rows = {"worker": {"fixed_s": 0.02, "each_s": 0.001}, "trainer": {"train_s": 0.002, "update_s": 0.1}}
    data = tomllib.loads(cpu.CLUSTER)
    device = {"memory_gb": 16, "bandwidth_gb_per_s": 20, "tflops": 0.1, "link_gb_per_s": 1}
    made = cluster.parse({**data, "device": [{"name": "cpu", **device, **rows}]}, "cluster.toml")
    asked = PlanRequest(cluster=made, work=recipe_workload(base), efficiency=Efficiency(), objective="cost")
    own, spot = made.kinds()
    plan = planner.fixed(asked, "cpu", 1, {(own, 1): 1, (spot, 1): 1})
    assert plan is not None
    (here / "dear.toml").write_text(dump_recipe(recipe.write(plan, asked, base)))
    dear = cpu.SPOT.replace("--price 0.2", "--price 20")
    cpu.train(here / "dear.toml", here / "runs" / "dear", [dear], 1.0, here / "out")
    found = advice.better_plan(*run_log.planned_run(here / "runs/dear"))
    assert found is not None
    assert "spot" not in found.best.name
    assert found.gain > 1
