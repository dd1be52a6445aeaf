"""Loading a model: every weight comes from its files, or the folder is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hostile.models import edited

from windfall.commands import offline
from windfall.errors import WindfallError
from windfall.models import load as models
from windfall.types import Sampling

UP = "model.layers.0.mlp.up_proj.weight"


def load(folder: Path) -> torch.nn.Module:
    return models.load(str(folder), dtype="float32", device="cpu")


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
