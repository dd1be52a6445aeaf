"""Plans of recipes with several policies."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from windfall.plan import choose, command, report
from windfall.plan.model import cluster, cost_model, devices
from windfall.plan.model.cost_model import Efficiency
from windfall.plan.model.workload import AddedWorkload
from windfall.plan.run import recipe
from windfall.plan.search.plan import PlanRequest
from windfall.recipe.file import dump_recipe, load_recipe, parse_recipe
from windfall.recipe.sections import Recipe

LORA = {"lora": {"rank": 16}}
SCRIPT = [["solver", 1.0], ["verifier", 1.0], ["solver:again", 0.5], ["verifier", 0.5]]


def two(solver: dict[str, Any], verifier: dict[str, Any], **more: Any) -> Recipe:
    sim = {"median_tokens": 1000.0, "sigma": 0.0, "prompt_tokens": 100, "script": SCRIPT}
    policies = {"solver": solver, "verifier": verifier, **more}
    model = {"path": "Qwen/Qwen3-8B"}
    rollout = {"groups": 4, "group_size": 4, "max_tokens": 2000, "staleness": 1}
    return parse_recipe({"model": model, "rollout": rollout, "policies": policies, "sim": sim}, "two")


def test_tokens_of_policies_are_added_up() -> None:
    work = recipe.run_workload(two(LORA, LORA))
    assert isinstance(work, AddedWorkload)
    assert work.mean_tokens == pytest.approx(1.5 * 1000 + 1.25 * 1000), "a role follows only if those before it did"
    assert work.prompt_tokens == round(2.75 * 100)
    assert work.mean_context == 600, "of one conversation"


def test_adapters_share_a_base_and_full_models_do_not() -> None:
    shared, apart = recipe.run_workload(two(LORA, LORA)), recipe.run_workload(two({}, {}))
    one = recipe.recipe_workload(two(LORA, LORA).of("solver"))
    assert shared.update_bytes == 2 * one.update_bytes
    assert shared.weights_bytes == one.weights_bytes + shared.update_bytes, (
        "adapters are beside each other in an engine"
    )
    h200 = devices.find("H200")
    with pytest.raises(cost_model.DoesNotFit, match="3 H200 cannot be divided equally among 2 trainers"):
        cost_model.fsdp(apart, h200, 3, 8, 50e9, Efficiency())
    trained = cost_model.fsdp(apart, h200, 4, 8, 50e9, Efficiency())
    assert (trained.gpus, trained.layout) == (4, "2 trainers, fsdp 2 each")
    assert cost_model.fsdp(shared, h200, 2, 8, 50e9, Efficiency()).memory_bytes < trained.memory_bytes


def test_policy_that_is_not_trained_costs_no_training() -> None:
    both, frozen = recipe.run_workload(two(LORA, LORA)), recipe.run_workload(two(LORA, {"frozen": True}))
    assert frozen.tokens == both.tokens
    assert frozen.trained_tokens / both.trained_tokens == pytest.approx(1.5 / 2.75)
    alone = recipe.run_workload(two({}, {"frozen": True}))
    assert cost_model.fsdp(alone, devices.find("H200"), 2, 8, 50e9, Efficiency()).layout == "fsdp 2"


@pytest.mark.parametrize("own", [LORA, {}], ids=["adapters", "full"])
def test_plan_is_simulated_shown_by_base_and_written(own: dict[str, Any], tmp_path: Path) -> None:
    base = two(own, own)
    request = PlanRequest(
        cluster=cluster.from_text("4xH200" if own else "6xH200"),
        work=recipe.run_workload(base),
        efficiency=Efficiency(),
        top=1,
    )
    found = choose.best(request, base, simulate=True)
    plan, figures = found.ranked[0]
    assert plan.own is None, "trainers of several policies do not generate"
    assert figures is not None
    assert 0.3 < figures.tok_per_s / plan.tok_per_s < 2, "engines of a full model idle while only the other one speaks"
    lines = [line for line in report.report("8B", request, found) if line.startswith("base ")]
    assert len(lines) == (1 if own else 2)
    file = tmp_path / "planned.toml"
    file.write_text(dump_recipe(recipe.write(plan, request, base, figures)))
    written = load_recipe(file)
    assert written.train.ranks * len(written.bases()) == plan.training.gpus
    assert set(written.sim.policies) == {"solver", "verifier"}


def test_command_plans_policies(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "two.toml"
    file.write_text(dump_recipe(two(LORA, LORA)))
    command.main(
        str(file), cluster=None, gpus="2xH200", budget="", objective="throughput", deadline=0.0, staleness=None,
        spot=None, measured_in=None, top=1, simulate=False, write=None,
    )  # fmt: skip
    assert (
        "base solver: solver and verifier; 16.4 GB in every engine, and 0.17 GB of adapters" in capsys.readouterr().out
    )
