"""The trainer of a torch model: begin, accumulate as groups arrive, finish.

    trainer.begin()
    trainer.accumulate(samples)    any number of times, in any order: gradients add up
    report = trainer.finish()      divide once, clip, step; the next version of the weights is in the module

The gradient of any algorithm is one weight per token (see algorithms/base.py), so the loss differentiated here is
always the same: the negative sum of weight * log-prob.

The proximal policy (algorithms/base.py) is the one at the start of the step. A step with one update needs no separate
pass for it: until the update, the log-probs computed for the gradient are those of the proximal policy. A step with
several updates calls `prepare` on all its samples before the first update.

Tokens of older versions differ from the proximal policy because the policy has moved (`drift`). Only fresh tokens tell
whether engine and trainer compute the same model (`engine_gap`), so only they can end the run. An update with few fresh
tokens among older ones is not checked: one unlikely token could end the run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from windfall.algorithms.base import Algorithm, Floats, SampledTokens
from windfall.algorithms.importance import ImportanceMode, importance_weights
from windfall.algorithms.kl import k3, kl_weights
from windfall.config import Recipe
from windfall.errors import WindfallError
from windfall.train.base import Report
from windfall.train.logprobs import Learner
from windfall.train.lora import Adapters, BaseLearner
from windfall.train.optimizer import Optimizer
from windfall.train.sample import Sample, packs

MIN_FRESH = 64
"""If an update also has older tokens, its engine gap can end the run only if it has at least this many fresh tokens."""


class TorchTrainer:
    def __init__(
        self, model: Any, algorithm: Algorithm, recipe: Recipe, *, micro_tokens: int, reference: Any = None
    ) -> None:
        """`reference`: the model of the KL penalty, or the `Adapters` of `model`, for its base."""
        self.model, self.algorithm, self.micro_tokens = model, algorithm, micro_tokens
        self.temperature = recipe.rollout.temperature
        self.kl = recipe.algorithm.kl
        self.importance: ImportanceMode = recipe.algorithm.importance
        self.importance_cap = recipe.algorithm.importance_cap
        train = recipe.train
        self.gap_limit = train.engine_gap_limit
        self.optimizer = Optimizer(model, train, recipe.run.steps * train.minibatches)
        self.learner = Learner(model, self.optimizer.gradients, checkpoint_activations=train.checkpoint_activations)
        self.reference: Any = None
        if reference is not None:
            adapted = isinstance(reference, Adapters)
            self.reference = BaseLearner(self.learner, reference) if adapted else Learner(reference)
        self.begin()

    def prepare(self, samples: Sequence[Sample]) -> list[Sample]:
        """Store the log-probs of the policy at the start of the step, for steps of several updates."""
        out: dict[int, Sample] = {}
        for pack in self._packs(samples):
            for s, logp in zip(pack, self._logprobs(self.learner, pack), strict=True):
                out[id(s)] = replace(s, old=logp)
        return [out[id(s)] for s in samples]

    def begin(self) -> None:
        self.optimizer.gradients.zero()
        self._reset()

    def _reset(self) -> None:
        self._divisor, self._responses = 0.0, 0
        self._statistics: list[Floats] = []
        """Six rows per token: entropy, distance between proximal and behavior log-prob, clipped, k3, capped, older."""

    def accumulate(self, samples: Sequence[Sample]) -> None:
        # Samples without an advantage get their own packs, which need no backward pass: they count only in the report.
        credited = [s for s in samples if s.targets and s.advantage]
        others = [s for s in samples if s.targets and not s.advantage]
        for pack in [*self._packs(credited), *self._packs(others)]:
            reference = self._logprobs(self.reference, pack) if self.reference is not None else [None] * len(pack)
            self.learner.learn(pack, self.temperature, partial(self._weights, pack, reference))

    def _weights(
        self, pack: Sequence[Sample], reference: Sequence[Any], first: int, last: int, logp: Floats, entropy: Floats
    ) -> Floats:
        """Loss weights of the tokens of samples `first` to `last` of the pack."""
        pack, reference = pack[first:last], reference[first:last]
        sizes = np.cumsum([len(s.targets) for s in pack])[:-1]
        out: list[Floats] = []
        rows = zip(pack, np.split(logp, sizes), np.split(entropy, sizes), reference, strict=True)
        for s, now, entropies, ref in rows:
            proximal = now if s.old is None else s.old
            w = self.algorithm.weights(SampledTokens(logp=now, proximal=proximal, advantage=s.advantage))
            clipped = (w == 0) & (s.advantage != 0)
            importance, capped = importance_weights(
                proximal, s.behavior, mode=self.importance, cap=self.importance_cap,
                level="token" if s.lag is None else self.algorithm.importance_level,
            )  # fmt: skip
            w = w * importance
            share = self.algorithm.normalizer(len(now), s.limit)
            if ref is not None:
                # A mean over tokens that weights a response like the algorithm's own loss does (algorithms/kl.py).
                w = w + kl_weights(now, ref, self.kl * share / len(now))
            kl = np.zeros(len(now)) if ref is None else k3(now, ref)
            older = np.zeros(len(now)) if s.lag is None else s.lag > 0
            self._statistics.append(np.stack([entropies, np.abs(proximal - s.behavior), clipped, kl, capped, older]))
            out.append(w)
            self._divisor += share
            self._responses += 1
        return np.concatenate(out)

    def _packs(self, samples: Sequence[Sample]) -> list[list[Sample]]:
        return packs(samples, self.micro_tokens, padded=self.learner.pads)

    def _logprobs(self, learner: Any, pack: Sequence[Sample]) -> list[Floats]:
        logp, _ = learner.score(pack, self.temperature)
        return np.split(logp.double().cpu().numpy(), np.cumsum([len(s.targets) for s in pack])[:-1])

    def finish(self) -> Report:
        statistics = np.concatenate(self._statistics, axis=1) if self._statistics else np.zeros((6, 0))
        tokens, lr = statistics.shape[1], self.optimizer.rate()
        entropy, _, clipped, kl, capped, _ = statistics.mean(1).tolist() if tokens else (0.0,) * 6
        distance, older = statistics[1], statistics[5] > 0
        fresh, drifted = distance[~older], distance[older]
        gap, gap_max = (float(fresh.mean()), float(fresh.max())) if fresh.size else (0.0, 0.0)
        drift = float(drifted.mean()) if drifted.size else 0.0
        checked = not older.any() or fresh.size >= MIN_FRESH
        if checked and not (np.isfinite(gap) and gap <= self.gap_limit):  # a NaN fails every comparison
            raise gap_error(gap, gap_max, self.gap_limit)
        norm, skipped = self.optimizer.update(self._divisor)
        report = Report(
            tokens=tokens, responses=self._responses, grad_norm=norm, lr=lr, entropy=entropy, engine_gap=gap,
            engine_gap_max=gap_max, clipped=clipped, capped=capped, drift=drift, kl=kl, skipped=skipped,
        )  # fmt: skip
        self._reset()  # the update has already set the gradients to zero
        return report


def gap_error(gap: float, gap_max: float, limit: float) -> WindfallError:
    """The engine's policy is not the one that is trained, so an update would follow a wrong gradient."""
    how = f"differ by {gap:.3g} nats on average ({gap_max:.3g} at most), but the limit is {limit:g}"
    if not np.isfinite(gap):
        how = f"cannot be compared, because some are not finite (their mean difference is {gap})"
    return WindfallError(
        f"engine and trainer disagree on this model: their log-probs for the same tokens {how}; the update was skipped",
        where="train.engine_gap_limit",
        fix="Likely causes: the engine does not compute this architecture as transformers does, a different version of "
        "transformers or torch on a worker, damaged weights, or a dtype too narrow for this model. Try model.dtype = "
        "'float32', or workers on a CPU, to find which. `windfall resume` continues from the last checkpoint. Raise "
        "the limit only if you know the cause of the gap.",
    )
