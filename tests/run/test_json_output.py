"""`--json`: one JSON document on stdout and nothing else, with the figures that people see."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.run.views.test_top import snapshot
from windfall.models import load
from windfall.recipe.reference import MAIN

Windfall = Callable[..., tuple[int, str, str]]


def refuse(value: str) -> None:
    raise AssertionError(f"{value} is not JSON")


def document(windfall: Windfall, *args: str) -> Any:
    code, out, _ = windfall(*args, "--json")
    assert code == 0
    return json.loads(out, parse_constant=refuse)


def test_recipe(windfall: Windfall) -> None:
    main = document(windfall, "recipe")
    assert [f"{key['section'].strip('[]')}.{key['name']}" for key in main] == list(MAIN)
    assert all(key["meaning"] for key in main)
    section = document(windfall, "recipe", "rollout")
    assert {key["section"] for key in section} == {"[rollout]"}
    assert len(document(windfall, "recipe", "--all")) > len(section) + len(main)


def test_top(windfall: Windfall, here: Path) -> None:
    (here / "run").mkdir()
    (here / "small.toml").rename("run/recipe.toml")
    code, out, err = windfall("top", "run", "--json")
    assert (code, out, "no fleet.json yet" in err) == (2, "", True)
    fleet = snapshot()
    Path("run/fleet.json").write_text(json.dumps(fleet))
    assert document(windfall, "top", "run") == {"live": False, **fleet}


def test_generate(windfall: Windfall) -> None:
    rows = document(
        windfall, "generate", "tiny", "--prompt", "1+1=", "--prompt", "2+2=", "--n", "2", "--max-tokens", "9"
    )
    assert [row["prompt"] for row in rows] == ["1+1=", "1+1=", "2+2=", "2+2="]
    assert all(0 < row["tokens"] <= 9 and row["response"] for row in rows)
    assert len(document(windfall, "generate", "tiny", "--prompt", "1+1=", "--max-tokens", "4")) == 1


def test_generate_renders_prompts_as_the_run_of_a_checkpoint_does(windfall: Windfall, here: Path) -> None:
    shutil.copytree(load.resolve("tiny"), here / "run" / "checkpoints" / "step-000001")
    (here / "run" / "recipe.toml").write_text("[chat]\ntemplate = '{{ messages[0].content }}+1='\n")
    args = ("--prompt", "12", "--temperature", "0", "--max-tokens", "9")
    (row,) = document(windfall, "generate", "run/checkpoints/step-000001", *args)
    assert row["response"].startswith("12+1=")
    (row,) = document(windfall, "generate", "tiny", *args)
    assert not row["response"].startswith("12+1=")


def test_eval_has_the_figures_that_it_prints(windfall: Windfall) -> None:
    args = ("eval", "tiny", "--recipe", "small.toml", "--tasks", "6", "--show", "1", "--set", "eval.pass_at=[1]")
    found = document(windfall, *args)
    _, printed, _ = windfall(*args)
    figures = found["roles"][""]
    assert f"reward {figures['reward']:.3f} ± {figures['error']:.3f}" in printed
    assert f"pass@1 {figures['pass_at']['1']:.3f}" in printed
    assert (found["tasks"], figures["responses"], figures["graded"]) == (6, 6, 6)


def test_plan(windfall: Windfall) -> None:
    args = ("plan", "8B", "--gpus", "4xH100 + 2xL40S:spot", "--no-simulate")
    found = document(windfall, *args, "--write", "planned.toml")
    assert Path("planned.toml").is_file()
    _, printed, _ = windfall(*args)
    best = found["plans"][0]
    assert f"1. {best['name']}" in printed
    assert f"bottleneck  {best['bottleneck']}: {best['why']}" in printed
    assert re.search(rf"predicted +{best['predicted_tok_per_s']:,.0f} tok/s", printed)
    assert {machine["gpu"] for machine in best["machines"]} <= {"H100", "L40S spot"}
    assert isinstance(found["commands"], list)
