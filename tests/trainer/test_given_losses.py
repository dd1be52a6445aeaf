"""Given losses: values and gradients as torch differentiates them in float64, sums that add up, settings per update."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.support.ranks.rank_processes import run_ranks
from tests.trainer.ranks.test_ranks import Collector, make_parts, make_trainer
from windfall import algorithms
from windfall.algorithms.base import SampledTokens
from windfall.algorithms.given import Loss, LossName
from windfall.errors import WindfallError
from windfall.link import messages as m
from windfall.recipe.file import parse_recipe
from windfall.run.own_loop import OpenedPolicy, open_policy
from windfall.trainer.ranks.ranks import TrainerRanks
from windfall.trainer.trainer import TorchTrainer
from windfall.training import Adam, CheckpointState, Sample, check_given, given

LOSSES = (
    Loss(name="cross_entropy"),
    Loss(name="importance_sampling"),
    Loss(name="ppo"),
    Loss(name="ppo", clip_low=0.5, clip_high=3.0),
    Loss(name="cispo"),
    Loss(name="cispo", clip_low=0.0, clip_high=5.0),
    Loss(name="dro"),
    Loss(name="dro", beta=0.7),
)
"""Every loss, with its defaults and with other parameters."""


def plain(loss: Loss, logp: Tensor, q: Tensor, a: Tensor) -> Tensor:
    """The losses as they are defined, in torch."""
    r = torch.exp(logp - q)
    clipped = torch.clamp(r, loss.clip_low, loss.clip_high)
    match loss.name:
        case "cross_entropy":
            return -(logp * a).sum()
        case "importance_sampling":
            return -(r * a).sum()
        case "ppo":
            return -torch.minimum(r * a, clipped * a).sum()
        case "cispo":
            return -(clipped.detach() * logp * a).sum()
        case "dro":
            return -(logp * a - 0.5 * loss.beta * (logp - q) ** 2).sum()


def alone(name: str = "llama", **sections: Any) -> TorchTrainer:
    recipe = parse_recipe(sections, where="test")
    return TorchTrainer(make_parts(name)[0], algorithms.make(recipe.algorithm.name), recipe, micro_tokens=64)


def draw(seed: int, count: int) -> list[Sample]:
    """Sequences with gaps between their targets, targets of weight 0 and ratios on both sides of the clips."""
    rng = np.random.default_rng(seed)
    out = []
    for _ in range(count):
        ids = rng.integers(0, 61, int(rng.integers(4, 30))).tolist()
        targets = sorted(rng.choice(np.arange(1, len(ids)), int(rng.integers(1, len(ids))), replace=False).tolist())
        a = rng.normal(size=len(targets)) * (rng.random(len(targets)) < 0.8)
        out.append(given(ids, targets, a.tolist(), rng.normal(-4.1, 0.5, len(targets)).tolist()))
    return out


def reference(model: Any, samples: Sequence[Sample], loss: Loss) -> tuple[float, list[np.ndarray]]:
    """Loss and log-probs of a model in float64, one sequence at a time. Adds the gradients to the model."""
    total, logprobs = 0.0, []
    for s in samples:
        rows = torch.tensor(s.targets)
        logits = model(input_ids=torch.tensor([s.ids]), use_cache=False).logits[0, rows - 1]
        logp = torch.log_softmax(logits, -1)[torch.arange(len(rows)), torch.tensor(s.ids)[rows]]
        assert s.advantages is not None
        value = plain(loss, logp, torch.tensor(s.behavior), torch.tensor(s.advantages))
        value.backward()
        total += value.item()
        logprobs.append(logp.detach().numpy())
    return total, logprobs


def in_float64(name: str) -> tuple[Any, Any]:
    """The model of a trainer of the same name as transformers computes it, in float64, and its adapters."""
    model, adapters = make_parts(name)
    model.set_attn_implementation("eager")
    return model.double(), adapters


def norms(mine: Any, theirs: Any) -> float:
    """The largest difference between the gradients of two models, relative to the gradient's norm."""
    ours, other = dict(mine.named_parameters()), dict(theirs.named_parameters())
    whole = max(float(p.grad.norm()) for p in other.values() if p.grad is not None)
    assert whole > 0
    trained = [n for n, p in ours.items() if p.grad is not None]
    assert trained
    return max(float((ours[n].grad.double() - other[n].grad).norm()) for n in trained) / whole


def test_all_losses_are_tested() -> None:
    assert {loss.name for loss in LOSSES} == set(get_args(LossName))


@pytest.mark.parametrize("loss", LOSSES, ids=str)
def test_weights_are_the_gradient_of_the_value(loss: Loss) -> None:
    rng = np.random.default_rng(1)
    now, q, a = rng.normal(-2, 1, 200), rng.normal(-2, 1, 200), rng.normal(size=200) * (rng.random(200) < 0.8)
    logp = torch.tensor(now, requires_grad=True)
    value = plain(loss, logp, torch.tensor(q), torch.tensor(a))
    value.backward()
    tokens = SampledTokens(logp=now, proximal=q, advantage=a)
    assert loss.value(tokens) == pytest.approx(value.item(), rel=1e-12)
    assert logp.grad is not None
    np.testing.assert_allclose(loss.weights(tokens), -logp.grad.numpy(), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", ["llama", "qwen3 adapters"])
@pytest.mark.parametrize("loss", LOSSES, ids=str)
def test_trainer_computes_what_transformers_computes_in_float64(name: str, loss: Loss) -> None:
    """The recipe's temperature is not that of a given loss, nor has the recipe's algorithm a part in it."""
    samples = draw(2, 9)
    twin, adapters = in_float64(name)
    value, logprobs = reference(twin, samples, loss)
    t = alone(name, rollout={"temperature": 0.7}, algorithm={"name": "dapo"})
    found = t.forward_backward(samples, loss)
    for ours, theirs in zip(found, logprobs, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=2e-5)
    assert sum(loss.value(s.tokens(logp)) for s, logp in zip(samples, found, strict=True)) == pytest.approx(
        value, abs=1e-3
    )
    assert norms(t.model, twin) < 2e-5
    assert (adapters is None) == ("adapters" not in name)
    scored = t.forward(samples, loss)
    for s, logp in zip(scored, found, strict=True):
        assert s.old is not None
        np.testing.assert_allclose(s.old, logp, atol=2e-5)


def test_calls_add_up_and_the_order_does_not_matter() -> None:
    samples, loss = draw(3, 9), Loss(name="ppo")
    once, parts = alone(), alone()
    whole = once.forward_backward(samples, loss)
    reverse = [parts.forward_backward([s], loss)[0] for s in reversed(samples)]
    for ours, theirs in zip(whole, reversed(reverse), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=2e-6)
    assert norms(once.model, parts.model) < 1e-6
    reports = [t.optim_step() for t in (once, parts)]
    assert reports[0].tokens == reports[1].tokens == sum(len(s.targets) for s in samples)
    assert reports[0].grad_norm == pytest.approx(reports[1].grad_norm, rel=1e-5)
    assert reports[0].responses == 9


def test_losses_of_several_kinds_add_up_but_not_with_the_algorithm() -> None:
    samples = draw(4, 4)
    both, first, second = alone(), alone(), alone()
    both.forward_backward(samples, LOSSES[0])
    both.forward_backward(samples, LOSSES[-1])
    first.forward_backward(samples, LOSSES[0])
    second.forward_backward(samples, LOSSES[-1])
    for p, a, b in zip(*(t.model.parameters() for t in (both, first, second)), strict=True):
        torch.testing.assert_close(p.grad, a.grad + b.grad, rtol=1e-5, atol=1e-6)
    of_recipe = Sample(ids=(1, 2, 3), targets=(2,), behavior=np.full(1, -4.0), advantage=1.0, limit=8)
    both.forward_backward([of_recipe])
    with pytest.raises(WindfallError, match="both the gradient of a given loss"):
        both.optim_step()


def test_gradient_is_a_sum_and_weights_of_zero_have_none() -> None:
    (sample,) = draw(5, 1)
    assert sample.advantages is not None
    t, twice = alone(), alone()
    t.forward_backward([sample], LOSSES[0])
    twice.forward_backward([sample, sample], LOSSES[0])
    assert twice.optim_step().grad_norm == pytest.approx(2 * t.optim_step().grad_norm, rel=1e-5)
    nothing = given(sample.ids, sample.targets, [0.0] * len(sample.targets))
    without = given(sample.ids, (), ())
    found = t.forward_backward([nothing, without], LOSSES[0])
    assert [len(logp) for logp in found] == [len(sample.targets), 0]
    assert t.optim_step().skipped == "nothing"


def test_settings_of_an_update_are_those_of_torch() -> None:
    """Also after an update with those of the recipe, which have no part in the next one."""
    t, samples = alone(train={"lr": 3e-3, "weight_decay": 0.2, "clip_norm": 0.5}), draw(6, 5)
    twin = make_parts("llama")[0]
    adamw = torch.optim.AdamW(twin.parameters())
    steps = (
        Adam(lr=1e-2, betas=(0.8, 0.99), eps=1e-3, weight_decay=0.1),
        None,
        Adam(lr=2e-3, betas=(0.9, 0.95), eps=1e-12, clip_norm=0.1),
    )
    for adam in steps:
        t.forward_backward(samples, LOSSES[0])
        for ours, theirs in zip(t.model.parameters(), twin.parameters(), strict=True):
            theirs.grad = ours.grad.clone()
        report = t.optim_step(adam)
        used = adam or Adam(lr=3e-3, betas=(0.9, 0.95), weight_decay=0.2, clip_norm=0.5)
        adamw.param_groups[0].update(lr=used.lr, betas=used.betas, eps=used.eps, weight_decay=used.weight_decay)
        norm = torch.nn.utils.clip_grad_norm_(twin.parameters(), used.clip_norm or 1e9)
        assert report.grad_norm == pytest.approx(float(norm), rel=1e-5)
        assert report.lr == used.lr
        adamw.step()
        for ours, theirs in zip(t.model.parameters(), twin.parameters(), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def work(ranks: TrainerRanks, name: str) -> Any:
    """One update with every loss. From rank 0: log-probs, log-probs of `forward`, gradients, report, weights."""
    t = make_trainer(name, ranks)
    collector = Collector(t)
    if not ranks.first:
        t.orders.follow()
        return None
    found = [
        t.forward_backward(draw(n, count), loss) for n, (loss, count) in enumerate(zip(LOSSES, (9, 1) * 4, strict=True))
    ]
    scored = [s.old for s in t.forward(draw(0, 3), LOSSES[0])]
    gradients = t.orders.call(collector.gradients)
    report = t.optim_step(Adam(lr=1e-2, betas=(0.8, 0.99), weight_decay=0.1, clip_norm=1.0))
    weights = t.orders.call(collector.weights)
    t.orders.stop()
    return [found, scored, gradients, (report.grad_norm, report.tokens), weights]


@pytest.mark.parametrize("name", ["qwen3", "qwen3 adapters"])
def test_several_ranks_give_what_one_gives(name: str) -> None:
    (one,), (two, _) = run_ranks(1, work, name), run_ranks(2, work, name)
    torch.testing.assert_close(two[:2], one[:2], rtol=1e-5, atol=1e-5)
    assert two[3] == pytest.approx(one[3], rel=1e-5)
    for part in (2, 4):
        assert two[part].keys() >= one[part].keys()
        for n, t in one[part].items():
            torch.testing.assert_close(two[part][n], t, rtol=1e-3, atol=1e-4)


def play(folder: Path, again: int) -> list[Any]:
    """Two updates with a given loss; every call is made `again` times with its id."""
    recipe = parse_recipe(
        {
            "run": {"name": "own", "folder": str(folder), "device": "cpu", "threads": 1},
            "model": {"path": "tiny"},
        },
        where="test",
    )

    async def loop(opened: OpenedPolicy) -> list[Any]:
        out: list[Any] = []
        for step in (1, 2):
            for _ in range(again):
                gradient = await opened.policy.forward_backward(draw(step, 4), LOSSES[2], id=f"{step}/a")
                more = await opened.policy.forward_backward(draw(step + 7, 2), LOSSES[0], id=f"{step}/b")
                scored = await opened.policy.forward(draw(step, 2), LOSSES[0], id=f"{step}/c")
            for _ in range(again):
                state = CheckpointState(step=step, next_task=0)
                report = await opened.policy.optim_step(state, Adam(lr=1e-3), id=f"{step}/step")
            out += [*gradient.logprobs, gradient.loss, more.loss, *(s.old for s in scored), report.grad_norm, report.lr]
            await opened.policy.publish(id=f"{step}/publish")
        return out

    async def run() -> list[Any]:
        async with open_policy(recipe) as opened:
            return await loop(opened)

    return asyncio.run(asyncio.wait_for(run(), 200))


def test_calls_repeated_with_their_ids_do_nothing_twice(tmp_path: Path) -> None:
    once, thrice = (play(tmp_path / str(again), again) for again in (1, 3))
    assert len(once) == len(thrice)
    for a, b in zip(once, thrice, strict=True):
        np.testing.assert_array_equal(a, b)
    assert once[-1] == 1e-3


@pytest.mark.parametrize(
    ("sample", "why"),
    [
        (given((1, 2, 3), (1, 2), (1.0,), (-1.0, -1.0)), "1 weights or advantages for 2 targets"),
        (given((1, 2, 3), (1, 2), (1.0, 1.0)), "ppo needs the log-prob of each target"),
        (given((1, 2, 3), (0,), (1.0,), (-1.0,)), "not a position from 1 to 2"),
        (given((1, 2, 3), (3,), (1.0,), (-1.0,)), "not a position from 1 to 2"),
    ],
)
def test_sample_that_does_not_fit_its_loss_is_refused(sample: Sample, why: str) -> None:
    with pytest.raises(WindfallError, match=why) as e:
        check_given(sample, Loss(name="ppo"), "sample 0")
    assert e.value.where == "sample 0"


def test_messages_keep_losses_and_settings() -> None:
    (sample,) = draw(1, 1)
    sent = m.ForwardBackward(id="1", samples=(sample,), loss=Loss(name="cispo", clip_high=4.0))
    received = m.decoder(m.ToTrainer)(m.encode(sent))
    assert received.loss == sent.loss
    np.testing.assert_array_equal(received.samples[0].advantages, sample.advantages)
    step = m.OptimStep(id="2", adam=Adam(lr=1e-3, betas=(0.5, 0.6)))
    assert m.decoder(m.ToTrainer)(m.encode(step)) == step
