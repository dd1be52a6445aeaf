"""Training on tokens of older versions: their lag, the decoupled loss through a real model, and the report."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from itertools import product
from typing import Any, Literal

import numpy as np
import pytest
import torch

from tests.support.quick_cases import quick_cases
from windfall import algorithms
from windfall.algorithms.base import Floats, SampledTokens
from windfall.algorithms.kl import k3, kl_weights
from windfall.controller.credit import credit
from windfall.errors import WindfallError
from windfall.models import load
from windfall.recipe.file import parse_recipe
from windfall.trainer.trainer import MIN_FRESH, TorchTrainer
from windfall.training import Sample
from windfall.types import Group, Response, Task

Mode = Literal["truncate", "mask", "off"]
VERSION = 7
"""The trainer's version: that of the unchanged model."""
LIMIT = 40
OPTIONS: dict[str, dict[str, Any]] = {
    "gspo": {"clip_low": 0.05, "clip_high": 0.05},
    "cispo": {"clip_high": 0.05},
    "dapo": {"clip_low": 0.03, "clip_high": 0.05},
    "rloo": {},
}
CLIP = {"clip": 0.05}
"""For the other algorithms: narrow, so that a single update clips some tokens."""


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


def logprobs(model: Any, ids: Sequence[int], targets: Sequence[int]) -> torch.Tensor:
    """Log-probs of the targets with the attention of transformers, for one sequence."""
    implementation = model.config._attn_implementation
    model.set_attn_implementation("eager")
    rows = torch.log_softmax(model(torch.tensor([list(ids)])).logits[0], -1)
    model.set_attn_implementation(implementation)
    return rows[[t - 1 for t in targets], [ids[t] for t in targets]]


@cache
def start_logprobs(ids: Sequence[int], targets: Sequence[int]) -> torch.Tensor:
    with torch.no_grad():
        return logprobs(start_model(), ids, targets).double()


@cache
def older_model(age: int) -> Any:
    """The model as it was `age` versions ago: with other weights. Nothing changes it."""
    other = copy.deepcopy(start_model())
    rng = torch.Generator().manual_seed(age)
    with torch.no_grad():
        for p in other.parameters():
            p.add_(0.05 * age * p.std(correction=0) * torch.randn(p.shape, generator=rng))
    return other


@cache
def groups(*, ages: Sequence[int], count: int = 4, size: int = 3) -> list[Group]:
    """Random responses with tokens of the environment between those of the policy. The sampled tokens of a response are
    split evenly among the versions, oldest first, and have the log-probs of their version."""
    rng = np.random.default_rng(3)
    models = {age: older_model(age) if age else start_model() for age in ages}

    def response(group: int, i: int) -> Response:
        prompt = tuple(rng.integers(3, 13, rng.integers(2, 8)).tolist())
        tokens = tuple(rng.integers(3, 13, rng.integers(6, 30)).tolist())
        sampled = tuple(n % 6 != 4 for n in range(len(tokens)))
        own = [ages[n * len(ages) // len(tokens)] for n in range(len(tokens))]
        spots = range(len(prompt), len(prompt) + len(tokens))
        with torch.no_grad():
            under = {age: logprobs(m, prompt + tokens, spots).double().tolist() for age, m in models.items()}
        return Response(
            id=f"{group}/{i}", prompt=prompt, tokens=tokens, sampled=sampled, finish="stop", reward=float(rng.normal()),
            logprobs=tuple(under[age][n] if s else 0.0 for n, (age, s) in enumerate(zip(own, sampled, strict=True))),
            versions=tuple(VERSION - age if s else -1 for age, s in zip(own, sampled, strict=True)),
        )  # fmt: skip

    return [
        Group(index=g, task=Task(id=str(g), prompt=""), responses=tuple(response(g, i) for i in range(size)))
        for g in range(count)
    ]


def make_samples(name: str = "grpo", *, ages: Sequence[int]) -> list[list[Sample]]:
    """One list per mini-batch; there are two."""
    made = credit(groups(ages=ages), algorithm(name), LIMIT, version=VERSION)
    return [[s for group in made[i::2] for s in group] for i in range(2)]


def algorithm(name: str) -> Any:
    return algorithms.make(name, **OPTIONS.get(name, CLIP))


def trainer(
    model: Any, name: str = "grpo", kind: type[TorchTrainer] = TorchTrainer, reference: Any = None, **sections: Any
) -> TorchTrainer:
    recipe = parse_recipe(sections, where="test")
    return kind(model, algorithm(name), recipe, micro_tokens=128, reference=reference)


def gradients(t: TorchTrainer) -> torch.Tensor:
    return torch.cat([p.grad.flatten() for p in t.model.parameters() if p.grad is not None]).clone()


# the loss


def textbook(name: str, sample: Sample, logp: torch.Tensor, proximal: torch.Tensor, mode: Mode, cap: float) -> Any:
    """The decoupled loss of one response, not yet divided by the normalizer of the mini-batch."""
    behavior, a, n = torch.tensor(sample.behavior), sample.advantage, len(sample.targets)
    options = OPTIONS.get(name, CLIP)
    low = options.get("clip_low", options.get("clip", 1.0))
    high = options.get("clip_high", options.get("clip", 0.0))

    def trust(ratio: torch.Tensor) -> torch.Tensor:
        if mode == "off":
            return torch.ones_like(ratio)
        if mode == "truncate":
            return torch.where(ratio > cap, cap, ratio)
        return torch.where((ratio > cap) | (ratio < 1 / cap), 0.0, ratio)

    v, u = trust((proximal - behavior).exp()), (logp - proximal).exp()
    ppo = v * torch.minimum(u * a, u.clamp(1 - low, 1 + high) * a)
    match name:
        case "grpo":
            return -ppo.mean()
        case "dr_grpo" | "dapo" | "reinforce_pp":
            return -ppo.sum()
        case "rloo":
            return -(v * a * logp).sum()
        case "cispo":
            return -(v * u.detach().clamp(1 - low, 1 + high) * a * logp).sum()
        case "gspo":
            s = ((logp - proximal).sum() / n).exp()
            whole = trust(((proximal - behavior).sum() / n).exp())
            return -whole * torch.minimum(s * a, s.clamp(1 - low, 1 + high) * a)
    raise AssertionError(name)


NAMES = sorted(algorithms.ALGORITHMS)
MODES = ("truncate", "mask", "off")


def divisor(name: str, part: Sequence[Sample]) -> float:
    match name:
        case "grpo" | "rloo" | "gspo":
            return len(part)
        case "dr_grpo":
            return len(part) * LIMIT
    return sum(len(s.targets) for s in part)


@pytest.mark.parametrize(
    ("name", "mode"), quick_cases(product(NAMES, MODES), quick=[(name, MODES[n % 3]) for n, name in enumerate(NAMES)])
)
def test_gradient_of_both_updates_of_a_step_equals_the_decoupled_loss(model: Any, name: str, mode: Mode) -> None:
    """Tokens of three versions; the second update starts from other weights than those at the start of the step."""
    cap = 1.1
    parts = make_samples(name, ages=(2, 1, 0))
    assert all(s.lag is not None and set(s.lag.tolist()) == {0, 1, 2} for part in parts for s in part)
    t = trainer(model, name, algorithm={"importance": mode, "importance_cap": cap}, train={"lr": 2e-3})
    prepared = [t.forward(part) for part in parts]
    reports = []
    for part in prepared:
        t.forward_backward(part)
        ours = gradients(t) / t._totals.sums["divisor"]
        plain = copy.deepcopy(model)
        plain.zero_grad()
        losses = []
        for s in part:
            proximal = start_logprobs(s.ids, s.targets)
            losses.append(textbook(name, s, logprobs(plain, s.ids, s.targets).double(), proximal, mode, cap))
        (torch.stack(losses).sum() / divisor(name, part)).backward()
        oracle = torch.cat([p.grad.flatten() for p in plain.parameters()])
        assert (ours - oracle).norm() < 2e-4 * oracle.norm()
        reports.append(t.optim_step())
    assert all((0 < r.capped < 0.9) if mode != "off" else r.capped == 0 for r in reports)
    assert reports[0].clipped == 0
    if name in ("grpo", "dr_grpo", "dapo", "reinforce_pp"):
        assert reports[1].clipped > 0, "the second update must test the clip"


class TrainerBeforeStaleness(TorchTrainer):
    """The weights as they were computed before tokens had a lag: a copy of that code."""

    def _weights(
        self, pack: Sequence[Sample], reference: Sequence[Any], first: int, last: int, logp: Floats, entropy: Floats
    ) -> Floats:
        pack, reference = pack[first:last], reference[first:last]
        sizes = np.cumsum([len(s.targets) for s in pack])[:-1]
        out: list[Floats] = []
        gaps, clips, kls = [], [], []
        for s, now, ref in zip(pack, np.split(logp, sizes), reference, strict=True):
            old = now if s.old is None else s.old
            w = self.algorithm.weights(SampledTokens(logp=now, proximal=old, advantage=s.advantage))
            clips.append((w == 0) & (s.advantage != 0))
            w = w * np.minimum(np.exp(old - s.behavior), self.importance_cap)
            share = self.algorithm.normalizer(len(now), s.limit)
            if ref is not None:
                w = w + kl_weights(now, ref, self.kl * share / len(now))
            kls.append(np.zeros(len(now)) if ref is None else k3(now, ref))
            gaps.append(np.abs(old - s.behavior))
            out.append(w)
            self._totals.sums["divisor"] += share
            self._totals.sums["responses"] += 1
        none = np.zeros(len(entropy))  # capped and older did not exist
        self._totals.count(
            np.concatenate(gaps), none, entropy=entropy, clipped=np.concatenate(clips), kl=np.concatenate(kls)
        )
        return np.concatenate(out)


@pytest.mark.parametrize(
    ("name", "updates"), quick_cases(product(NAMES, [1, 2]), quick=[(name, 1 + n % 2) for n, name in enumerate(NAMES)])
)
def test_staleness_0_gives_the_same_bits_as_before(model: Any, name: str, updates: int) -> None:
    """Gradients and weights over two steps, with KL and an engine that differs a little. The recipe sets neither
    `importance` nor `importance_cap`."""
    parts = make_samples(name, ages=(0,))
    rng = np.random.default_rng(0)
    # A few tokens are far off, beyond the cap of 2.
    noise = [[0.02 * rng.normal(size=len(s.behavior)) for s in part] for part in parts]
    for rows in noise:
        rows[0][0] -= 1.0
    parts = [
        [replace(s, behavior=s.behavior + n) for s, n in zip(part, rows, strict=True)]
        for part, rows in zip(parts, noise, strict=True)
    ]
    assert all(s.lag is None for part in parts for s in part)
    found = []
    for kind in (TorchTrainer, TrainerBeforeStaleness):
        mine = copy.deepcopy(model)
        sections: dict[str, Any] = {"algorithm": {"kl": 0.1}, "train": {"lr": 1e-3, "engine_gap_limit": 99.0}}
        t = trainer(mine, name, kind, reference=older_model(1), **sections)
        bits: list[torch.Tensor] = []
        for _ in range(2):
            step = [t.forward(part) for part in parts] if updates == 2 else [[s for part in parts for s in part]]
            for part in step:
                t.forward_backward(part)
                bits.append(gradients(t))
                report = t.optim_step()
                assert not report.skipped
                bits.append(torch.tensor([report.engine_gap, report.engine_gap_max, report.clipped, report.kl]))
        found.append([*bits, *(p.detach() for p in mine.parameters())])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


# the report


def shifted(samples: Sequence[Sample], nats: float, *, lag: int) -> list[Sample]:
    """Samples whose tokens of this lag have log-probs that are `nats` off."""
    out = []
    for s in samples:
        ages = np.zeros(len(s.targets)) if s.lag is None else s.lag
        out.append(replace(s, behavior=s.behavior - nats * (ages == lag)))
    return out


def with_lags(samples: Sequence[Sample], *lags: int) -> list[Sample]:
    """The same tokens, with these lags in turn."""
    return [replace(s, lag=np.resize(np.array(lags, np.uint16), len(s.targets))) for s in samples]


def test_drift_of_older_tokens_is_not_a_fault_of_the_engine(model: Any) -> None:
    made = with_lags(make_samples(ages=(0,))[0], 0, 1, 3)
    t = trainer(model)
    t.forward_backward(shifted(shifted(made, 1.2, lag=1), 0.6, lag=3))
    report = t.optim_step()  # the mean over all tokens would be 0.6, and the limit is 0.3
    assert not report.skipped
    assert report.engine_gap < 1e-4
    assert report.engine_gap_max < 1e-3
    ages = np.concatenate([s.lag for s in made if s.lag is not None])
    assert report.drift == pytest.approx(
        np.average([1.2, 0.6], weights=[(ages == 1).sum(), (ages == 3).sum()]), abs=1e-4
    )
    # exp(1.2) = 3.3 is above the cap of 2; exp(0.6) = 1.8 is not.
    assert report.capped == pytest.approx((ages == 1).mean())


def test_fresh_tokens_still_detect_a_wrong_engine(model: Any) -> None:
    made = with_lags(make_samples(ages=(0,))[0], 0, 1, 1, 1, 1, 1)
    t = trainer(model)
    before = [p.detach().clone() for p in model.parameters()]
    wrong = shifted(made, 1.2, lag=0)  # a sixth of the tokens: the mean over all of them would be 0.2
    fresh = sum(int((s.lag == 0).sum()) for s in wrong if s.lag is not None)
    for _ in range(-(-MIN_FRESH // fresh)):
        t.forward_backward(wrong)
    with pytest.raises(WindfallError, match=r"engine and trainer disagree .* differ by 1\.2 nats"):
        t.optim_step()
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def test_few_fresh_tokens_among_older_ones_do_not_end_the_run(model: Any) -> None:
    made = with_lags(make_samples(ages=(0,))[0], 0, *[1] * 9)
    wrong = shifted(made, 1.2, lag=0)
    assert 0 < sum(int((s.lag == 0).sum()) for s in wrong if s.lag is not None) < MIN_FRESH
    t = trainer(model)
    t.forward_backward(wrong)
    assert t.optim_step().engine_gap == pytest.approx(1.2, abs=1e-3)


def test_update_without_fresh_tokens_is_not_checked(model: Any) -> None:
    made = shifted(with_lags(make_samples(ages=(0,))[0], 1), 1.2, lag=1)
    t = trainer(model)
    t.forward_backward(made)
    report = t.optim_step()
    assert (report.skipped, report.engine_gap, report.engine_gap_max) == ("", 0.0, 0.0)
    assert report.drift == pytest.approx(1.2, abs=1e-4)


def test_fresh_tokens_only_have_no_drift(model: Any) -> None:
    t = trainer(model)
    t.forward_backward(make_samples(ages=(0,))[0])
    report = t.optim_step()
    assert (report.drift, report.capped) == (0.0, 0.0)
    empty = t.optim_step()
    assert (empty.tokens, empty.drift, empty.capped, empty.engine_gap) == (0, 0.0, 0.0, 0.0)


def test_masked_tokens_have_no_gradient(model: Any) -> None:
    """All tokens are far off: nothing can be learned from them with "mask"; with "off" they count in full."""
    made = shifted(with_lags(make_samples(ages=(0,))[0], 1), 1.2, lag=1)
    for mode, skipped, capped in (("mask", "nothing", 1.0), ("off", "", 0.0)):
        t = trainer(model, algorithm={"importance": mode})
        t.forward_backward(made)
        report = t.optim_step()
        assert (report.skipped, report.capped) == (skipped, capped)


@pytest.mark.parametrize("mode", ["truncate", "mask"])
def test_older_token_without_a_finite_logprob_is_not_learned_from(model: Any, mode: Mode) -> None:
    made = with_lags(make_samples(ages=(0,))[0], 1)
    made[0] = replace(made[0], behavior=np.full_like(made[0].behavior, np.nan))
    t = trainer(model, algorithm={"importance": mode})
    before = [p.detach().clone() for p in model.parameters()]
    t.forward_backward(made)
    assert t.optim_step().skipped == "not finite"
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


# the lag


def group(versions: tuple[int, ...], sampled: tuple[bool, ...] | None = None) -> Group:
    def response(i: int, reward: float | None) -> Response:
        n = len(versions)
        return Response(
            id=f"4/{i}", prompt=(5,), tokens=(6,) * n, logprobs=(-1.0,) * n, sampled=sampled or (True,) * n,
            versions=versions, finish="stop", reward=reward,
        )  # fmt: skip

    return Group(index=4, task=Task(id="t", prompt=""), responses=(response(0, 1.0), response(1, 0.0)))


def lags(made: list[list[Sample]]) -> list[Any]:
    return [None if s.lag is None else s.lag.tolist() for part in made for s in part]


def test_lag_of_each_sampled_token() -> None:
    grpo = algorithms.make("grpo")
    mixed = group((3, 3, -1, 4, 5), (True, True, False, True, True))
    made = credit([mixed], grpo, 9, version=5)
    assert lags(made) == [[2, 2, 1, 0]] * 2  # the token of the environment has none
    assert made[0][0].lag is not None
    assert made[0][0].lag.dtype == np.uint16
    assert lags(credit([group((5, 5))], grpo, 9, version=5)) == [None, None]
    assert lags(credit([mixed], grpo, 9)) == [None, None]
    assert lags(credit([group((0,))], grpo, 9, version=1 << 16)) == [[(1 << 16) - 1]] * 2  # does not wrap around to 0


def test_token_of_a_newer_version_is_refused() -> None:
    with pytest.raises(ValueError, match="response 4/0: a token is from version 6, but the trainer is at version 5"):
        credit([group((4, 6))], algorithms.make("grpo"), 9, version=5)
