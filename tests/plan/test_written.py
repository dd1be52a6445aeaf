"""From plans to recipes: what is written runs, what cannot run is refused, and a run is compared with its plan."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.fleets.fixed_plans import fixed_plan
from windfall.errors import WindfallError
from windfall.plan import choose, command
from windfall.plan.model import cluster
from windfall.plan.model.cost_model import Efficiency
from windfall.plan.model.workload import MODELS, Workload, delta_share
from windfall.plan.run import recipe, run_log
from windfall.plan.search import planner
from windfall.plan.search.plan import PlanRequest
from windfall.recipe.file import dump_recipe, load_recipe, parse_recipe
from windfall.recipe.section_base import part_sections
from windfall.recipe.sections import Recipe

WORK = Workload(shape=MODELS["Qwen3-8B"], groups=64, group_size=8, sigma=0.4)


def request(text: str, **keys: Any) -> PlanRequest:
    return PlanRequest(cluster=cluster.from_text(text), work=WORK, efficiency=Efficiency(), **keys)


def from_toml(*machines: dict[str, Any], **keys: Any) -> PlanRequest:
    made = cluster.parse({"machine": list(machines)}, "c.toml")
    return PlanRequest(cluster=made, work=WORK, efficiency=Efficiency(), **keys)


TRAINER = {"gpu": "H100", "count": 8, "address": "10.0.0.5"}


def test_written_recipe_loads_and_says_what_the_plan_says(tmp_path: Path) -> None:
    base = parse_recipe({"model": {"path": "tiny"}, "rollout": {"groups": 4, "group_size": 2}}, "test")
    work = replace(WORK, shape=recipe.model_shape("tiny"), max_tokens=160, median_tokens=40)
    asked = replace(request("4xL4"), work=work)
    best = planner.plans(asked)[0]
    path = tmp_path / "planned.toml"
    path.write_text(dump_recipe(recipe.write(best, asked, base)))
    loaded = load_recipe(path)
    assert loaded.train.ranks == best.training.gpus
    assert loaded.fleet.workers == sum(len(p.replicas) for p in best.placed)
    assert loaded.rollout.staleness == 1
    assert loaded.sim.trainer["train_s"] > 0


def test_recipe_of_a_model_name_trains_that_model_with_the_planned_sizes(tmp_path: Path) -> None:
    path = tmp_path / "planned.toml"
    command.main(
        "8B", cluster=None, gpus="8xH100", budget="", objective="throughput", deadline=0.0, staleness=2,
        spot=None, measured_in=None, top=1, simulate=False, write=path,
    )  # fmt: skip
    made, work = load_recipe(path), Workload(shape=MODELS["Qwen3-8B"])
    assert made.model.path == "Qwen/Qwen3-8B"
    assert made.run.steps == work.steps
    assert (made.rollout.groups, made.rollout.group_size, made.rollout.max_tokens, made.rollout.staleness) == (
        work.groups, work.group_size, work.max_tokens, 2,
    )  # fmt: skip
    assert recipe.recipe_workload(made) == replace(work, staleness=2, delta=delta_share(1e-6))
    assert made.train.lr == 1e-6
    notes = [line for line in path.read_text().splitlines() if line.startswith("#")]
    assert len(notes) == 2
    assert "your own task" in notes[0]


def test_plan_of_the_readme_can_be_written_and_keys_can_be_set(tmp_path: Path) -> None:
    """Its workers are on other machines, and no address is known: the run listens on all of its own."""
    path = tmp_path / "planned.toml"
    keys: dict[str, Any] = {
        "cluster": None, "budget": "", "objective": "throughput", "deadline": 0.0, "staleness": None,
        "spot": None, "measured_in": None, "top": 1, "simulate": False, "write": path,
    }  # fmt: skip
    command.main("8B", gpus="8xH100 + 6x2xH100:spot", **keys)
    assert load_recipe(path).fleet.host == "0.0.0.0"
    with pytest.raises(WindfallError, match=r"train\.optimizer"):
        command.main("8B", gpus="8xL4", **keys)
    command.main("8B", gpus="8xL40S", overrides=["train.offload=true", "rollout.max_tokens=1000"], **keys)
    assert load_recipe(path).train.offload
    assert load_recipe(path).rollout.max_tokens == 1000


def test_a_trainer_on_several_machines_needs_an_address() -> None:
    asked = request("2x8xH100")
    kind = next(iter(asked.cluster.kinds()))
    best = fixed_plan(asked, "H100", 9, {(kind, 1): 7})
    assert best is not None
    with pytest.raises(WindfallError, match="address"):
        recipe.write(best, asked, Recipe())
    machines = tuple(replace(m, address="10.0.0.5") for m in asked.cluster.machines)
    asked = replace(asked, cluster=replace(asked.cluster, machines=machines))
    best = fixed_plan(asked, "H100", 9, {(kind, 1): 7})
    assert best is not None
    assert recipe.write(best, asked, Recipe()).fleet.host == "10.0.0.5"
    joining = [line for line in recipe.commands(best) if "windfall trainer --join URL" in line]
    assert [f"--node-rank {n} --nproc-per-node {ranks} " in joining[n] for n, ranks in ((0, 8), (1, 1))] == [True, True]
    assert recipe.write(best, asked, Recipe()).train.ranks == 9


def test_workers_of_a_provider_follow_from_the_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sbatch").write_text("#!/bin/sh\n")
    (tmp_path / "sbatch").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    asked = from_toml(TRAINER, {"gpu": "L40S", "count": 4, "machines": 2, "lease": "spot", "provider": "slurm"})
    base = parse_recipe({"fleet": {"slurm": {"partition": "gpu", "gpus": "l40s:2"}}}, "test")
    plan = next(p for p in planner.plans(asked) if any(q.machine.provider and q.replicas for q in p.placed))
    slurm = recipe.write(plan, asked, base).fleet.slurm
    assert slurm is not None
    assert slurm.workers == sum(len(p.replicas) for p in plan.placed if p.machine.provider == "slurm")
    assert (slurm.kind, slurm.gpus, slurm.partition, slurm.price_usd_per_h) == ("spot", "l40s:1", "gpu", 1.56)
    assert not any("spot" in line for line in recipe.commands(plan))
    assert all(p.training == 0 for p in plan.placed if p.machine.provider)


def test_plans_without_their_provider_are_refused_before_they_are_shown() -> None:
    asked = from_toml(TRAINER, {"gpu": "L40S", "count": 8, "machines": 2, "lease": "spot", "provider": "kubernetes"})
    found = choose.best(asked, Recipe(), simulate=False)
    assert found.refused == ["machines of kubernetes: the recipe does not say how to start workers with kubernetes"]
    assert found.ranked
    assert not any(p.machine.provider for plan, _ in found.ranked for p in plan.placed)
    only = from_toml({"gpu": "H100", "count": 1}, {"gpu": "L40S", "machines": 4, "provider": "slurm"})
    base = parse_recipe({"fleet": {"slurm": {"partition": "gpu"}}}, "test")
    found = choose.best(only, base, simulate=False)
    assert "sbatch" in found.refused[0]
    assert [plan.name for plan, _ in found.ranked] == ["train 1 H100; roll out the trainer's own engine"]


def test_providers_are_those_of_recipes() -> None:
    assert tuple(part_sections("fleet.")) == cluster.PROVIDERS


def test_only_vllm_spans_several_gpus() -> None:
    large = replace(WORK, shape=MODELS["Qwen3-32B"])
    rows = (
        {"gpu": "H100", "count": 8, "machines": 3, "address": "10.0.0.5"},
        {"gpu": "A100-40GB", "count": 8, "price_usd_per_gpu_h": 2.0},
    )
    plain = replace(from_toml(*rows), work=large)
    assert all(e.tp == 1 for p in planner.plans(plain) for _, e, _, _ in p.replicas)
    both = replace(from_toml(rows[0], {**rows[1], "engine": "vllm"}), work=large)
    spanning = [p for p in planner.plans(replace(both, top=9)) if any(e.tp > 1 for _, e, _, _ in p.replicas)]
    assert spanning
    lines = list(recipe.commands(spanning[0]))
    assert any("--tensor-parallel" in line and "--engine vllm" in line for line in lines)


def test_vllm_must_be_installed_for_workers_of_the_trainers_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("windfall.engine.vllm.installed.find", lambda: None)
    asked = from_toml({**TRAINER, "engine": "vllm"})
    found = choose.best(asked, parse_recipe({"engine": {"name": "vllm"}}, "test"), simulate=False)
    assert all("need vLLM" in line for line in found.refused)
    assert found.refused
    assert not any(plan.replicas for plan, _ in found.ranked)


def test_lenders_generate_for_nothing_and_never_train() -> None:
    lender = {"gpu": "H100", "machines": 4, "lease": "borrowed", "lent": 0.25}
    asked = from_toml({"gpu": "H100", "count": 4, "address": "10.0.0.5"}, lender)
    best = planner.plans(asked)[0]
    used = [p for p in best.placed if p.machine.lease == "borrowed" and p.replicas]
    assert used
    assert all(p.training == 0 for p in best.placed if p.machine.lease == "borrowed")
    paid = sum((p.training + sum(p.replicas)) * p.machine.kind.usd_per_h for p in best.placed)
    assert best.usd_per_h == pytest.approx(paid)
    assert recipe.write(best, asked, Recipe()).fleet.borrowed_max == len(used)
    assert sum("windfall serve 8B --lend" in line for line in recipe.commands(best, "8B")) == len(used)
    whole = from_toml({"gpu": "H100", "count": 4}, {**lender, "lent": 1.0})
    assert planner.plans(whole)[0].tok_per_s > best.tok_per_s


@pytest.mark.parametrize(
    ("row", "what"),
    [
        ({"engine": "sglang"}, "unknown engine"),
        ({"provider": "nomad"}, "unknown provider"),
        ({"lent": 0.5}, "lent is 0.5"),
        ({"lease": "borrowed", "lent": 1.5}, "lent is 1.5"),
    ],
)
def test_bad_machines_are_refused(row: dict[str, Any], what: str) -> None:
    with pytest.raises(WindfallError, match=what):
        from_toml({"gpu": "H100", **row})


def log(step_s: float = 0.02) -> list[dict[str, Any]]:
    """A run with a CPU worker on its own machine and a slower spot worker."""
    events: list[dict[str, Any]] = [{"kind": "instant", "name": "start", "machine": "cpu", "rank_pids": "", "t": 0.0}]
    for n in range(1, 5):
        events.append({"kind": "span", "name": "train", "step": n, "s": 1.3, "update_s": 0.5})
        speeds = {
            "reserved cpu at $0.50/h": [[b, step_s + 0.001 * b, 5] for b in (2.0, 8.0, 32.0)],
            "spot cpu at $0.20/h": [[b, 2 * step_s + 0.003 * b, 5] for b in (2.0, 8.0, 32.0)],
        }
        lengths = [[90, 110, 100, 100] for _ in range(16)]
        events.append({"kind": "scalar", "name": "step", "step": n, "trained": 6400, "lengths": lengths, "s": 4.0,
                       "speeds": speeds, "prompt_tokens": 20.0, "workers": 2})  # fmt: skip
    return events


CPUS = (
    {"gpu": "cpu", "count": 2, "price_usd_per_gpu_h": 0.5, "address": "127.0.0.1"},
    {"gpu": "cpu", "lease": "spot", "price_usd_per_gpu_h": 0.2},
)


def cpu_request() -> PlanRequest:
    asked, seen = from_toml(*CPUS), run_log.speeds(log(), "log")
    tiny = replace(WORK, shape=recipe.model_shape("tiny"), groups=16, group_size=4, max_tokens=160)
    work = run_log.with_lengths(tiny, seen.lengths, seen.prompt_tokens)
    return replace(asked, work=work, cluster=run_log.with_speeds(asked.cluster, seen, work))


def test_measured_times_and_lengths_replace_the_cost_model() -> None:
    asked = cpu_request()
    assert asked.work.mean_tokens == pytest.approx(100, rel=1e-3)
    best = planner.plans(asked)[0]
    services = {kind.lease: engine.service for kind, engine, _, _ in best.replicas}
    assert services["reserved"].step_s(8) == pytest.approx(0.028)
    assert services["spot"].step_s(8) == pytest.approx(0.064)
    assert best.train_s == pytest.approx(0.5 + 6400 * (1.3 - 0.5) / 6400)


def test_a_cpu_without_measurements_cannot_be_planned() -> None:
    with pytest.raises(WindfallError, match="--measured RUN"):
        planner.plans(from_toml(*CPUS))


def test_a_run_is_compared_with_its_plan_part_by_part(tmp_path: Path) -> None:
    asked = cpu_request()
    base = parse_recipe({"rollout": {"groups": 16, "group_size": 4}, "run": {"threads": 1}}, "test")
    path = tmp_path / "recipe.toml"
    path.write_text(dump_recipe(recipe.write(planner.plans(asked)[0], asked, base)))
    planned = load_recipe(path)
    assert (planned.run.device, planned.fleet.workers, planned.train.ranks) == ("cpu", 1, 1)
    slower = log(step_s=0.03)
    found = {p.name: p for p in run_log.check(planned, slower, "log")}
    assert found["tokens per second"].measured == pytest.approx(1600)
    assert found["training, per million tokens"].error == pytest.approx(0.0)
    assert found["engine step, reserved cpu at $0.50/h, batch 32"].error == pytest.approx(0.052 / 0.062 - 1)
    assert found["engine step, spot cpu at $0.20/h, batch 32"].error == pytest.approx(0.136 / 0.156 - 1)
    assert found["mean response"].error == pytest.approx(0.0, abs=0.01)


def test_only_planned_runs_can_be_checked(tmp_path: Path) -> None:
    with pytest.raises(WindfallError, match="no such run"):
        command.check(tmp_path / "nowhere")
    (tmp_path / "recipe.toml").write_text(dump_recipe(Recipe()))
    with pytest.raises(WindfallError, match="was not planned"):
        command.check(tmp_path)
    with pytest.raises(WindfallError, match="no step"):
        run_log.speeds([], "log")
