"""Adapters on several ranks, built as in a run: one, two and four ranks publish the same versions, and continue
from each other's checkpoints."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from tests.support.ranks import rank_tensors
from tests.support.ranks.rank_processes import run_ranks
from windfall.link import messages as m
from windfall.models import load
from windfall.recipe.file import parse_recipe
from windfall.trainer import checkpoint, trained_weights
from windfall.trainer.checkpoint import VerifiedCheckpoint
from windfall.trainer.process import PolicySetup, RankPart, Setup
from windfall.trainer.ranks.ranks import Orders, TrainerRanks
from windfall.training import CheckpointState, Sample

SIZES = (1, 2, 4)
RECIPE: dict[str, Any] = {
    "model": {"path": "tiny"},
    "train": {"lora": {"rank": 6}, "lr": 1e-2, "engine_gap_limit": 50.0, "engine_gap_alarm": 50.0},
    "run": {"steps": 9, "device": "cpu"},
}


def samples(seed: int) -> list[Sample]:
    rng, out = np.random.default_rng(seed), []
    for length in (3, 17, 9):  # fewer than there are ranks
        ids = tuple(rng.integers(3, 60, length + 2).tolist())
        targets = tuple(range(2, length + 2))
        out.append(Sample(ids=ids, targets=targets, behavior=np.full(length, -4.0), advantage=1.0, limit=20))
    return out


def build(ranks: TrainerRanks, folder: Path, found: VerifiedCheckpoint | None) -> tuple[RankPart, Any, Any] | None:
    """This rank's part, as the trainer's processes make it: rank 0 loads and gives the order to build. Of two ranks,
    each has a half of the base; of four, the whole."""
    recipe, orders = parse_recipe(RECIPE, where="test"), Orders(ranks)
    if not ranks.first:
        RankPart(recipe, folder, orders)
        orders.follow()
        return None
    model = load.load(trained_weights.model_to_load(recipe, found), dtype="float32", device="cpu")
    loaded = trained_weights.prepare(model, recipe, found, dtype="float32")
    part = RankPart(recipe, folder, orders, loaded={"": loaded})
    assert loaded.adapters is not None
    own = PolicySetup(micro_tokens=64, checkpoint=found.path if found else None, adapter=loaded.adapters.config)
    setup = Setup(
        model_config=model.config, dtype="float32", checkpoint_activations=False, onednn=False, policies={"": own},
        whole_base=ranks.size == 4,
    )  # fmt: skip
    orders.call(part.build, setup)
    policy = part.policies[""]
    collect = lambda: orders.call(part.collect, "")  # noqa: E731
    write = partial(policy.weights.write_published, model, policy.publisher, collect)
    return part, loaded.base, write if ranks.distributed else loaded.saved.save_pretrained


def work(ranks: TrainerRanks, folder: Path, found: VerifiedCheckpoint | None, steps: range) -> Any:
    """Train these steps, publish each, and save the last. Returns digests, and the adapters' file."""
    built = build(ranks, folder, found)
    if built is None:
        return None
    part, base, write_model = built
    policy, orders = part.policies[""], part.orders
    trainer = policy.trainer
    assert trainer is not None
    manifests = [orders.call(part.publish, "", steps[0] - 1, m.Publish(id=""))]
    for step in steps:
        trainer.forward_backward(samples(step))
        assert trainer.optim_step().skipped == ""
        manifests.append(orders.call(part.publish, "", step, m.Publish(id="")))
    checkpoint.save(
        folder / "checkpoints", CheckpointState(step=steps[-1], next_task=0), write_model=write_model, keep=9,
        tokenizer=load.load_tokenizer("tiny"), write_optimizer=trainer.write_optimizer, base=base,
    )  # fmt: skip
    assert policy.publisher.base is not None
    whole = {t.name for t in policy.publisher.base.manifest.entries}
    names = {t.name for t in manifests[-1].entries}
    orders.stop()
    part.close()
    return [(each.base, each.digest) for each in manifests], names, whole, policy.weights.facts()


def close(ours: Path, theirs: Path) -> None:
    """The files hold the same tensors up to rounding. Adam divides a gradient by its own size, so elements whose
    gradient is almost zero differ by more: in bfloat16 up to 4 % of them, which the norm bounds."""
    one, two = load_file(ours), load_file(theirs)
    assert one.keys() == two.keys()
    for name, value in one.items():
        equal = torch.isclose(two[name], value, rtol=1e-3, atol=1e-5).float().mean()
        assert equal >= 0.9, f"{name}: {equal:.2%} of the elements are equal"
        assert (two[name] - value).norm() < 5e-3 * value.norm(), name


@pytest.mark.slow
def test_ranks_publish_and_continue_alike(tmp_path: Path) -> None:
    saved: dict[int, VerifiedCheckpoint] = {}
    results = {}
    for size in SIZES:
        folder = tmp_path / str(size)
        folder.mkdir()
        results[size] = run_ranks(size, work, folder, None, range(1, 3))[0]
        found = checkpoint.newest(folder / "checkpoints")
        assert found is not None
        saved[size] = found
    versions, names, base, facts = results[1]
    assert not names & base
    assert all(".lora_" in name for name in names)
    assert len({digest for _, digest in versions}) == 3
    for size in SIZES[1:]:
        assert results[size][0][0] == versions[0], "the base, and the adapters before the first update"
        assert results[size][1:] == (names, base, facts)
        assert {b for b, _ in results[size][0]} == {versions[0][0]}
        close(saved[1].path / "adapter_model.safetensors", saved[size].path / "adapter_model.safetensors")
        assert checkpoint.read_base(saved[size].path) == checkpoint.read_base(saved[1].path)

    run_ranks(1, work, tmp_path / "1", saved[1], range(3, 5))
    expected = tmp_path / "1" / "checkpoints" / "step-000004" / "adapter_model.safetensors"
    for reader, writer in ((1, 4), (2, 1), (4, 2)):
        folder = tmp_path / f"{writer} to {reader}"
        folder.mkdir()
        versions, *_ = run_ranks(reader, work, folder, saved[writer], range(3, 5))[0]
        assert versions[0] == results[writer][0][-1], "the first version is the one that was saved"
        close(expected, folder / "checkpoints" / "step-000004" / "adapter_model.safetensors")


@pytest.mark.slow
def test_new_adapters_of_all_ranks_are_those_of_the_seed(tmp_path: Path) -> None:
    """Every rank would draw the same numbers, but only those of rank 0 count."""
    (first,) = run_ranks(1, first_adapters, tmp_path)
    for found in run_ranks(2, first_adapters, tmp_path):
        assert found.keys() == first.keys()
        assert all(torch.equal(t, first[n]) for n, t in found.items())


def first_adapters(ranks: TrainerRanks, folder: Path) -> dict[str, torch.Tensor]:
    part = part_of(ranks, folder, "bfloat16", "all")
    return rank_tensors.weights(ranks, part.policies[""].weights.adapters.tensors())


def part_of(ranks: TrainerRanks, folder: Path, dtype: str, targets: Any, *, noise: float = 0.0) -> RankPart:
    """The part of this rank, with new adapters. `noise`: of their matrices."""
    recipe = parse_recipe(RECIPE | {"train": RECIPE["train"] | {"lora": {"rank": 6, "targets": targets}}}, where="test")
    model = load.load("tiny", dtype=dtype, device="cpu")
    loaded = trained_weights.prepare(model, recipe, None, dtype=dtype)
    assert loaded.adapters is not None
    if noise:
        generator = torch.Generator().manual_seed(3)
        with torch.no_grad():
            for t in loaded.adapters.tensors().values():
                t.copy_(noise * torch.randn(t.shape, generator=generator))
    own = PolicySetup(micro_tokens=64, adapter=loaded.adapters.config)
    setup = Setup(
        model_config=model.config, dtype=dtype, checkpoint_activations=False, onednn=False, policies={"": own}
    )
    part = RankPart(recipe, folder, Orders(ranks), loaded={"": loaded} if ranks.first else None)
    part.build(setup)
    return part


@pytest.mark.slow
def test_gradients_of_head_and_embeddings_are_those_of_one_rank(tmp_path: Path) -> None:
    """Head and embeddings of the tiny model are one matrix."""
    (alone,) = run_ranks(1, gradients, tmp_path)
    assert alone.keys() == {f"{n}.lora_{x}.weight" for n in ("lm_head", "model.embed_tokens") for x in "AB"}
    for found in run_ranks(2, gradients, tmp_path):
        assert found.keys() == alone.keys()
        for n, g in found.items():
            assert float(alone[n].norm()) > 0
            assert float((g - alone[n]).norm()) < 1e-4 * float(alone[n].norm()), n


def gradients(ranks: TrainerRanks, folder: Path) -> dict[str, torch.Tensor]:
    part = part_of(ranks, folder, "float32", ["lm_head", "embed_tokens"], noise=0.05)
    packs = [[s] for s in samples(1)][ranks.rank :: ranks.size]
    packs += [[]] * (-(-3 // ranks.size) - len(packs))
    trainer = part.policies[""].trainer
    assert trainer is not None
    trainer._forward_backward(packs, [[] for _ in packs])
    return rank_tensors.gradients(ranks, part.policies[""].weights.adapters.tensors())
