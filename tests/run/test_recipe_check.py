"""What is refused before any process starts."""

from __future__ import annotations

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
    recipe_check.check(parse_recipe(engine, where="here"))  # workers of other machines may have it


def test_response_longer_than_the_context_is_refused_before_anything_starts() -> None:
    recipe = parse_recipe({"rollout": {"max_tokens": 100000}}, where="here")
    with pytest.raises(
        WindfallError, match=r"prompts of \d+ tokens and rollout.max_tokens = 100000 exceed the model's"
    ):
        recipe_check.check(recipe)


def test_long_first_prompt_alone_is_not_refused(tmp_path: Path) -> None:
    data = tmp_path / "rows.jsonl"
    rows = [{"prompt": n * "1", "answer": "1"} for n in range(300, 340, 10)]
    env = {"name": "dataset", "path": str(data), "rewards": ["exact"]}
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(WindfallError, match=r"exceed the model's context of 512"):
        recipe_check.check(parse_recipe({"env": env, "rollout": {"max_tokens": 300}}, where="here"))
    for short in (0, 3):  # whichever of them is task 0
        mixed = [{"prompt": "1", "answer": "1"} if n == short else row for n, row in enumerate(rows)]
        data.write_text("".join(json.dumps(row) + "\n" for row in mixed))
        recipe_check.check(parse_recipe({"env": env, "rollout": {"max_tokens": 300}}, where="here"))


def test_messages_without_a_chat_template_are_refused_before_anything_starts(tmp_path: Path) -> None:
    data = tmp_path / "rows.jsonl"
    data.write_text('{"prompt": [{"role": "user", "content": "1+1="}], "answer": "2"}\n')
    env = {"name": "dataset", "path": str(data), "rewards": ["exact"]}
    with pytest.raises(WindfallError, match="the model's tokenizer has no chat template"):
        recipe_check.check(parse_recipe({"env": env}, where="here"))


def test_adapters_that_cannot_fit_are_refused_before_anything_starts(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 4, "lora_alpha": 8}))
    for lora, model, expected in (
        ({"targets": ["q_prj"]}, "tiny", "no layer named 'q_prj' in this model\nDid you mean 'q_proj'?"),
        ({"path": str(tmp_path / "no")}, "tiny", "this folder has no adapter_config.json"),
        ({"path": str(tmp_path), "rank": 8}, "tiny", "train.lora.rank is 8, but this adapter has rank 4"),
        ({}, str(tmp_path), "this model is an adapter itself"),
    ):
        with pytest.raises(WindfallError) as e:
            recipe_check.check(parse_recipe({"train": {"lora": lora}, "model": {"path": model}}, where="here"))
        assert expected in str(e.value)
    recipe_check.check(parse_recipe({"train": {"lora": {"targets": ["q_proj", "mlp.up_proj"]}}}, where="here"))
