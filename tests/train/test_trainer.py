"""The contract of a trainer: gradients as in the formulas, in any order; log-probs that agree with the engine."""

from __future__ import annotations

import copy
import random
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from windfall import algorithms, config
from windfall.engine.torch.engine import TorchEngine
from windfall.errors import WindfallError
from windfall.models import load
from windfall.train import head, logprobs
from windfall.train import trainer as trainer_module
from windfall.train.gradients import Gradients
from windfall.train.optimizer import Optimizer
from windfall.train.policy import Policy
from windfall.train.sample import Sample, credit, outcomes, packs
from windfall.train.trainer import TorchTrainer
from windfall.types import Group, Request, Response, Task


@cache
def start_model() -> Any:
    """The model as every test finds it: the demo's first two layers. Nothing changes it."""
    torch.set_num_threads(1)
    model = load.load("tiny", dtype="float32", device="cpu")
    del model.model.layers[2:]
    model.config.num_hidden_layers = 2
    return model


@pytest.fixture
def model() -> Any:
    return copy.deepcopy(start_model())


@cache
def samples(count: int = 10) -> tuple[Sample, ...]:
    """Real responses of the model, sampled by the engine, with random advantages."""
    rng, engine = random.Random(0), TorchEngine(start_model(), kv_tokens=4096)
    requests = [
        Request(id=str(i), prompt=tuple(rng.randrange(3, 13) for _ in range(rng.randint(1, 20))), seed=i,
                max_tokens=rng.randint(1, 50))
        for i in range(count)
    ]  # fmt: skip
    generated: dict[str, list[tuple[int, float]]] = {r.id: [] for r in requests}
    for r in requests:
        engine.add(r)
    while len(engine):
        for c in engine.step():
            generated[c.id] += zip(c.tokens, c.logprobs, strict=True)
    return tuple(
        Sample(
            ids=(*r.prompt, *(t for t, _ in generated[r.id])),
            targets=tuple(range(len(r.prompt), len(r.prompt) + len(generated[r.id]))),
            behavior=np.array([lp for _, lp in generated[r.id]]),
            advantage=rng.uniform(-1, 1),
            limit=50,
        )
        for r in requests
    )


def recipe(**sections: Any) -> config.Recipe:
    return config.parse(sections, where="test")


def trainer(model: Any, name: str = "grpo", micro_tokens: int = 256, **sections: Any) -> TorchTrainer:
    return TorchTrainer(model, algorithms.make(name), recipe(**sections), micro_tokens=micro_tokens)


def gradients(t: TorchTrainer) -> torch.Tensor:
    return torch.cat([p.grad.flatten() for p in t.model.parameters() if p.grad is not None]).clone()


def test_engine_that_computes_another_model_is_detected_before_the_update(model: Any) -> None:
    """Such a run, with log-probs 1.2 nats apart on average, once ended with status 0."""
    made = [replace(s, behavior=s.behavior - 1.2) for s in samples(4)]
    t = trainer(model)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    t.accumulate(made)
    with pytest.raises(WindfallError, match=r"engine and trainer disagree .* differ by 1\.2 nats") as failed:
        t.finish()
    assert failed.value.where == "train.engine_gap_limit"
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters()), "the weights must not change"
    allowed = trainer(model, train={"engine_gap_limit": 1.5})
    allowed.accumulate(made)
    assert allowed.finish().engine_gap == pytest.approx(1.2, abs=1e-3)


def test_logprobs_equal_those_of_the_engine_to_1e_5(model: Any) -> None:
    made = samples(16)
    for pack in packs(made, 300):
        logp, _ = logprobs.Learner(model).score(pack, 1.0)
        # Relative for very unlikely tokens: float32 has a precision of only 1e-6 at a log-prob of -10.
        ours, theirs = logp.detach().numpy(), np.concatenate([s.behavior for s in pack])
        assert np.allclose(ours, theirs, atol=1e-5, rtol=1e-5)
        assert np.abs(ours - theirs).mean() < 1e-6


def test_tiles_do_not_change_the_gradient(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Several responses in a tile, a response split into several, or all at once: the gradient equals that of
    autograd."""
    made = samples(5)
    weights = np.random.default_rng(0).normal(size=sum(len(s.targets) for s in made))
    logp, entropy = reference_logprobs(model, made, 0.7)
    (-torch.from_numpy(weights).float() * logp).sum().backward()
    expected = {n: p.grad.clone() for n, p in model.named_parameters()}
    for rows in (7, 60, 10_000):
        model.zero_grad()
        monkeypatch.setattr(head, "CPU_LOGITS", rows * model.config.vocab_size)
        sizes, seen = np.cumsum([0, *(len(s.targets) for s in made)]), []

        def weigh(first: int, last: int, *numbers: Any, sizes: Any = sizes, seen: list[Any] = seen) -> Any:
            seen.append(np.stack(numbers))
            return weights[sizes[first] : sizes[last]]

        logprobs.Learner(model, Gradients(model)).learn(made, 0.7, weigh)
        ours, theirs = np.concatenate(seen, 1), torch.stack((logp, entropy)).detach().numpy()
        assert np.allclose(ours, theirs, atol=1e-5)
        for n, p in model.named_parameters():
            assert (p.grad - expected[n]).norm() < 1e-5 * expected[n].norm(), n


def reference_logprobs(model: Any, made: Sequence[Sample], temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probs and entropies with the attention of transformers, one sequence at a time."""
    implementation, parts = model.config._attn_implementation, []
    model.set_attn_implementation("eager")
    for s in made:
        logp = torch.log_softmax(model(torch.tensor([s.ids])).logits[0] / temperature, -1)[[t - 1 for t in s.targets]]
        mine = logp.gather(1, torch.tensor([[s.ids[t]] for t in s.targets]))[:, 0]
        parts.append((mine, -(logp.exp() * logp).sum(-1)))
    model.set_attn_implementation(implementation)
    return torch.cat([p for p, _ in parts]), torch.cat([e for _, e in parts])


def test_gradient_equals_that_of_the_textbook_loss(model: Any) -> None:
    """On-policy GRPO, written out with the forward pass of transformers, one response at a time."""
    made = samples()
    t = trainer(model, algorithm={"importance_cap": 1e9})
    t.accumulate(made)
    ours = gradients(t) / len(made)
    model.zero_grad()
    model.set_attn_implementation("eager")
    losses = []
    for s in made:
        logits = model(torch.tensor([s.ids])).logits[0]
        logp = torch.log_softmax(logits, -1)[[i - 1 for i in s.targets], [s.ids[i] for i in s.targets]]
        ratio = (logp - logp.detach()).exp()
        weight = (logp.detach() - torch.from_numpy(s.behavior).float()).exp()
        losses.append(-(weight * ratio * s.advantage).mean())
    torch.stack(losses).mean().backward()
    oracle = torch.cat([p.grad.flatten() for p in model.parameters()])
    assert torch.allclose(ours, oracle, atol=1e-6, rtol=1e-3)


@pytest.mark.parametrize("name", sorted(algorithms.ALGORITHMS))
def test_gradient_equals_the_formulas_in_the_docs(model: Any, name: str) -> None:
    """docs/algorithms.md written out in plain torch: surrogate, truncated importance, KL; for the second update of a
    step, on responses with tokens of the environment between those of the policy."""
    kl, cap, options = 0.3, 1.05, {"clip_high": 0.01} if name in ("dapo", "cispo", "gspo") else {}
    rng = np.random.default_rng(1)
    made = [replace(s, targets=tuple(t for n, t in enumerate(s.targets) if n % 5 != 3 or n == 0)) for s in samples(6)]
    made = [
        replace(s, behavior=(old := _plain(model, s).detach().double().numpy()) + rng.normal(0, 0.05, len(old)),
                old=old + rng.normal(0, 0.03, len(old)))
        for s in made
    ]  # fmt: skip
    reference = copy.deepcopy(start_model())
    with torch.no_grad():
        for p in reference.parameters():
            p.add_(0.02 * torch.randn(p.shape, generator=torch.Generator().manual_seed(p.numel())))
    sections = {"kl": kl, "importance_cap": cap}
    t = TorchTrainer(
        model, algorithms.make(name, **options), recipe(algorithm=sections), micro_tokens=256, reference=reference
    )
    t.accumulate(made)
    ours = gradients(t) / t._totals.divisor
    model.zero_grad()
    terms = [_textbook(name, options, s, _plain(model, s), _plain(reference, s).detach(), cap) for s in made]
    lengths, limit = torch.tensor([len(s.targets) for s in made]), made[0].limit
    surrogate, k3 = [torch.stack(column) for column in zip(*terms, strict=True)]
    if name in ("dapo", "reinforce_pp", "cispo"):  # a mean over all tokens of the mini-batch
        loss = (surrogate.sum() + kl * k3.sum()) / lengths.sum()
    else:  # a mean over its responses; the KL of each is its mean over tokens
        scale = {"grpo": lengths, "gspo": 1, "rloo": 1, "dr_grpo": limit}[name]
        loss = (surrogate / scale).mean() + kl * (k3 / lengths).mean()
    loss.backward()
    oracle = torch.cat([p.grad.flatten() for p in model.parameters()])
    assert (ours - oracle).norm() < 1e-4 * oracle.norm()


def _plain(model: Any, s: Sample) -> torch.Tensor:
    logp, _ = reference_logprobs(model, [s], 1.0)
    return logp


def _textbook(
    name: str, options: dict[str, float], s: Sample, logp: torch.Tensor, ref: torch.Tensor, cap: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sums over the sampled tokens of a response: of the surrogate loss, and of k3."""
    old, behavior, advantage = torch.tensor(s.old).float(), torch.tensor(s.behavior).float(), s.advantage
    trust = (old - behavior).exp().clamp(max=cap)
    ratio = (logp - old).exp()
    low, high = {"dapo": (0.2, 0.28), "gspo": (3e-4, 4e-4), "cispo": (1.0, 4.0)}.get(name, (0.2, 0.2))
    high = options.get("clip_high", high)
    match name:
        case "rloo":
            surrogate = trust * advantage * logp
        case "cispo":
            surrogate = trust * ratio.detach().clamp(1 - low, 1 + high) * advantage * logp
        case "gspo":
            # Each token has an equal part of the ratio of the response, s_i / |y_i|, with the gradient of its log-prob.
            sequence_ratio = (logp - old).mean().exp()
            part = sequence_ratio.detach() * (logp - logp.detach()).exp() / len(logp)
            clips = sequence_ratio > 1 + high if advantage > 0 else sequence_ratio < 1 - low
            surrogate = trust * part * advantage * float(not clips)
        case _:
            surrogate = trust * torch.minimum(ratio * advantage, ratio.clamp(1 - low, 1 + high) * advantage)
    difference = ref - logp
    return -surrogate.sum(), (difference.exp() - difference - 1).sum()


@pytest.mark.parametrize("name", sorted(algorithms.ALGORITHMS))
def test_any_order_and_any_split_give_the_same_gradient(model: Any, name: str) -> None:
    made = samples(12)
    at_once = trainer(model, name, micro_tokens=10_000)
    at_once.accumulate(made)
    expected, divisor = gradients(at_once), at_once._totals.divisor
    shuffled = list(made)
    random.Random(3).shuffle(shuffled)
    model.zero_grad()
    pieces = trainer(model, name, micro_tokens=120)
    for i in range(0, 12, 4):
        pieces.accumulate(shuffled[i : i + 4])
    assert pieces._totals.divisor == pytest.approx(divisor)
    assert torch.allclose(gradients(pieces), expected, atol=2e-5, rtol=1e-3)


def test_samples_without_advantage_are_reported_and_need_no_backward_pass(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This is the case for groups with equal rewards: half of the groups at the end of the demo."""
    made = samples()
    some = [s if i % 2 else replace(s, advantage=0.0) for i, s in enumerate(made)]
    calls: list[int] = []
    backward = torch.Tensor.backward
    monkeypatch.setattr(torch.Tensor, "backward", lambda *args: (calls.append(1), backward(*args)))
    gradients = []
    for given in (some, [s for s in some if s.advantage]):
        t = TorchTrainer(model, algorithms.make("grpo"), recipe(), micro_tokens=4096)
        t.accumulate(given)
        gradients.append([g.clone() for g in t.optimizer.gradients.all()])
        assert len(calls) == 1
        assert t.finish().responses == len(given)
        calls.clear()
        model.load_state_dict(start_model().state_dict())
    for a, b in zip(*gradients, strict=True):
        torch.testing.assert_close(a, b)
    fresh = TorchTrainer(model, algorithms.make("grpo"), recipe(), micro_tokens=4096)
    model.zero_grad()
    for each in (fresh, t):  # before the first gradient, and after
        each.accumulate([replace(s, advantage=0.0) for s in made])
        assert not calls
        report = each.finish()
        assert report.tokens == sum(len(s.targets) for s in made)
        assert report.grad_norm == 0
        assert report.skipped == "nothing"


def test_several_updates_use_the_policy_at_the_start_of_the_step(model: Any) -> None:
    made = samples(8)
    t = trainer(model, train={"lr": 5e-3})
    prepared = t.prepare(made)
    assert all(np.allclose(p.old, p.behavior, atol=1e-5, rtol=1e-5) for p in prepared if p.old is not None)
    t.accumulate(prepared)
    first = t.finish()
    t.accumulate(prepared)
    second = t.finish()
    assert first.clipped == 0
    assert second.clipped > 0  # the policy has moved away from `old`, so tokens are clipped
    assert second.engine_gap == pytest.approx(first.engine_gap)  # `old` has not changed


def test_kl_pulls_the_policy_to_the_reference(model: Any) -> None:
    made = [replace(s, advantage=0.0) for s in samples()]
    reference = copy.deepcopy(start_model())
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.02 * torch.randn_like(p))
    t = TorchTrainer(
        model, algorithms.make("grpo"), recipe(algorithm={"kl": 1.0}, train={"lr": 1e-3, "engine_gap_limit": 9.0}),
        micro_tokens=256, reference=reference,
    )  # fmt: skip
    distances = []
    for _ in range(8):
        t.accumulate(made)
        distances.append(t.finish().kl)
    assert distances[-1] < 0.7 * distances[0]


@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_non_finite_logprobs_exceed_any_limit(model: Any, value: float) -> None:
    made = samples(4)
    t = trainer(model, train={"engine_gap_limit": 1e6})
    t.accumulate([replace(made[0], behavior=np.full_like(made[0].behavior, value)), *made[1:]])
    with pytest.raises(WindfallError, match="cannot be compared, because some are not finite"):
        t.finish()


def test_non_finite_gradient_is_not_used(model: Any) -> None:
    made = samples(4)
    before = {n: p.clone() for n, p in model.named_parameters()}
    t = trainer(model)
    t.accumulate([replace(made[0], advantage=float("inf")), *made[1:]])
    assert t.finish().skipped == "not finite"
    assert all(torch.equal(p, before[n]) for n, p in model.named_parameters())
    t.accumulate(made)
    assert not t.finish().skipped


def test_update_without_advantages_changes_no_weight(model: Any, tmp_path: Path) -> None:
    """Neither momentum nor weight decay moves the weights; only the schedule continues. The same holds after a
    resume."""
    made = samples(4)
    t = trainer(model, train={"lr": 1e-2, "weight_decay": 0.1, "schedule": "linear", "engine_gap_limit": 1e6})
    t.accumulate(made)
    assert t.finish().skipped == ""
    state = {name: shard.local.clone() for name, shard in t.optimizer.state().items()}
    before = {n: p.clone() for n, p in model.named_parameters()}
    for without in ([replace(s, advantage=0.0) for s in made], []):
        rate = t.optimizer.rate()
        t.accumulate(without)
        report = t.finish()
        assert (report.skipped, report.grad_norm) == ("nothing", 0.0)
        assert all(torch.equal(p, before[n]) for n, p in model.named_parameters())
        assert t.optimizer.rate() < rate
    after = t.optimizer.state()
    assert all(torch.equal(after[name].local, value) for name, value in state.items() if name != "updates")
    again = trainer(copy.deepcopy(start_model()), train=t.optimizer.options.model_dump())
    again.model.load_state_dict(model.state_dict())
    t.write_optimizer(tmp_path / "optimizer.safetensors")
    again.restore_optimizer(tmp_path / "optimizer.safetensors")
    for one in (t, again):
        one.accumulate(made)
        assert one.finish().skipped == ""
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.model.parameters(), strict=True))


def test_activation_checkpointing_changes_no_gradient(model: Any) -> None:
    made = samples(6)
    plain = trainer(model)
    plain.accumulate(made)
    expected = gradients(plain)
    model.zero_grad()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    t = trainer(model)
    t.accumulate(made)
    assert torch.allclose(gradients(t), expected, atol=1e-6, rtol=1e-4)


def test_bfloat16_has_float32_masters() -> None:
    """A change too small for bfloat16 is not lost: the master accumulates it."""
    layer = torch.nn.Linear(4, 4, bias=False).bfloat16()
    torch.nn.init.ones_(layer.weight)
    o = Optimizer(layer, config.Train(lr=1e-4, clip_norm=1e9), total_updates=100)
    for _ in range(50):
        layer(torch.ones(1, 4, dtype=torch.bfloat16)).sum().backward()
        o.update(1.0)
    assert layer.weight.dtype == torch.bfloat16
    assert o.state()["master.weight"].local.mean().item() == pytest.approx(1 - 50e-4, rel=1e-4)
    assert layer.weight.float().mean().item() == pytest.approx(1 - 50e-4, abs=0.004)


def test_learning_rate_schedules() -> None:
    layer = torch.nn.Linear(1, 1)
    rates = {}
    for kind in ("constant", "linear", "cosine"):
        o = Optimizer(layer, config.Train(lr=1.0, warmup=2, schedule=kind), total_updates=10)
        rates[kind] = []
        for _ in range(10):
            rates[kind].append(o.rate())
            o.updates += 1
    assert all(r[:2] == [0.5, 1.0] for r in rates.values())
    assert rates["constant"][2:] == [1.0] * 8
    assert rates["linear"][2:] == pytest.approx([1 - i / 8 for i in range(8)])
    assert rates["cosine"][6] == pytest.approx(0.5)


def test_credit_skips_responses_without_reward_and_trains_only_on_sampled_tokens() -> None:
    def response(i: int, reward: float | None) -> Response:
        return Response(id=f"0/{i}", prompt=(5, 6), tokens=(7, 8, 9), logprobs=(-1.0, 0.0, -2.0),
                        sampled=(True, False, True), versions=(0, -1, 0), finish="stop", reward=reward)  # fmt: skip

    group = Group(
        index=0, task=Task(id="t", prompt=""), responses=(response(0, 1.0), response(1, None), response(2, 0.0))
    )
    (made,) = credit([group], algorithms.make("dr_grpo"), limit=10)
    assert [s.advantage for s in made] == [0.5, -0.5]
    assert [(o.length, o.observed) for o in outcomes(group, 10)] == [(2, 1)] * 2
    assert made[0].targets == (2, 4)
    assert made[0].behavior.tolist() == [-1.0, -2.0]


def test_packs_contain_every_sample_once_within_the_budget(model: Any) -> None:
    made = samples(20)
    packed = packs(made, 100)
    assert sorted(id(s) for p in packed for s in p) == sorted(id(s) for s in made)
    assert all(len(p) == 1 or len(p) * max(len(s.ids) for s in p) <= 100 for p in packed)
    assert len(packs(made, 10**9)) == 1


def test_model_with_changed_logits_is_trained_on_them(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    forward, weight = model.forward, model.get_output_embeddings().weight

    def capped(*args: Any, **kwargs: Any) -> Any:
        out = forward(*args, **kwargs)
        out.logits = 3.0 * torch.tanh(out.logits / 3.0)
        return out

    monkeypatch.setattr(model, "forward", capped)
    (sample,) = samples(1)
    ids, at = torch.tensor([sample.ids]), torch.tensor(sample.targets)
    model.set_attn_implementation("eager")
    logp = torch.log_softmax(model(input_ids=ids).logits[0, at - 1] / 0.7, -1).gather(-1, ids[0, at][:, None])[:, 0]
    (-logp.sum()).backward()
    model.set_attn_implementation("windfall")
    theirs, gradients = weight.grad.clone(), Gradients(model)
    gradients.zero()
    learner = logprobs.Learner(model, gradients)
    torch.testing.assert_close(learner.score([sample], 0.7)[0], logp.detach(), atol=1e-5, rtol=0)
    learner.learn([sample], 0.7, lambda first, last, logp, entropy: np.ones(len(logp)))
    torch.testing.assert_close(weight.grad, theirs, atol=1e-5, rtol=1e-4)


def test_training_does_not_apply_dropout(model: Any) -> None:
    """Rollout does not apply it either; otherwise the trained policy would not be the one that generated."""
    mlp = model.model.layers[0].mlp
    mlp.down_proj = torch.nn.Sequential(mlp.down_proj, torch.nn.Dropout(0.5)).eval()
    made, found = samples(2), []
    for recomputed in (False, True):
        if recomputed:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        gradients = Gradients(model)
        gradients.zero()
        logprobs.Learner(model, gradients).learn(made, 1.0, lambda first, last, logp, entropy: np.ones(len(logp)))
        found.append(model.model.embed_tokens.weight.grad.clone())
        assert not any(m.training for m in model.modules())
    torch.testing.assert_close(*found)


def test_memory_and_random_state_are_those_of_the_device_that_computes(
    model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With train.offload, the weights are stored on another device than the one that computes."""
    computes = torch.device("cpu", 0)
    t, asked = trainer(Policy(model, device=computes)), list[torch.device]()
    assert t.model.device != computes
    for name in ("peak_bytes", "random_state", "set_random_state"):
        original = getattr(trainer_module, name)
        monkeypatch.setattr(trainer_module, name, lambda *a, of=original: (asked.append(a[-1]), of(*a))[1])
    t.accumulate(samples(2))
    t.finish()
    t.write_optimizer(tmp_path / "optimizer")
    t.restore_optimizer(tmp_path / "optimizer")
    assert asked == [computes] * 4
