"""Loading a model: every weight comes from its files, or the folder is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from huggingface_hub import constants, errors

from tests.support.hostile.models import edited
from windfall.errors import WindfallError
from windfall.models import load as models
from windfall.run.commands import offline
from windfall.types import Sampling

UP = "model.layers.0.mlp.up_proj.weight"


def load(folder: Path) -> torch.nn.Module:
    return models.load(str(folder), dtype="float32", device="cpu")


@pytest.fixture
def no_hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The hub is turned off, and its cache is empty."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))


@pytest.mark.usefixtures("no_hub")
@pytest.mark.parametrize("part", [models.load_tokenizer, lambda name: models.load(name, dtype="float32", device="cpu")])
def test_model_of_the_hub_without_a_network_is_refused_with_a_way_out(part: Callable[[str], object]) -> None:
    with pytest.raises(WindfallError) as caught:
        part("nobody/nothing")
    said = str(caught.value)
    assert (
        "nobody/nothing: the Hugging Face hub is turned off by HF_HUB_OFFLINE, and the model is not in its cache"
        in said
    )
    assert "hf download nobody/nothing --local-dir FOLDER" in said
    assert "Is the folder complete?" not in said


def test_refusals_of_the_hub_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)

    def said(cause: type[Exception]) -> str:
        error = OSError("cannot load")
        error.__cause__ = cause.__new__(cause)
        return str(models.hub_refusal("a/b", error))

    assert "cannot be reached from here" in said(errors.LocalEntryNotFoundError)
    assert "has no such model\nCheck the spelling." in said(errors.RepositoryNotFoundError)
    assert "Accept its terms" in said(errors.GatedRepoError)
    assert models.hub_refusal("a/b", OSError("a damaged file")) is None


@pytest.mark.usefixtures("no_hub")
def test_what_takes_long_at_the_first_use_is_said_before_it_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WINDFALL_CACHE", str(tmp_path / "cache"))
    with pytest.raises(WindfallError, match="make smollm2"):
        models.fetch("smollm2-135m")
    assert models.preparation("nobody/nothing").startswith("downloading nobody/nothing from the Hugging Face hub")
    assert models.preparation("tiny") == ""


def test_missing_weights_are_refused_by_name(tmp_path: Path) -> None:
    def drop(tensors: dict[str, torch.Tensor]) -> None:
        for name in [n for n in tensors if n.startswith("model.layers.0.")]:
            del tensors[name]

    folder = edited(tmp_path / "m", drop)
    with pytest.raises(WindfallError) as caught:
        load(folder)
    said = str(caught.value)
    assert said.startswith(
        f"{folder}: weights are missing from the model's files: model.layers.0.input_layernorm.weight"
    )
    assert "and 6 more" in said
    assert "Does config.json belong to these weights?" in said


def test_untied_head_that_is_missing_is_refused(tmp_path: Path) -> None:
    folder = edited(tmp_path / "m", lambda tensors: None, tie_word_embeddings=False)
    with pytest.raises(WindfallError, match=r"missing from the model's files: lm_head\.weight\n"):
        load(folder)


def test_weights_of_another_shape_are_refused_with_both_shapes(tmp_path: Path) -> None:
    folder = edited(tmp_path / "m", lambda tensors: tensors.update({UP: torch.zeros(3, 5)}))
    with pytest.raises(WindfallError) as caught:
        load(folder)
    said = str(caught.value)
    assert f"{folder}: weights have the wrong shape for the model: {UP} ([3, 5] in the file, [384, 128] by" in said
    assert "Does config.json belong to these weights?" in said


@pytest.mark.parametrize("kept", ["model.embed_tokens.weight", "lm_head.weight"])
def test_one_name_of_a_tied_weight_is_enough(tmp_path: Path, kept: str) -> None:
    """Rotary frequencies are buffers and not in the files; they do not count as missing."""
    folder = edited(tmp_path / "m", lambda t: t.update({kept: t.pop("model.embed_tokens.weight")}))
    ours, whole = load(folder).state_dict(), load(models.TINY).state_dict()
    assert ours.keys() == whole.keys()
    assert all(torch.equal(ours[name], whole[name]) for name in whole)


def test_generate_refuses_missing_weights_before_any_token(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = edited(tmp_path / "m", lambda tensors: tensors.pop(UP))
    with pytest.raises(WindfallError, match=UP):
        offline.generate(str(folder), ["1+1="], n=1, max_tokens=2, sampling=Sampling(), seed=0)
    assert capsys.readouterr().out == ""
