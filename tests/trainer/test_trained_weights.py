"""What a run trains: the kind of its checkpoints and its base never change, and only adapters are published."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from windfall.errors import WindfallError
from windfall.models import load
from windfall.recipe.file import parse_recipe
from windfall.recipe.sections import Recipe, Train
from windfall.trainer import checkpoint, trained_weights
from windfall.trainer.checkpoint import VerifiedCheckpoint
from windfall.trainer.model.gradients import trained
from windfall.trainer.optimizer import Optimizer
from windfall.trainer.ranks import sharded_file
from windfall.trainer.ranks.ranks import TrainerRanks
from windfall.training import CheckpointState
from windfall.weights.publishing.publish import Publisher

ADAPTERS = {"train": {"lora": {"rank": 2}}}


def recipe(**sections: Any) -> Recipe:
    return parse_recipe(sections, where="test")


def tiny(dtype: str = "float32") -> Any:
    return load.load("tiny", dtype=dtype, device="cpu")


def saved(folder: Path, weights: trained_weights.TrainedWeights) -> VerifiedCheckpoint:
    optimizer = Optimizer(trained(weights.model), Train(), 1)
    checkpoint.save(
        folder, CheckpointState(step=1, next_task=0), write_model=weights.saved.save_pretrained,
        tokenizer=load.load_tokenizer("tiny"), keep=1, base=weights.base,
        write_optimizer=lambda path: sharded_file.write(path, optimizer.state(), TrainerRanks.alone()),
    )  # fmt: skip
    found = checkpoint.newest(folder)
    assert found is not None
    return found


def test_base_that_has_changed_is_refused(tmp_path: Path) -> None:
    r = recipe(**ADAPTERS)
    found = saved(tmp_path, trained_weights.prepare(tiny(), r, None, dtype="float32"))
    assert trained_weights.model_to_load(r, found) == "tiny"
    again = trained_weights.prepare(tiny(), r, found, dtype="float32")
    assert again.adapters.config.rank == 2
    changed = tiny()
    with torch.no_grad():
        changed.model.norm.weight[0] += 1e-3
    with pytest.raises(WindfallError, match="weights of tiny are not those that this adapter was trained with"):
        trained_weights.prepare(changed, r, found, dtype="float32")
    trained_weights.prepare(tiny("bfloat16"), r, found, dtype="bfloat16")  # model.dtype may change: nothing to compare


def test_checkpoint_of_the_other_kind_is_refused(tmp_path: Path) -> None:
    adapters, whole = recipe(**ADAPTERS), recipe()
    one = saved(tmp_path / "a", trained_weights.prepare(tiny(), adapters, None, dtype="float32"))
    two = saved(tmp_path / "w", trained_weights.prepare(tiny(), whole, None, dtype="float32"))
    assert trained_weights.model_to_load(whole, two) == str(two.path)
    with pytest.raises(WindfallError, match=r"is an adapter, but the recipe has no \[train\.lora\]"):
        trained_weights.model_to_load(whole, one)
    with pytest.raises(WindfallError, match=r"is a whole model, but the recipe has \[train\.lora\]"):
        trained_weights.model_to_load(adapters, two)


def test_adapters_are_published_with_their_base_and_scale() -> None:
    weights, publisher = trained_weights.prepare(tiny(), recipe(**ADAPTERS), None, dtype="float32"), Publisher()
    try:
        manifests = [weights.publish(publisher, version) for version in (0, 1)]
        assert publisher.base is not None
        assert {m.base for m in manifests} == {publisher.base.manifest.digest}
        assert {m.scale for m in manifests} == {2.0}
        assert [e.name for e in manifests[0].entries][:2] == [
            "model.layers.0.self_attn.q_proj.lora_A.weight", "model.layers.0.self_attn.q_proj.lora_B.weight",
        ]  # fmt: skip
        assert publisher.delta is not None
        assert publisher.delta.manifest.nbytes < manifests[0].nbytes, "nothing has changed: a small delta"
        assert manifests[0].nbytes == 4 * weights.facts()["adapter_parameters"]
    finally:
        publisher.close()
