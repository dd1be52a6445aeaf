"""The example of docs/guides/from-trl.md: the recipe trains with the reward functions of the TRL script beside it."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

from windfall.events.log import read
from windfall.recipe.env_sections import DatasetEnv
from windfall.recipe.file import load_recipe

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "recipes" / "from-trl"


@pytest.mark.slow
def test_the_recipe_runs(tmp_path: Path) -> None:
    fewer = {
        "run.folder": tmp_path, "run.steps": 1, "run.threads": 1, "rollout.groups": 2, "rollout.group_size": 4,
        "rollout.stop": '["#8"]', "eval.tasks": 3, "eval.pass_at": "[1, 2]",
    }  # fmt: skip
    command = [sys.executable, "-m", "windfall.run.cli", "train", "recipes/from-trl/recipe.toml"]
    for key, value in fewer.items():
        command += ["--set", f"{key}={value}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    events = read(tmp_path / "from-trl" / "events.jsonl")
    (step,) = [e for e in events if e["kind"] == "scalar" and e["name"] == "step"]
    assert set(step["rewards"]) == {"accuracy", "shows_work"}
    assert step["missing"] == step["grader_errors"] == 0
    assert step["grader_processes"] >= 1
    before, after = [e for e in events if e["kind"] == "scalar" and e["name"] == "eval"]
    assert before["on"] == after["on"] == "3 of 48 rows of test.jsonl"
    assert (before["tasks"], before["graded"], before["responses"]) == (3, 6, 6)
    assert 0 <= before["pass_at"]["1"] <= before["pass_at"]["2"] <= 1
    assert f"pass@2 {before['pass_at']['2']:.3f}" in done.stdout
    assert f"accuracy {step['rewards']['accuracy']:.3f}, shows_work" in done.stdout
    kept = load_recipe(tmp_path / "from-trl" / "recipe.toml")  # can be resumed from any folder
    assert isinstance(kept.env, DatasetEnv)
    assert kept.env.rewards[0] == f"{EXAMPLE / 'rewards.py'}:accuracy"
    assert kept.eval.path == EXAMPLE / "test.jsonl"


def test_the_script_and_the_recipe_say_the_same() -> None:
    tree = ast.parse((EXAMPLE / "train_trl.py").read_text())
    calls = {n.func.id: n for n in ast.walk(tree) if isinstance(n, ast.Call) and isinstance(n.func, ast.Name)}
    given = {k.arg: k.value for k in calls["GRPOConfig"].keywords}
    script = {str(name): value.value for name, value in given.items() if isinstance(value, ast.Constant)}
    weights = ast.literal_eval(given["reward_weights"])
    functions = [ast.unparse(f) for k in calls["GRPOTrainer"].keywords if k.arg == "reward_funcs" for f in k.value.elts]  # type: ignore[attr-defined]
    recipe = load_recipe(EXAMPLE / "recipe.toml")
    assert isinstance(recipe.env, DatasetEnv)
    assert [reward.rpartition(":")[2] for reward in recipe.env.rewards] == functions
    assert recipe.env.reward_weights == weights
    o, t = recipe.rollout, recipe.train
    assert (script["max_steps"], script["num_generations"]) == (recipe.run.steps, o.group_size)
    assert script["per_device_train_batch_size"] == o.groups * o.group_size
    assert (script["max_completion_length"], script["temperature"]) == (o.max_tokens, o.temperature)
    assert (script["learning_rate"], script["lr_scheduler_type"]) == (t.lr, t.schedule)
    assert (script["beta"], script["loss_type"]) == (recipe.algorithm.kl, recipe.algorithm.name)
    assert script["num_generations_eval"] == recipe.eval.samples
    assert script["eval_steps"] == recipe.eval.every
    assert os.path.exists(ROOT / recipe.env.path)
