"""Models with images or sound are refused by name, before anything starts."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants
from typer.testing import CliRunner

from tests.support.hostile.models import edited
from windfall.errors import WindfallError
from windfall.models import load, multimodal
from windfall.recipe.file import parse_recipe
from windfall.run import recipe_check
from windfall.run.cli import app

VISION = {"vision_config": {"hidden_size": 32}}
REFUSED: list[tuple[dict[str, Any], str]] = [  # as the models' authors publish them
    ({"model_type": "qwen2_vl", **VISION}, "family qwen2"),
    ({"model_type": "qwen2_5_vl", **VISION}, "family qwen2"),
    ({"model_type": "qwen3_vl", **VISION, "text_config": {"model_type": "qwen3_vl_text"}}, "family qwen3"),
    ({"model_type": "qwen3_vl_moe", **VISION, "text_config": {"model_type": "qwen3_vl_moe_text"}}, "family qwen3"),
    ({"model_type": "qwen3_5", **VISION, "text_config": {"model_type": "qwen3_5_text"}}, "family qwen3"),
    ({"model_type": "qwen2_5_omni", "thinker_config": {"model_type": "qwen2_5_omni_thinker"}}, "family qwen2"),
    ({"model_type": "llava", **VISION, "text_config": {"model_type": "llama"}}, "family llama"),
    ({"model_type": "llava", **VISION, "text_config": {"model_type": "mistral"}}, "family mistral"),  # Pixtral
    ({"model_type": "llava_qwen", "mm_vision_tower": "google/siglip-so400m-patch14-384"}, "family qwen3"),
    ({"model_type": "gemma3", **VISION, "text_config": {"model_type": "gemma3_text"}}, "family gemma3_text"),
    ({"model_type": "gemma4", "vision_config": None, "text_config": {}}, "family gemma3_text"),
    ({"model_type": "mllama", **VISION, "text_config": {"model_type": "mllama_text_model"}}, "family llama"),
    ({"model_type": "mistral3", **VISION, "text_config": {"model_type": "mistral"}}, "family mistral"),
    ({"model_type": "internvl", **VISION, "text_config": {"model_type": "qwen2"}}, "family qwen2"),
    ({"model_type": "internvl_chat", **VISION, "llm_config": {"model_type": "internlm2"}}, "docs/models.md"),
    ({"model_type": "phi3_v", "img_processor": {"name": "clip_vision_model"}}, "family phi3"),
    ({"model_type": "qwen2_audio", "audio_config": {"d_model": 32}}, "family qwen2"),
]
NAMES = [f"{config['model_type']} {fix}" for config, fix in REFUSED]


def folder(path: Path, config: dict[str, Any]) -> Path:
    path.mkdir()
    (path / "config.json").write_text(json.dumps(config))
    return path


@pytest.mark.parametrize(("config", "fix"), REFUSED, ids=NAMES)
def test_model_that_reads_more_than_text_is_refused_with_a_text_model(
    tmp_path: Path, config: dict[str, Any], fix: str
) -> None:
    path = folder(tmp_path / "model", config)
    with pytest.raises(WindfallError) as caught:
        recipe_check.check_model(parse_recipe({"model": {"path": str(path)}}, where="here"))
    what, _, line = str(caught.value).partition("\n")
    assert re.fullmatch(rf"model\.path = \S+: {config['model_type']} reads (images|sound|images and sound) .*", what)
    assert fix in line
    with pytest.raises(WindfallError, match=r"trains text models only"):  # the trainer, for what is downloaded later
        load.load(str(path), dtype="float32", device="cpu")


def test_train_and_plan_say_so_before_they_start(tmp_path: Path) -> None:
    path, recipe = folder(tmp_path / "vl", REFUSED[1][0]), tmp_path / "r.toml"
    recipe.write_text(f'[model]\npath = "{path}"\n')
    for command in (["train", str(recipe), "--set", f"run.folder={tmp_path / 'runs'}"], ["plan", str(recipe)]):
        result = CliRunner().invoke(app, command)
        assert result.exit_code != 0
        said = f"{result.output}{result.exception}"
        assert "qwen2_5_vl reads images beside text" in said
    assert not (tmp_path / "runs").exists()


def test_model_in_the_cache_of_the_hub_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    revision = tmp_path / "models--Qwen--Some-VL" / "snapshots" / "abc"
    revision.parent.mkdir(parents=True)
    folder(revision, REFUSED[0][0])
    (tmp_path / "models--Qwen--Some-VL" / "refs").mkdir()
    (tmp_path / "models--Qwen--Some-VL" / "refs" / "main").write_text("abc")
    with pytest.raises(WindfallError, match=r"model.path = Qwen/Some-VL: qwen2_vl reads images"):
        load.check_kind("Qwen/Some-VL")


def test_text_models_pass(tmp_path: Path) -> None:
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    shape = {"vocab_size": 512, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 8}
    small = Gemma3TextConfig(**shape, num_attention_heads=4, num_key_value_heads=2)  # type: ignore[arg-type]
    gemma = tmp_path / "gemma"
    Gemma3ForCausalLM(small).save_pretrained(gemma)
    for path in (str(gemma), "tiny", str(edited(tmp_path / "m", lambda _: None))):
        load.check_kind(path)
    assert load.load(str(gemma), dtype="float32", device="cpu").config.model_type == "gemma3_text"


def test_advised_families_are_those_that_windfall_trains() -> None:
    table = (Path(__file__).parents[2] / "docs" / "models.md").read_text()
    for family, _ in multimodal.TEXT_MODELS.values():
        row = next(line for line in table.splitlines() if line.startswith(f"| {family} |"))
        engine, trainer = row.split("|")[2:4]
        assert "refused" not in engine + trainer, row
