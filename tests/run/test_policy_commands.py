"""Commands for one policy of a run that has several."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from windfall import run_folder as folders
from windfall.errors import WindfallError
from windfall.models import load
from windfall.recipe.lora import Lora
from windfall.run.commands import export, offline
from windfall.trainer import checkpoint
from windfall.trainer.model import lora
from windfall.training import CheckpointState
from windfall.weights.adapter_folder import AdapterBase, base_digest
from windfall.weights.merged import AdapterPair, merge

RECIPE = """
[model]
path = "tiny"
[policies.solver]
lora = { rank = 2 }
[policies.verifier]
lora = { rank = 3 }
[policies.reference]
frozen = true
"""


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run whose two trained policies have a checkpoint each."""
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "recipe.toml").write_text(RECIPE)
    (folders.policy_folder(folder, "reference") / "tokenizer").mkdir(parents=True)
    model = load.load("tiny", dtype="float32", device="cpu")
    base = AdapterBase(path="tiny", dtype="float32", digest=base_digest(model.state_dict()))
    for step, (name, rank) in enumerate((("solver", 2), ("verifier", 3)), 1):
        adapters = lora.attach(model, Lora(rank=rank), base="tiny", seed=step, policy=name)
        for layer in adapters.layers.values():
            torch.nn.init.normal_(layer.pair(name).b, 0.0, 0.1)
        checkpoint.save(
            folders.policy_folder(folder, name) / "checkpoints", CheckpointState(step=step, next_task=0), base=base,
            write_model=adapters.save_pretrained, write_optimizer=checkpoint.no_optimizer, keep=1,
            tokenizer=load.load_tokenizer("tiny"),
        )  # fmt: skip
    return folder


@pytest.mark.parametrize(("name", "step"), [("solver", 1), ("verifier", 2)])
def test_policy_is_exported_with_its_own_adapter(run: Path, name: str, step: int) -> None:
    made = export.export(run, None, name)
    assert made.folder == run / "policies" / name / "exports" / f"step-{step:06d}"
    found, plain = load_file(made.folder / "model.safetensors"), load.load("tiny", dtype="float32", device="cpu")
    own = load_file(made.source / "adapter_model.safetensors")
    layer = "model.layers.0.self_attn.q_proj"
    pair = AdapterPair(*(own[f"base_model.model.{layer}.lora_{x}.weight"] for x in "AB"))
    assert torch.equal(found[f"{layer}.weight"], merge(plain.state_dict()[f"{layer}.weight"], pair, 2.0))
    assert not torch.equal(found[f"{layer}.weight"], plain.state_dict()[f"{layer}.weight"])
    by_checkpoint = export.export(made.source, run / "other")
    assert load_file(by_checkpoint.folder / "model.safetensors").keys() == found.keys()


def test_policy_must_be_named_if_there_are_several(run: Path, tmp_path: Path) -> None:
    for wrong in ("", "coder"):
        with pytest.raises(WindfallError, match=r"several policies|no policy 'coder'") as caught:
            export.export(run, None, wrong)
        assert "reference, solver, verifier" in caught.value.fix
    alone = tmp_path / "alone"
    shutil.copytree(folders.policy_folder(run, "solver"), alone)
    (alone / "recipe.toml").write_text("[train.lora]\nrank = 2\n")
    assert export.export(alone, None).folder == alone / "exports" / "step-000001"
    with pytest.raises(WindfallError, match="one policy, without a name"):
        offline.find_checkpoint(str(alone), "solver")


def test_model_of_a_policy_is_found(run: Path) -> None:
    recipe = run / "recipe.toml"
    step = folders.policy_folder(run, "verifier") / "checkpoints" / "step-000002"
    assert offline.find_checkpoint(str(run), "verifier") == (str(step), recipe)
    assert offline.find_checkpoint(str(step)) == (str(step), recipe.resolve())
    assert offline.find_checkpoint(str(run), "reference") == ("tiny", recipe)
    with pytest.raises(WindfallError, match="only a run has policies"):
        offline.find_checkpoint(str(step), "verifier")
