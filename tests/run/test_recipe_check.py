"""What is refused before any process starts."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

import pytest

from windfall.engine.vllm import installed
from windfall.errors import WindfallError
from windfall.recipe.file import parse_recipe
from windfall.run import recipe_check


def test_trace_without_machines_is_refused(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("0,add,a\n")
    recipe = parse_recipe({"trace": {"file": str(tmp_path / "t.csv")}}, where="here")
    with pytest.raises(WindfallError, match=r"trace\.nodes"):
        recipe_check.check(recipe)


@pytest.mark.skipif(installed.find() is not None, reason="vLLM is installed")
@pytest.mark.parametrize("workers", [{"fleet": {"workers": 1}}, {"trace": {"nodes": 2}}])
def test_local_workers_without_the_chosen_engine_are_refused(workers: dict[str, dict[str, int]]) -> None:
    engine = {"engine": {"name": "vllm"}}
    with pytest.raises(WindfallError, match=r"engine.name: vLLM is not installed"):
        recipe_check.check(parse_recipe({**engine, **workers}, where="here"))
    note = "vLLM is not installed on this machine: workers elsewhere must have it; environment Arithmetic: built task"
    assert recipe_check.check(parse_recipe(engine, where="here")).startswith(note)


def test_responses_as_long_as_the_context_are_refused() -> None:
    slots = {"base": {"frozen": True}, "t": {"slot": "train", "lora": {"rank": 4}}}
    for max_tokens, policies, is_refused in ((511, {}, False), (512, {}, True), (512, slots, False)):
        recipe = parse_recipe({"rollout": {"max_tokens": max_tokens}, "policies": policies}, where="here")
        with pytest.raises(WindfallError, match="context of 512") if is_refused else contextlib.nullcontext():
            recipe_check.check(recipe)


def test_adapter_on_an_adapter_is_refused(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 4, "lora_alpha": 8}))
    with pytest.raises(WindfallError, match="this model is an adapter itself"):
        recipe_check.check(parse_recipe({"train": {"lora": {}}, "model": {"path": str(tmp_path)}}, where="here"))
