"""Slots of a trainer: adapters that come and go compute what an adapter of a run of its own computes, bit for bit, and
what a caller gets wrong changes nothing."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from windfall import algorithms
from windfall.algorithms.given import Loss
from windfall.errors import WindfallError
from windfall.link import messages as m
from windfall.models import load
from windfall.recipe.file import parse_recipe
from windfall.recipe.sections import Recipe
from windfall.trainer import checkpoint, trained_weights
from windfall.trainer.model.logprobs import PolicyModule
from windfall.trainer.ranks.ranks import Orders, TrainerRanks
from windfall.trainer.slots.slot import Slot, SlotModule
from windfall.trainer.trainer import TorchTrainer
from windfall.training import Adam, Sample, check_given, given

CROSS_ENTROPY, PPO = Loss(name="cross_entropy"), Loss(name="ppo")
ADAM = Adam(lr=1e-2, weight_decay=0.1, clip_norm=1.0)
cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
LIMIT = {"lora": {"rank": 8}}
POLICIES: dict[str, Any] = {
    "base": {"frozen": True},
    "t0": {"slot": "train", **LIMIT},
    "t1": {"slot": "train", **LIMIT},
    "s0": {"slot": "sample", **LIMIT},
}
Q_AND_DOWN = ("q_proj", "down_proj")
ENDS = ("v_proj", "lm_head", "embed_tokens")


def slots(dtype: str = "float32", device: str = "cpu") -> dict[str, Slot]:
    """The slots of a trainer, as its process builds them."""
    recipe = parse_recipe({"model": {"path": "tiny"}, "policies": POLICIES}, where="test")
    model, orders = load.load("tiny", dtype=dtype, device=device), Orders(TrainerRanks.alone(device))
    found, digest = {}, ""
    for name in recipe.names():
        options: dict[str, Any] = {"trained": False, "slot": bool(recipe.slot(name)), "digest": digest}
        found[name] = trained_weights.prepare(model, recipe.of(name), None, dtype=dtype, policy=name, **options)
        digest = found[name].base.digest if found[name].base else digest
    module = SlotModule(PolicyModule(model), recipe)
    return {
        name: Slot(name, recipe.slot(name), module, found[name], recipe.of(name), micro_tokens=64, orders=orders)
        for name in recipe.names()
    }


def new(rank: int = 4, targets: tuple[str, ...] = (), **fields: Any) -> m.LoadAdapter:
    return m.LoadAdapter(**{"id": "", "rank": rank, "alpha": 12.0, "seed": 3, "targets": targets} | fields)


def of_folder(path: Path, **fields: Any) -> m.LoadAdapter:
    return m.LoadAdapter(id="", path=str(path), **fields)


def alone(
    rank: int, targets: tuple[str, ...] = (), seed: int = 3, dtype: str = "float32", device: str = "cpu"
) -> TorchTrainer:
    """The trainer of a run with [train.lora]."""
    lora = {"rank": rank, "alpha": 12.0, **({"targets": list(targets)} if targets else {})}
    recipe: Recipe = parse_recipe(
        {"model": {"path": "tiny"}, "run": {"seed": seed}, "train": {"lora": lora}}, where="test"
    )
    model = load.load("tiny", dtype=dtype, device=device)
    weights = trained_weights.prepare(model, recipe, None, dtype=dtype)
    algorithm = algorithms.make(recipe.algorithm.name, **recipe.algorithm.options)
    orders = Orders(TrainerRanks.alone(device))
    return TorchTrainer(model, algorithm, recipe, micro_tokens=64, adapters=weights.adapters, orders=orders)


def draw(seed: int, count: int = 4) -> list[Sample]:
    rng, out = np.random.default_rng(seed), []
    for _ in range(count):
        ids = rng.integers(3, 60, rng.integers(4, 20)).tolist()
        targets = list(range(1, len(ids)))
        numbers = rng.normal(size=len(targets)).tolist()
        out.append(given(ids, targets, numbers, rng.normal(-4, 1, len(targets)).tolist()))
    return out


def train(trainer: Any, steps: range) -> list[Any]:
    """Two losses and an update for every step. Returns all log-probs and norms."""
    out: list[Any] = []
    for step in steps:
        for n, loss in enumerate((CROSS_ENTROPY, PPO)):
            out += [logp.tobytes() for logp in trainer.forward_backward(draw(10 * step + n), loss)]
        out.append(trainer.optim_step(ADAM).grad_norm)
    return out


def tensors(trainer: Any) -> dict[str, torch.Tensor]:
    adapters = trainer.adapters if isinstance(trainer, Slot) else trainer._adapters
    assert adapters is not None
    return {name: t.detach().clone() for name, t in adapters.weights().items()}


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(t, b[name]) for name, t in a.items())


@pytest.mark.parametrize(
    ("dtype", "targets", "device"),
    [
        ("float32", Q_AND_DOWN, "cpu"),
        ("bfloat16", Q_AND_DOWN, "cpu"),
        ("float32", ENDS, "cpu"),
        pytest.param("bfloat16", Q_AND_DOWN, "cuda", marks=cuda),
        pytest.param("bfloat16", ENDS, "cuda", marks=cuda),
    ],
)
def test_slot_trains_as_a_run_does_whatever_is_in_the_others(dtype: str, targets: tuple[str, ...], device: str) -> None:
    where: dict[str, Any] = {"dtype": dtype, "device": device}
    made, plain, other = slots(**where), alone(4, **where), alone(7, targets, seed=5, **where)
    t0, t1 = made["t0"], made["t1"]
    loaded = t0.load(new(4))
    assert (loaded.rank, loaded.alpha) == (4, 12.0)
    assert loaded.parameters == sum(t.numel() for t in tensors(plain).values())
    found = train(t0, range(1))
    assert t1.load(new(7, targets, seed=5)).targets == tuple(sorted(targets))
    of_other = train(t1, range(1))
    found += train(t0, range(1, 3))
    of_other += train(t1, range(1, 2))
    assert (found, of_other) == (train(plain, range(3)), train(other, range(2)))
    assert same(tensors(t0), tensors(plain))
    assert same(tensors(t1), tensors(other))
    t0.load(new(7, targets, seed=5))
    again = alone(7, targets, seed=5, **where)
    assert train(t0, range(2)) == of_other == train(again, range(2)), "nothing is left of the adapter before"
    assert same(tensors(t0), tensors(t1))


@pytest.mark.parametrize(
    ("dtype", "device"), [("float32", "cpu"), ("bfloat16", "cpu"), pytest.param("bfloat16", "cuda", marks=cuda)]
)
def test_saved_adapter_goes_on_in_any_slot(tmp_path: Path, dtype: str, device: str) -> None:
    where: dict[str, Any] = {"dtype": dtype, "device": device}
    made, plain = slots(**where), alone(4, Q_AND_DOWN, **where)
    t0, t1 = made["t0"], made["t1"]
    t0.load(new(4, Q_AND_DOWN))
    train(t0, range(2))
    whole = t0.save(tmp_path / "whole", optimizer=True)
    bare = t0.save(tmp_path / "bare", optimizer=False)
    assert not list(tmp_path.glob(".*")), "nothing else is left"
    assert t0.save(whole, optimizer=True) == whole, "the same contents"
    checkpoint.check(whole)
    base = json.loads((whole / "windfall" / "state.json").read_text())["base"]
    assert base["path"] == "tiny"
    stored = load_file(str(whole / "adapter_model.safetensors"))
    assert {name.split(".")[-3] for name in stored} == set(Q_AND_DOWN)
    rest = train(t0, range(2, 4))
    with pytest.raises(WindfallError, match="there already, with other contents"):
        t0.save(whole, optimizer=True)
    t1.load(of_folder(whole, optimizer=True))
    assert train(t1, range(2, 4)) == rest
    assert same(tensors(t1), tensors(t0))
    train(plain, range(4))
    assert same(tensors(t1), tensors(plain))
    t1.load(of_folder(bare))
    assert train(t1, range(2, 4)) != rest, "Adam starts anew"
    with pytest.raises(WindfallError, match="no state of an optimizer"):
        t1.load(of_folder(bare, optimizer=True))
    made["s0"].load(of_folder(bare))
    t1.load(of_folder(whole, optimizer=True))
    (scored,), (sampled,) = (made[name].score([range(3, 12)], 2) for name in ("t1", "s0"))
    assert scored.logprobs.tobytes() == sampled.logprobs.tobytes()


def test_score_is_what_the_slot_predicts() -> None:
    made, samples = slots(), draw(7, 5)
    ids = [s.ids for s in samples]
    made["t0"].load(new(4))
    train(made["t0"], range(2))
    made["t1"].load(new(8))
    plain = load.load("tiny", dtype="float32", device="cpu")
    plain.set_attn_implementation("eager")
    for name in ("base", "t1"):  # B of a new adapter is zero
        for sequence, found in zip(ids, made[name].score(ids, 3), strict=True):
            expected = torch.log_softmax(plain(torch.tensor([sequence])).logits[0, :-1], -1)
            logp = expected.gather(-1, torch.tensor(sequence[1:])[:, None])[:, 0]
            values, tokens = expected.topk(3)
            np.testing.assert_allclose(found.logprobs, logp.detach(), rtol=1e-5, atol=1e-5)
            np.testing.assert_array_equal(found.top_ids.reshape(-1, 3), tokens)
            np.testing.assert_allclose(found.top_logprobs.reshape(-1, 3), values.detach(), rtol=1e-5, atol=1e-5)
    scored = made["t0"].score(ids, 0)
    for a, b in zip(scored, made["t0"].forward(samples, CROSS_ENTROPY), strict=True):
        np.testing.assert_array_equal(a.logprobs, b)
        assert len(a.top_ids) == 0
    assert not np.allclose(scored[0].logprobs, made["base"].score(ids, 0)[0].logprobs)
    (nothing, one) = made["base"].score([[5], [5, 6]], 1)
    assert (len(nothing.logprobs), len(one.top_ids)) == (0, 1)


def test_labels_are_the_tokens_that_are_trained() -> None:
    made, (sample,) = slots(), draw(1, 1)
    t0, t1 = made["t0"], made["t1"]
    t0.load(new(4))
    t1.load(new(4))
    labels = [7, *sample.ids[2:]]  # of the first target another token than the one that follows
    labeled = replace(sample, labels=np.array(labels, np.uint32))
    (as_given,) = t0.forward_backward([labeled], CROSS_ENTROPY)
    (plain,) = t1.forward_backward([sample], CROSS_ENTROPY)
    scores = made["base"].score([[sample.ids[0], 7]], 0)[0]
    assert as_given[0] == pytest.approx(scores.logprobs[0], rel=1e-5)
    np.testing.assert_allclose(as_given[1:], plain[1:], rtol=1e-5)
    same_tokens = replace(sample, labels=np.array(sample.ids[1:], np.uint32))
    mixed = t1.forward([same_tokens, *draw(2, 2), labeled], CROSS_ENTROPY)
    np.testing.assert_allclose(mixed[0], plain, rtol=1e-5)
    np.testing.assert_allclose(mixed[-1], as_given, rtol=1e-5)
    norms = [t0.optim_step(ADAM).grad_norm, t1.optim_step(ADAM).grad_norm]
    assert norms[0] != norms[1]
    with pytest.raises(WindfallError, match="1 labels for"):
        check_given(given(sample.ids, (1, 2), (1.0, 1.0), (), (3,)), CROSS_ENTROPY, "sample 0")


def test_several_targets_of_a_position_are_as_many_samples() -> None:
    """Their weights add up, also in fast training, which writes the gradient of each row by itself."""
    made, (sample,) = slots(), draw(1, 1)
    t0, t1 = made["t0"], made["t1"]
    t0.load(new(4))
    t1.load(new(4))
    size, rng = len(sample.targets), np.random.default_rng(2)
    labels, weights = rng.integers(3, 60, (size, 3)), rng.uniform(size=(size, 3))
    positions = np.repeat(sample.targets, 3).tolist()
    together = given(sample.ids, positions, weights.ravel(), (), labels.ravel())
    alone = [given(sample.ids, sample.targets, weights[:, n], (), labels[:, n]) for n in range(3)]
    (logprobs,) = t0.forward_backward([together], CROSS_ENTROPY)
    apart = t1.forward_backward(alone, CROSS_ENTROPY)
    np.testing.assert_allclose(logprobs.reshape(size, 3), np.stack(apart, 1), rtol=1e-5)
    norms = [t0.optim_step(ADAM).grad_norm, t1.optim_step(ADAM).grad_norm]
    assert norms[0] == pytest.approx(norms[1], rel=1e-5)


def rewrite_checksums(folder: Path) -> None:
    (folder / checkpoint.CHECKSUMS).unlink()
    checkpoint.write_checksums(folder)


def damaged(folder: Path) -> Path:
    data = bytearray((folder / "adapter_model.safetensors").read_bytes())
    data[-1] ^= 1
    (folder / "adapter_model.safetensors").write_bytes(data)
    return folder


def test_what_is_refused_changes_nothing(tmp_path: Path) -> None:
    made = slots()
    t0, s0, base = made["t0"], made["s0"], made["base"]
    for work in (lambda: t0.save(tmp_path / "x", optimizer=False), lambda: t0.score([[1, 2]], 0)):
        with pytest.raises(WindfallError, match="the slot is empty"):
            work()
    t0.load(new(4))
    train(t0, range(1))
    saved = t0.save(tmp_path / "saved", optimizer=True)
    other = t0.save(tmp_path / "other", optimizer=True)
    (other / "windfall" / "optimizer.safetensors").write_bytes(b"nothing")
    rewrite_checksums(other)
    t0.forward_backward(draw(5), CROSS_ENTROPY)
    before = tensors(t0)
    parameters = {name for name, _ in t0._module.model.named_parameters()}
    wrong: list[tuple[m.LoadAdapter, str]] = [
        (new(9), "rank 9, and the limit is 8"),
        (new(0), "rank: "),
        (new(4, alpha=-1.0), "alpha: "),
        (new(4, ("q_porj",)), "no layer named 'q_porj'"),
        (new(4, ("q proj",)), "targets.*: "),
        (new(4, optimizer=True), "a new adapter has no such state"),
        (of_folder(tmp_path / "nowhere"), "no adapter_config.json"),
        (of_folder(saved, rank=5), "rank is 5, but this adapter has rank 4"),
        (of_folder(other, optimizer=True), "the optimizer's state cannot be read"),
        (of_folder(damaged(t0.save(tmp_path / "third", optimizer=False))), "its checksum is"),
    ]
    for order, why in wrong:
        with pytest.raises(WindfallError, match=why):
            t0.load(order)
    too_large = given((3, 100_000), (1,), (1.0,))
    too_long = given([3] * 9000, (1,), (1.0,))
    for samples, why in (([too_large], "token 100000 is not one"), ([too_long], "more than the model's context")):
        with pytest.raises(WindfallError, match=why):
            t0.forward_backward(samples, CROSS_ENTROPY)
    with pytest.raises(WindfallError, match="is not one of"):
        t0.forward([given((3, 4), (1,), (1.0,), (), (100_000,))], CROSS_ENTROPY)
    with pytest.raises(WindfallError, match="has no algorithm"):
        t0.forward_backward(draw(1), None)
    with pytest.raises(WindfallError, match="top_k = 5000"):
        t0.score([[1, 2]], 5000)
    with pytest.raises(WindfallError, match="no slot to sample from"):
        t0.check_publish(1)
    s0.load(of_folder(saved))
    for work in (lambda: s0.optim_step(ADAM), lambda: base.forward(draw(1), CROSS_ENTROPY)):
        with pytest.raises(WindfallError, match="nothing is trained in it"):
            work()
    with pytest.raises(WindfallError, match="a frozen policy has no adapter"):
        base.load(new(4))
    s0.clear()
    assert same(tensors(t0), before)
    assert {name for name, _ in t0._module.model.named_parameters()} == parameters
    twin = made["t1"]
    twin.load(of_folder(saved, optimizer=True))
    twin.forward_backward(draw(5), CROSS_ENTROPY)
    assert t0.optim_step(ADAM).grad_norm == twin.optim_step(ADAM).grad_norm, "the gradient is still there, once"
    assert same(tensors(t0), tensors(twin))


def test_adapter_of_another_base_is_refused(tmp_path: Path) -> None:
    t0 = slots()["t0"]
    t0.load(new(4))
    saved = t0.save(tmp_path / "saved", optimizer=False)
    state = saved / "windfall" / "state.json"
    fields = json.loads(state.read_text())
    fields["base"]["digest"] = "another"
    state.write_text(json.dumps(fields))
    rewrite_checksums(saved)
    with pytest.raises(WindfallError, match="not those that this adapter was trained with"):
        t0.load(of_folder(saved))


@pytest.mark.parametrize(
    ("policies", "why"),
    [
        ({"t0": {"slot": "train", **LIMIT}}, "slots need a frozen policy of their model"),
        ({"base": {"frozen": True}, "t0": {"slot": "train"}}, "slots are for adapters"),
        ({"base": {"frozen": True}, "t0": {"slot": "train", "lora": {"targets": ["q_proj"]}}}, "with each adapter"),
        ({"base": {"frozen": True}, "t0": {"slot": "train", "lora": {"alpha": 3.0}}}, "a slot begins empty"),
        ({"base": {"frozen": True}, "t0": {"slot": "train", "frozen": True, **LIMIT}}, "excludes 'frozen'"),
        ({**POLICIES, "solver": LIMIT}, "the recipe trains 'solver'"),
    ],
)
def test_recipe_with_wrong_slots_is_refused(policies: dict[str, Any], why: str) -> None:
    with pytest.raises(WindfallError, match=why):
        parse_recipe({"model": {"path": "tiny"}, "policies": policies}, where="test")


@pytest.mark.parametrize("key", ["ranks", "offload"])
def test_slots_are_for_one_rank(key: str) -> None:
    train = {"train": {key: 2 if key == "ranks" else True}}
    with pytest.raises(WindfallError, match="slots are for a trainer with one rank"):
        parse_recipe({"model": {"path": "tiny"}, "policies": POLICIES, **train}, where="test")
