"""Commands for one policy of a run that has several."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from windfall import run_folder as folders
from windfall.errors import WindfallError
from windfall.models import load
from windfall.recipe.file import load_recipe
from windfall.recipe.lora import Lora
from windfall.recipe.sections import Recipe
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
[env]
name = "custom"
factory = "tests.programs.ask_roles:AskRoles"
options = { roles = ["solver", "verifier:a", "verifier:b", "reference"] }
[rollout]
max_tokens = 24
"""
NAMED = (1, "solver"), (2, "verifier")


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run whose two trained policies have a checkpoint each."""
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "recipe.toml").write_text(RECIPE)
    (folders.policy_folder(folder, "reference") / "tokenizer").mkdir(parents=True)
    model = load.load("tiny", dtype="float32", device="cpu")
    base = AdapterBase(path="tiny", dtype="float32", digest=base_digest(model.state_dict()))
    for step, (name, rank) in ((n, (name, n + 1)) for n, name in NAMED):
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
    with pytest.raises(WindfallError, match="there is no policy"):
        offline.find_checkpoint(str(alone), "solver")


def test_model_of_a_policy_is_found(run: Path) -> None:
    steps = [folders.policy_folder(run, name) / "checkpoints" / f"step-00000{n}" for n, name in NAMED]
    assert offline.find_checkpoint(str(run), "verifier") == str(steps[1])
    assert offline.find_checkpoint(str(steps[1])) == str(steps[1])
    assert offline.find_checkpoint(str(run), "reference") == "tiny"
    assert {offline.find_recipe(str(path)) for path in (run, *steps)} == {run / "recipe.toml"}
    with pytest.raises(WindfallError, match="there is no policy"):
        offline.find_checkpoint(str(steps[1]), "verifier")
    with pytest.raises(WindfallError, match="has no recipe"):
        offline.find_recipe("tiny")


def test_frozen_policy_is_not_exported(run: Path) -> None:
    with pytest.raises(WindfallError, match="is frozen: it is tiny"):
        export.export(run, None, "reference")


def test_models_of_all_policies_are_found(run: Path, tmp_path: Path) -> None:
    recipe = load_recipe(run / "recipe.toml")
    solver, verifier = (folders.policy_folder(run, name) / "checkpoints" / f"step-00000{n}" for n, name in NAMED)
    everything = {"solver": str(solver), "verifier": str(verifier), "reference": "tiny"}
    assert offline.find_models(str(run), recipe) == offline.find_models(str(run), recipe, "solver") == everything
    older = shutil.copytree(solver, solver.with_name("older"))
    assert offline.find_models(str(older), recipe) == everything | {"solver": str(older)}
    assert offline.find_models("tiny", recipe) == dict.fromkeys(everything, "tiny")
    elsewhere = str(shutil.copytree(solver, tmp_path / "elsewhere"))
    found = offline.find_models(elsewhere, recipe, "verifier")
    assert found == dict.fromkeys(everything, "tiny") | {"verifier": elsewhere}
    assert offline.find_models(str(run), Recipe(), "verifier") == {"": str(verifier)}
    with pytest.raises(WindfallError, match="no policy 'coder'") as caught:
        offline.find_models(str(run), recipe, "coder")
    assert "solver, verifier, reference" in caught.value.fix


@pytest.mark.slow
def test_policies_of_one_base_are_evaluated_as_their_exported_models(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = load_recipe(run / "recipe.toml")
    models = offline.find_models(str(run), recipe)
    exported = {name: str(export.export(run, None, name).folder) for _, name in NAMED}

    def printed(models: Mapping[str, str], policy: str = "") -> list[str]:
        offline.evaluate(models, recipe, policy=policy, tasks=3, temperature=0.0, show=0 if policy else 3)
        return capsys.readouterr().out.splitlines()

    together = printed(models)
    assert together == printed({**models, **exported})
    roles = ["reference", "solver", "verifier:a", "verifier:b"]
    assert [line.partition(" reward")[0] for line in together if " reward " in line] == [f"{role}:" for role in roles]
    alike = printed(dict.fromkeys(models, "tiny"))
    said = [{line.partition(": ")[2] for line in lines if "mean" not in line} for lines in (together, alike)]
    assert len(said[0]) > len(said[1])  # adapters differ, so the same question has several answers
    assert [line for line in together if line.startswith("verifier") and " " in line][-4:] == printed(
        models, "verifier"
    )
