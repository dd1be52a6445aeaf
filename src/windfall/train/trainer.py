"""The trainer: begin, accumulate as groups arrive, finish.

    trainer.begin()
    trainer.accumulate(samples)    any number of times, in any order: gradients add up
    report = trainer.finish()      divide once, clip, step; the next version of the weights is in the module

The gradient of any algorithm is one weight per token (see algorithms/base.py), so the loss differentiated here is
always the same: minus the sum of weight * log-prob.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from windfall.algorithms.base import Algorithm, Floats, SampledTokens
from windfall.algorithms.importance import truncated_importance
from windfall.algorithms.kl import k3, kl_weights
from windfall.config import Recipe
from windfall.errors import WindfallError
from windfall.train.base import Report
from windfall.train.logprobs import Learner
from windfall.train.optimizer import Optimizer
from windfall.train.sample import Sample, packs


class TorchTrainer:
    def __init__(
        self, model: Any, algorithm: Algorithm, recipe: Recipe, *, micro_tokens: int, reference: Any = None
    ) -> None:
        self.model, self.algorithm, self.micro_tokens = model, algorithm, micro_tokens
        self.temperature = recipe.rollout.temperature
        self.kl, self.importance_cap = recipe.algorithm.kl, recipe.algorithm.importance_cap
        self.gap_limit = recipe.train.engine_gap_limit
        self.optimizer = Optimizer(model, recipe.train, recipe.run.steps * recipe.train.minibatches)
        self.learner = Learner(
            model, self.optimizer.gradients, checkpoint_activations=recipe.train.checkpoint_activations
        )
        self.reference = Learner(reference) if reference is not None else None
        self.begin()

    def prepare(self, samples: Sequence[Sample]) -> list[Sample]:
        """Fix the log-probs of the policy that the step started from, for steps of several updates."""
        out: dict[int, Sample] = {}
        for pack in self._packs(samples):
            for s, logp in zip(pack, self._frozen(self.learner, pack), strict=True):
                out[id(s)] = replace(s, old=logp)
        return [out[id(s)] for s in samples]

    def begin(self) -> None:
        self.optimizer.zero()
        self._forget()

    def _forget(self) -> None:
        self._divisor, self._responses = 0.0, 0
        self._seen: list[Floats] = []
        """Per token: entropy, gap to the engine, clipped, k3."""

    def accumulate(self, samples: Sequence[Sample]) -> None:
        # Those without credit apart: a pack of them needs no backward pass. They are scored for the report alone.
        credited = [s for s in samples if s.targets and s.advantage]
        others = [s for s in samples if s.targets and not s.advantage]
        for pack in [*self._packs(credited), *self._packs(others)]:
            reference = self._frozen(self.reference, pack) if self.reference is not None else [None] * len(pack)

            self.learner.learn(pack, self.temperature, partial(self._weights, pack, reference))

    def _weights(
        self, pack: Sequence[Sample], reference: Sequence[Any], first: int, last: int, logp: Floats, entropy: Floats
    ) -> Floats:
        """Of the pack's samples from `first` up to `last`."""
        pack, reference = pack[first:last], reference[first:last]
        sizes = np.cumsum([len(s.targets) for s in pack])[:-1]
        out: list[Floats] = []
        gaps, clips, kls = [], [], []
        for s, now, ref in zip(pack, np.split(logp, sizes), reference, strict=True):
            old = now if s.old is None else s.old
            w = self.algorithm.weights(SampledTokens(logp=now, old=old, advantage=s.advantage))
            clips.append((w == 0) & (s.advantage != 0))
            w = w * truncated_importance(old, s.behaviour, self.importance_cap)
            share = self.algorithm.normalizer(len(now), s.limit)
            if ref is not None:
                # A mean over tokens, in which a response counts as much as in the algorithm's own loss (see kl.py).
                w = w + kl_weights(now, ref, self.kl * share / len(now))
            kls.append(np.zeros(len(now)) if ref is None else k3(now, ref))
            gaps.append(np.abs(old - s.behaviour))
            out.append(w)
            self._divisor += share
            self._responses += 1
        self._seen.append(np.stack([entropy, np.concatenate(gaps), np.concatenate(clips), np.concatenate(kls)]))
        return np.concatenate(out)

    def _packs(self, samples: Sequence[Sample]) -> list[list[Sample]]:
        return packs(samples, self.micro_tokens, padded=self.learner.pads)

    def _frozen(self, learner: Learner, pack: Sequence[Sample]) -> list[Floats]:
        logp, _ = learner.score(pack, self.temperature)
        return np.split(logp.double().cpu().numpy(), np.cumsum([len(s.targets) for s in pack])[:-1])

    def finish(self) -> Report:
        seen = np.concatenate(self._seen, axis=1) if self._seen else np.zeros((4, 0))
        tokens, lr = seen.shape[1], self.optimizer.rate()
        entropy, gap, clipped, kl = seen.mean(1).tolist() if tokens else (0.0,) * 4
        widest = float(seen[1].max()) if tokens else 0.0
        if not (np.isfinite(gap) and gap <= self.gap_limit):  # a NaN is neither above nor below any limit
            raise too_far(gap, widest, self.gap_limit)
        norm, skipped = self.optimizer.update(self._divisor)
        report = Report(
            tokens=tokens, responses=self._responses, grad_norm=norm, lr=lr, entropy=entropy, engine_gap=gap,
            engine_gap_max=widest, clipped=clipped, kl=kl, skipped=skipped,
        )  # fmt: skip
        self._forget()  # the update has set the gradients to zero
        return report


def too_far(gap: float, widest: float, limit: float) -> WindfallError:
    """The policy that made the responses is not the one that is trained: an update would follow a wrong gradient."""
    how = f"differ by {gap:.3g} nats on average ({widest:.3g} at most), and the limit is {limit:g}"
    if not np.isfinite(gap):
        how = f"cannot be compared, because some are not finite (their mean difference is {gap})"
    return WindfallError(
        f"engine and trainer disagree on this model: their log-probs of the same tokens {how}; the update was not made",
        where="train.engine_gap_limit",
        fix="Likely causes: the engine does not compute this architecture as transformers does, another version of "
        "transformers or torch on a worker, damaged weights, or a dtype too narrow for this model. Try model.dtype = "
        "'float32', or workers on a CPU, to find which. `windfall resume` goes on from the last checkpoint. Raise the "
        "limit only if you know where the gap comes from.",
    )
