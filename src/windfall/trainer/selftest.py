"""The trainer's part of the self-test (engine/selftest): its log-probs and gradients against those of transformers."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from windfall.engine.selftest import judge, verdict
from windfall.engine.selftest.judge import Difference, largest
from windfall.engine.selftest.small_model import SmallModel, build_small_model
from windfall.errors import WindfallError
from windfall.models.experts import ExpertReader, dtype_of
from windfall.models.experts import largest as largest_layer
from windfall.recipe.lora import Lora
from windfall.trainer.model import lora
from windfall.trainer.model.gradients import Gradients, trained
from windfall.trainer.model.logprobs import Learner
from windfall.training import Sample
from windfall.weights.merged import LORA_A

TEMPERATURE = 0.8


def check_trainer(fields: Mapping[str, Any], *, names: Iterable[str] | None = None, **how: Any) -> str:
    """Raise WindfallError unless the trainer computes what transformers computes, if this is not known yet. Returns the
    key of this check. `fields`: the model's configuration; `names`: the names of its weights; `how`: device, longest
    and adapters, as in `judge_trainer`."""
    key = verdict.cache_key("trainer", fields, **how)
    return verdict.run_once(key, lambda: judge_trainer(verdict.config_of(fields), names=names, **how))


def judge_trainer(
    config: Any, *, device: str, longest: int, names: Iterable[str] | None = None, adapters: bool = False
) -> judge.Measured:
    """Measure the trainer. Raises WindfallError if it differs too much from transformers. `adapters`: it trains
    adapters of several policies in one module."""
    what = f"windfall's trainer does not compute {judge.architecture(config)} as transformers does"

    def measure(small: SmallModel) -> judge.Measured:
        nats, gradient = trainer_differences(small)
        if adapters:
            nats = max(nats, *adapter_differences(small), key=lambda d: d.size)
        limit, refused = judge.limits(device), ""
        if nats.size > limit.nats:
            size = f"{nats.size:.2g} nats ({nats.where})"
            refused = f"{what}: log-probs differ by {size}; rounding is below {limit.nats:g}"
        elif gradient.size > limit.gradient:
            share = f"{gradient.size:.2g} of its size ({gradient.where}); rounding is below {limit.gradient:g}"
            refused = f"{what}: a weight's gradient differs by {share}"
        return judge.Measured(nats=nats.size, gradient=gradient.size, refused=refused)

    return judge.judge(measure, what, config, device, longest, names)


NO_EXPERTS = "the model has no experts"


def replay_refusal(fields: Mapping[str, Any], *, device: str, names: Iterable[str] | None = None) -> str:
    """Why the trainer cannot let given experts compute the tokens of this model; "" if it can. Tried with a small model
    of the same architecture."""
    if not any(".experts." in name for name in names or (".experts.",)):
        return NO_EXPERTS
    small = build_small_model(verdict.config_of(fields), names, longest=64, device=device, seed=0)
    learner, reader = Learner(small.model, say=lambda line: None), ExpertReader(small.model)
    if not reader.works(small.model):
        return f"transformers computes the experts of {judge.architecture(small.config)} in another way"
    sample = random_sample(np.random.default_rng(4), small.vocabulary, 12, 1)
    with reader.reading() as found:
        learner.score([sample], TEMPERATURE)
    given = (torch.stack(found, 1)[:-1].cpu().numpy() + 1) % min(layer.count for layer in reader.layers)
    data = given.astype(dtype_of(largest_layer(reader.layers))).tobytes()
    try:
        with reader.reading() as found:
            learner.score([replace(sample, experts=data)], TEMPERATURE)
    except WindfallError as e:
        return e.what
    same = np.array_equal(torch.stack(found, 1)[:-1].cpu().numpy(), given)
    return "" if same else f"the routers of {judge.architecture(small.config)} do not take given experts"


def trainer_differences(small: SmallModel) -> tuple[Difference, Difference]:
    """The largest difference in log-probs, in nats, and in gradients. Gradients are compared weight by weight: the norm
    of the difference, relative to the norm of transformers' gradient."""
    rng = np.random.default_rng(2)
    samples = _samples(rng, small)
    weights = [rng.normal(size=len(s.targets)) for s in samples]
    with contextlib.suppress(ValueError, AttributeError):  # not every model has this setting
        small.model.gradient_checkpointing_enable({"use_reentrant": False})
    gradients = Gradients(trained(small.model))
    learner = Learner(small.model, gradients, say=lambda line: None)
    ours, _ = learner.score(samples, TEMPERATURE)
    small.reference.zero_grad()
    theirs = _reference_logprobs(small, samples)
    (-(torch.tensor(np.concatenate(weights), device=small.device).float() * theirs).sum()).backward()
    gradients.zero()
    learner.learn(samples, TEMPERATURE, lambda a, b, logp, entropy: np.concatenate(weights[a:b]))
    return largest("without adapters", (ours - theirs.detach()).abs()), _gradient_difference(small)


def adapter_differences(small: SmallModel) -> list[Difference]:
    """The largest difference in log-probs, in nats, of each of two policies whose adapters are in one module."""
    given = {policy: judge.random_adapter(small.model, seed) for seed, policy in enumerate(("one", "two"))}
    targets = [name.removesuffix(LORA_A) for name in given["one"] if name.endswith(LORA_A)]
    section = Lora(rank=verdict.ADAPTER_RANK, alpha=judge.ADAPTER_SCALE * verdict.ADAPTER_RANK, targets=targets)
    samples, found = _samples(np.random.default_rng(3), small), []
    attached = {policy: lora.attach(small.model, section, base="", seed=0, policy=policy) for policy in given}
    learner = Learner(small.model, say=lambda line: None)
    for policy, adapters in attached.items():
        for name, tensor in adapters.tensors().items():
            tensor.data.copy_(given[policy][name])
        adapters.use()
        ours, _ = learner.score(samples, TEMPERATURE)
        with torch.no_grad():
            theirs = _reference_logprobs(judge.merged(small, given[policy]), samples)
        found.append(largest(f"adapter {policy}, beside another", (ours - theirs).abs()))
    return found


def _samples(rng: Any, small: SmallModel) -> list[Sample]:
    return [random_sample(rng, small.vocabulary, n, first) for n, first in ((41, 7), (25, 1), (6, 3))]


def _reference_logprobs(small: SmallModel, samples: Iterable[Sample]) -> Tensor:
    """Log-probs of all targets by transformers, sample after sample."""
    found = []
    for s in samples:
        at = torch.tensor(s.targets, device=small.device)
        logp = torch.log_softmax(small.logits(s.ids)[at - 1].float() / TEMPERATURE, -1)
        found.append(logp.gather(-1, torch.tensor(s.ids, device=small.device)[at][:, None])[:, 0])
    return torch.cat(found)


def _gradient_difference(small: SmallModel) -> Difference:
    ours = dict(small.model.named_parameters())
    both = [
        (name, torch.zeros_like(p) if p.grad is None else p.grad, ours[name].grad)
        for name, p in small.reference.named_parameters()
    ]
    total = float(torch.stack([theirs.float().norm() for _, theirs, _ in both]).norm())
    differences = []
    for name, theirs, mine in both:
        mine = torch.zeros_like(theirs) if mine is None else mine
        size = max(float(theirs.norm()), 1e-4 * total)  # smaller gradients are rounding noise
        differences.append(largest(name, (mine - theirs).norm()[None] / size))
    return max(differences, key=lambda d: d.size)


def random_sample(rng: Any, vocabulary: int, length: int, first: int) -> Sample:
    """Random tokens, trained from index `first` on."""
    ids = tuple(int(t) for t in rng.integers(3, vocabulary, length))
    return Sample(ids=ids, targets=tuple(range(first, length)), behavior=np.zeros(0), advantage=0.0, limit=0)
