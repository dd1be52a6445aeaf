"""The trainer's part of the self-test (engine/selftest): its log-probs and gradients against those of transformers."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch

from windfall.engine.selftest import judge, verdict
from windfall.engine.selftest.judge import Difference, largest
from windfall.engine.selftest.small_model import SmallModel
from windfall.trainer.model.gradients import Gradients, trained
from windfall.trainer.model.logprobs import Learner
from windfall.training import Sample

TEMPERATURE = 0.8


def check_trainer(fields: Mapping[str, Any], *, device: str, longest: int, names: Iterable[str] | None = None) -> str:
    """Raise WindfallError unless the trainer computes what transformers computes, if this is not known yet. Returns the
    key of this check. `fields`: the model's configuration; `names`: the names of its weights."""
    key = verdict.cache_key("trainer", fields, device=device, longest=longest)

    def test() -> None:
        judge_trainer(verdict.config_of(fields), device=device, longest=longest, names=names)

    return verdict.run_once(key, test)


def judge_trainer(config: Any, *, device: str, longest: int, names: Iterable[str] | None = None) -> judge.Measured:
    """Measure the trainer. Raises WindfallError if it differs too much from transformers."""
    what = f"windfall's trainer does not compute {judge.architecture(config)} as transformers does"

    def measure(small: SmallModel) -> judge.Measured:
        nats, gradient = trainer_differences(small)
        limit, refused = judge.limits(device), ""
        if nats.size > limit.nats:
            refused = f"{what}: log-probs differ by {nats.size:.2g} nats; rounding is below {limit.nats:g}"
        elif gradient.size > limit.gradient:
            share = f"{gradient.size:.2g} of its size ({gradient.where}); rounding is below {limit.gradient:g}"
            refused = f"{what}: a weight's gradient differs by {share}"
        return judge.Measured(nats=nats.size, gradient=gradient.size, refused=refused)

    return judge.judge(measure, what, config, device, longest, names)


def trainer_differences(small: SmallModel) -> tuple[Difference, Difference]:
    """The largest difference in log-probs, in nats, and in gradients. Gradients are compared weight by weight: the norm
    of the difference, relative to the norm of transformers' gradient."""
    rng = np.random.default_rng(2)
    samples = [random_sample(rng, small.vocabulary, n, first) for n, first in ((41, 7), (25, 1), (6, 3))]
    weights = [rng.normal(size=len(s.targets)) for s in samples]
    with contextlib.suppress(ValueError, AttributeError):  # not every model has this setting
        small.model.gradient_checkpointing_enable({"use_reentrant": False})
    gradients = Gradients(trained(small.model))
    learner = Learner(small.model, gradients, say=lambda line: None)
    ours, _ = learner.score(samples, TEMPERATURE)
    small.reference.zero_grad()
    loss, theirs = torch.zeros((), device=small.device), []
    for s, w in zip(samples, weights, strict=True):
        at = torch.tensor(s.targets, device=small.device)
        logp = torch.log_softmax(small.logits(s.ids)[at - 1].float() / TEMPERATURE, -1)
        logp = logp.gather(-1, torch.tensor(s.ids, device=small.device)[at][:, None])[:, 0]
        theirs.append(logp.detach())
        loss = loss - (torch.tensor(w, device=small.device).float() * logp).sum()
    loss.backward()
    gradients.zero()
    learner.learn(samples, TEMPERATURE, lambda a, b, logp, entropy: np.concatenate(weights[a:b]))
    return largest("log-probs", (ours - torch.cat(theirs)).abs()), _gradient_difference(small)


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
