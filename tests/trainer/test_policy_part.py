"""A trainer of several policies of one base: what is published and saved of each is what there is of it alone, and its
checkpoints do not depend on its name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from windfall import run_folder as folders
from windfall.link import messages as m
from windfall.models import load
from windfall.recipe.file import parse_recipe
from windfall.recipe.sections import Recipe
from windfall.trainer import checkpoint, trained_weights
from windfall.trainer.process import PolicySetup, RankPart, Setup
from windfall.trainer.ranks.ranks import Orders, TrainerRanks
from windfall.training import CheckpointState, Sample
from windfall.weights.buffers import views

TRAIN = {"lr": 1e-2, "engine_gap_limit": 50.0, "engine_gap_alarm": 50.0}
COMMON: dict[str, Any] = {"model": {"path": "tiny"}, "run": {"steps": 9, "device": "cpu"}, "train": TRAIN}
ORDER = m.Publish(id="")
SOLVER = {"lora": {"rank": 6}}
POLICIES: dict[str, Any] = {
    "solver": SOLVER,
    "verifier": {"lora": {"rank": 3, "targets": ["q_proj", "v_proj"]}, "train": {"lr": 1e-3}},
    "reference": {"frozen": True},
    "old": {"copy_of": "solver", "every": 2},
}


def recipe(**policies: Any) -> Recipe:
    return parse_recipe(COMMON | {"policies": policies}, where="test")


def unnamed(**own: Any) -> Recipe:
    return parse_recipe(COMMON | {"train": TRAIN | own}, where="test")


def build(made: Recipe, folder: Path, orders: Orders | None = None) -> tuple[RankPart, dict[str, Any]]:
    """The trainer of the only base of the recipe, from the newest checkpoints, and the bases of its adapters."""
    (names,) = made.bases().values()
    orders = orders or Orders(TrainerRanks.alone())
    model = load.load("tiny", dtype="float32", device="cpu")
    loaded, setups = {}, {}
    for name in names:
        trained = made.is_trained(name)
        found = checkpoint.newest(folders.policy_folder(folder, name) / "checkpoints")
        options: dict[str, Any] = {"dtype": "float32", "policy": name, "trained": trained}
        loaded[name] = trained_weights.prepare(model, made.of(name), found, **options)
        adapters = loaded[name].adapters
        setups[name] = PolicySetup(
            micro_tokens=64, checkpoint=found.path if found and trained else None,
            adapter=adapters.config if adapters else None,
        )  # fmt: skip
    part = RankPart(made, folder, orders, loaded=loaded)
    setup = Setup(model_config=model.config, dtype="float32", checkpoint_activations=False, onednn=False,
                  policies=setups)  # fmt: skip
    orders.call(part.build, setup)
    return part, {name: each.base for name, each in loaded.items()}


def samples(seed: int) -> list[Sample]:
    rng, out = np.random.default_rng(seed), []
    for length in (3, 17, 9):
        ids = tuple(rng.integers(3, 60, length + 2).tolist())
        targets = tuple(range(2, length + 2))
        out.append(Sample(ids=ids, targets=targets, behavior=np.full(length, -4.0), advantage=1.0, limit=20))
    return out


def train(part: RankPart, policy: str, step: int) -> Any:
    """A step of a policy. Returns the manifest of its version."""
    trainer = part.policies[policy].trainer
    assert trainer is not None
    trainer.forward_backward(samples(step))
    assert trainer.optim_step().skipped == ""
    return part.orders.call(part.publish, policy, step, ORDER)


def save(part: RankPart, policy: str, step: int, base: Any) -> Path:
    own = part.policies[policy]
    assert own.trainer is not None
    return checkpoint.save(
        folders.policy_folder(part.folder, policy) / "checkpoints", CheckpointState(step=step, next_task=0), base=base,
        write_model=own.weights.saved.save_pretrained, tokenizer=load.load_tokenizer("tiny"), keep=9,
        write_optimizer=own.trainer.write_optimizer,
    )  # fmt: skip


def published(part: RankPart, policy: str) -> dict[str, torch.Tensor]:
    publisher = part.policies[policy].publisher
    version = publisher.readable[0] if publisher.readable else publisher.base
    assert version is not None
    return {n: t.clone() for n, t in views(version.buffer.mapped, version.manifest.entries).items()}


def test_every_policy_publishes_and_saves_what_it_does_alone(tmp_path: Path) -> None:
    part, bases = build(recipe(**POLICIES), tmp_path / "several")
    first = {name: part.publish(name, 0, ORDER) for name in part.policies}
    found: dict[str, list[Any]] = {"solver": [first["solver"]], "verifier": [first["verifier"]]}
    for name, step in (("solver", 1), ("verifier", 1), ("solver", 2), ("solver", 3), ("verifier", 2)):
        found[name].append(train(part, name, step))
    saved = {name: save(part, name, len(found[name]) - 1, bases[name]) for name in found}
    base = first["reference"].digest
    assert {each.base for manifests in found.values() for each in manifests} == {base}, "there is one base"
    assert sum(f.nbytes for f in part.policies["reference"].published.files) == first["reference"].nbytes
    for name, own in (("solver", SOLVER), ("verifier", POLICIES["verifier"])):
        settings = {"lora": own["lora"]} | own.get("train", {})
        alone, _ = build(unnamed(**settings), tmp_path / name)
        manifests = [alone.publish("", 0, ORDER), *(train(alone, "", step) for step in range(1, len(found[name])))]
        assert [each.digest for each in manifests] == [each.digest for each in found[name]]
        path = save(alone, "", len(manifests) - 1, bases[name])
        for file in ("adapter_model.safetensors", "adapter_config.json", checkpoint.OPTIMIZER, "windfall/state.json"):
            assert (path / file).read_bytes() == (saved[name] / file).read_bytes(), file
        files = {holding.file.digest for holding in part.policies[name].publisher.describe()}
        assert files == {base, *(f.digest for f in part.policies[name].published.files)}
        assert {each.digest for each in found[name][-2:]} <= files
        assert not files & {each.digest for other in found if other != name for each in found[other][1:]}
        alone.close()
    for manifests in found.values():
        assert part.files.find(manifests[-1].digest) is not None, "one server has the files of all"
    part.close()
    assert part.files.find(base) is None


@pytest.mark.parametrize(("writer", "reader"), [("solver", ""), ("", "solver")])
def test_checkpoint_does_not_know_the_name_of_its_policy(tmp_path: Path, writer: str, reader: str) -> None:
    recipes = {"": unnamed(lora=SOLVER["lora"]), "solver": recipe(solver=SOLVER, verifier=POLICIES["verifier"])}
    part, bases = build(recipes[writer], tmp_path)
    part.publish(writer, 0, ORDER)
    train(part, writer, 1)
    path = save(part, writer, 1, bases[writer])
    expected = train(part, writer, 2).digest
    part.close()
    moved = folders.policy_folder(tmp_path / "moved", reader) / "checkpoints" / path.name
    moved.parent.mkdir(parents=True)
    path.rename(moved)
    again, _ = build(recipes[reader], tmp_path / "moved")
    again.publish(reader, 1, ORDER)
    assert train(again, reader, 2).digest == expected
    again.close()


def test_copy_follows_its_original_only_when_it_is_published(tmp_path: Path) -> None:
    part, _ = build(recipe(**POLICIES), tmp_path)
    for name in part.policies:
        part.publish(name, 0, ORDER)
    before = published(part, "old")
    train(part, "solver", 1)
    train(part, "solver", 2)
    assert all(torch.equal(t, before[n]) for n, t in published(part, "old").items())
    wanted = published(part, "solver")
    trainer = part.policies["solver"].trainer
    assert trainer is not None
    trainer.forward_backward(samples(3))
    trainer.optim_step()  # these weights belong to no version
    part.publish("old", 2, ORDER)
    found = published(part, "old")
    assert all(torch.equal(t, wanted[n]) for n, t in found.items())
    assert not all(torch.equal(t, before[n]) for n, t in found.items())
    part.publish("solver", 3, ORDER)
    assert part.publish("old", 2, ORDER).version == 3, "the version whose weights it has, whatever was asked for"
    assert all(torch.equal(t, published(part, "solver")[n]) for n, t in published(part, "old").items())
    assert part.publish("old", 3, ORDER).version == 3, "there is nothing new"
    part.close()


def test_copy_that_began_with_an_older_version_has_the_present_one_next(tmp_path: Path) -> None:
    part, bases = build(recipe(**POLICIES), tmp_path)
    for name in part.policies:
        part.publish(name, 0, ORDER)
    train(part, "solver", 1)
    save(part, "solver", 1, bases["solver"])
    part.close()
    again, _ = build(recipe(**POLICIES), tmp_path)
    again.publish("solver", 1, ORDER)
    again.publish("old", 0, ORDER)
    wanted, before = published(again, "solver"), published(again, "old")
    assert not all(torch.equal(t, wanted[n]) for n, t in before.items())
    again.publish("old", 1, ORDER)
    assert all(torch.equal(t, wanted[n]) for n, t in published(again, "old").items())
    again.close()


def test_policies_that_are_not_trained_have_no_gradients(tmp_path: Path) -> None:
    part, _ = build(recipe(**POLICIES), tmp_path)
    assert [name for name, own in part.policies.items() if own.trainer is None] == ["reference", "old"]
    model = part.policies["old"].weights.model
    assert {n.partition("@")[2] for n, p in model.named_parameters() if p.requires_grad} == {"solver", "verifier"}
    facts = {name: own.weights.facts() for name, own in part.policies.items()}
    assert len({each["parameters"] for each in facts.values()}) == 1
    assert facts["old"] == facts["solver"] != facts["verifier"]
    part.close()


def test_adapters_of_a_named_policy_are_read_by_peft_names(tmp_path: Path) -> None:
    part, _ = build(recipe(**POLICIES), tmp_path)
    part.policies["verifier"].weights.saved.save_pretrained(tmp_path)
    names = load_file(tmp_path / "adapter_model.safetensors")
    assert all(name.endswith((".lora_A.weight", ".lora_B.weight")) and "@" not in name for name in names)
    part.close()
