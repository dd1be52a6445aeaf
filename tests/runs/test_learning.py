"""The demo learns: its reward on held-out tasks rises by at least 0.3, whatever the seed, on workers that die and come
back, and as far as on a worker that stays. It takes minutes, so it is marked slow."""

from __future__ import annotations

from pathlib import Path

import pytest

from windfall.events.log import read
from windfall.recipe.file import load_recipe
from windfall.run.start import new_folder, train

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_demo_reward_rises_by_a_third_of_the_range(tmp_path: Path, seed: int) -> None:
    rewards, lost = learn(tmp_path, f"run.seed={seed}")
    assert rewards[-1] - rewards[0] >= 0.3
    assert lost > 0
    undisturbed, lost = learn(tmp_path, f"run.seed={seed}", "run.name=alone", "trace.nodes=0", "fleet.local=true")
    assert lost == 0
    assert undisturbed[0] == rewards[0]
    assert abs(undisturbed[-1] - rewards[-1]) <= 0.12  # a few standard errors of 256 tasks, and of two runs


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_demo_learns_with_adapters(tmp_path: Path) -> None:
    rewards, lost = learn(tmp_path, "train.lora.rank=16", "train.lr=2e-3")
    assert rewards[-1] - rewards[0] >= 0.25
    assert lost > 0


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_frozen_lake_is_learned(tmp_path: Path) -> None:
    pytest.importorskip("gymnasium", reason="FrozenLake needs the extra gymnasium")
    rewards, _ = learn(tmp_path, name="frozen-lake")
    assert rewards[0] < 0.1
    assert rewards[-1] > 0.75, "the best path that is the same for every map gets about 0.64"


def learn(folder: Path, *changes: str, name: str = "demo") -> tuple[list[float], int]:
    """Rewards on held-out tasks, and number of lost workers."""
    recipe = load_recipe(ROOT / "recipes" / f"{name}.toml", [f"run.folder={folder}", *changes])
    run = new_folder(recipe)
    train(recipe, run)
    log = read(run / "events.jsonl")
    evals = [e["reward"] for e in log if e["kind"] == "scalar" and e["name"] == "eval"]
    return evals, sum(e["name"] == "worker_lost" for e in log)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_autoscaling_starts_workers_that_pay(tmp_path: Path) -> None:
    """The trainer costs 40 times as much as a worker, and one slow worker runs: more workers pay and are started."""
    changes = ["trace.nodes=0", "fleet.workers=1", "fleet.workers_max=3", "fleet.price_usd_per_h=0.5", "run.steps=14",
               "fleet.trainer_price_usd_per_h=20.0", "eval.tasks=0", "rollout.groups=8"]  # fmt: skip
    recipe = load_recipe(ROOT / "recipes" / "demo.toml", [f"run.folder={tmp_path}", *changes])
    run = new_folder(recipe)
    train(recipe, run)
    log = read(run / "events.jsonl")
    assert any(e["name"] == "advice" and e["count"] > e["now"] for e in log)
    assert len({e["worker"] for e in log if e["name"] == "worker_joined"}) > 1
