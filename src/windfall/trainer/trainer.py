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

With several ranks, these methods run on rank 0, which plans the packs of all ranks and gives the orders; methods with a
leading underscore run on every rank. One rank alone takes the same path.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError

from windfall.algorithms.base import Algorithm, Floats, SampledTokens
from windfall.algorithms.importance import ImportanceMode, importance_weights
from windfall.algorithms.kl import k3, kl_weights
from windfall.errors import WindfallError
from windfall.recipe.sections import Recipe
from windfall.trainer.model.logprobs import BaseLearner, Learner
from windfall.trainer.model.lora import Adapters
from windfall.trainer.model.policy import PolicyModule
from windfall.trainer.optimizer import Optimizer
from windfall.trainer.packs import packs_of_ranks
from windfall.trainer.ranks import sharded_file
from windfall.trainer.ranks.ranks import Orders, RankLost, TrainerRanks
from windfall.trainer.ranks.sharding import RankRows
from windfall.training import Report, Sample

FILLER = Sample(ids=(0, 0), targets=(1,), behavior=np.zeros(1), advantage=0.0, limit=1)
"""What a rank without work computes, with weight zero: all ranks must make the same passes."""
MIN_FRESH = 64
"""If an update also has older tokens, its engine gap can end the run only if it has at least this many fresh tokens."""


@dataclass(kw_only=True)
class TokenTotals:
    """Sums over trained tokens, which add up over packs and ranks."""

    divisor: float = 0.0
    responses: float = 0.0
    """A segment counts as its share of the response."""
    tokens: int = 0
    entropy: float = 0.0
    clipped: float = 0.0
    kl: float = 0.0
    capped: float = 0.0
    fresh: int = 0
    gap: float = 0.0
    """Distance between proximal and behavior log-probs over fresh tokens."""
    gap_max: float = 0.0
    drift: float = 0.0
    """The same distance over tokens of older versions."""
    peak_bytes: int = 0
    engines: dict[str, tuple[int, float]] = field(default_factory=dict)
    """By engine: number of fresh tokens, and the sum of their `gap`."""

    def count(self, distance: Floats, older: Floats, engines: Sequence[tuple[str, int]] = (), **sums: Floats) -> None:
        """`distance`: between proximal and behavior log-probs. `older`: lag of each token."""
        old = older > 0
        self._count_engines(np.where(old, 0.0, distance), ~old, engines)
        self.tokens += len(distance)
        self.fresh += int((~old).sum())
        self.gap += float(distance[~old].sum())
        self.gap_max = float(np.maximum(self.gap_max, distance[~old].max(initial=0.0)))
        self.drift += float(distance[old].sum())
        for name, values in sums.items():
            setattr(self, name, getattr(self, name) + float(values.sum()))

    def _count_engines(self, gap: Floats, fresh: np.ndarray, engines: Sequence[tuple[str, int]]) -> None:
        start = 0
        for name, count in engines:
            part = slice(start, start + count)
            tokens, total = self.engines.get(name, (0, 0.0))
            self.engines[name] = (tokens + int(fresh[part].sum()), total + float(gap[part].sum()))
            start += count

    def engine_gaps(self) -> dict[str, float]:
        """The mean gap of each known engine."""
        return {name: total / n for name, (n, total) in sorted(self.engines.items()) if name and n}

    def add(self, other: TokenTotals) -> None:
        for name, (tokens, total) in other.engines.items():
            mine_tokens, mine_total = self.engines.get(name, (0, 0.0))
            self.engines[name] = (mine_tokens + tokens, mine_total + total)
        for f in (f for f in fields(self) if f.name != "engines"):
            mine, theirs = getattr(self, f.name), getattr(other, f.name)
            setattr(self, f.name, np.maximum(mine, theirs).item() if f.name in MAXIMA else mine + theirs)


MAXIMA = ("gap_max", "peak_bytes")
"""Totals of which the largest counts, not the sum."""


class TorchTrainer:
    def __init__(
        self,
        model: Any,
        algorithm: Algorithm,
        recipe: Recipe,
        *,
        micro_tokens: int,
        reference: Any = None,
        orders: Orders | None = None,
    ) -> None:
        """`model`: a model of transformers or a sharded policy (sharding.py). `reference`: the model of the KL penalty,
        or the `Adapters` of `model`, for its base. `orders` reach all ranks."""
        policy = model if isinstance(model, PolicyModule) else PolicyModule(model)
        self.model = policy.model
        self.algorithm = algorithm
        self.micro_tokens = micro_tokens
        self.temperature = recipe.rollout.temperature
        self.kl = recipe.algorithm.kl
        self.importance: ImportanceMode = recipe.algorithm.importance
        self.importance_cap = recipe.algorithm.importance_cap
        train = recipe.train
        self.gap_limit = train.engine_gap_limit
        self.orders = orders or Orders(TrainerRanks.alone())
        self.ranks = self.orders.ranks
        self.device = policy.device
        updates = recipe.run.steps * train.minibatches
        self.optimizer = Optimizer(self.model, train, updates, ranks=self.ranks, dtype=policy.dtype)
        self.learner = Learner(
            policy, self.optimizer.gradients, checkpoint_activations=train.checkpoint_activations, ranks=self.ranks
        )
        self.reference: Any = None
        if reference is not None:
            adapted = isinstance(reference, Adapters)
            self.reference = BaseLearner(self.learner, reference) if adapted else Learner(reference, ranks=self.ranks)
        self.orders.add(self)
        self._begin()

    # what the controller asks for; rank 0 passes it on to the others

    def prepare(self, samples: Sequence[Sample]) -> list[Sample]:
        """Store the log-probs of the policy at the start of the step, for steps of several updates."""
        plan = self._plan(samples)
        scored = self.orders.call(self._score, each=[(packs,) for packs in plan])
        assert scored is not None, "this is rank 0"
        old = {
            id(s): logp
            for packs, rows in zip(plan, scored, strict=True)
            for pack, found in zip(packs, rows, strict=True)
            for s, logp in zip(pack, found, strict=True)
        }
        return [replace(s, old=old[id(s)]) for s in samples]

    def begin(self) -> None:
        self.orders.call(self._begin)

    def accumulate(self, samples: Sequence[Sample]) -> None:
        # Samples without an advantage get packs of their own. They need no backward pass, and only count in the report.
        credited = self._plan([s for s in samples if s.targets and s.advantage])
        others = self._plan([s for s in samples if s.targets and not s.advantage])
        self.orders.call(self._learn, each=list(zip(credited, others, strict=True)))

    def finish(self) -> Report:
        return self.orders.call(self._finish)

    def write_optimizer(self, path: Path) -> None:
        """Write the state of the optimizer and the random state into a file."""
        self.orders.call(self._write_optimizer, path)

    def restore_optimizer(self, path: Path) -> None:
        """Restore what `write_optimizer` wrote, maybe by another number of ranks. Every rank calls this itself."""
        try:
            self.optimizer.restore(path)
            random = random_state(self.device)
            sharded_file.read(path, random, self.ranks)
        except (OSError, SafetensorError, ValueError) as e:
            raise WindfallError(f"the optimizer's state cannot be read: {e}", where=str(path)) from e
        set_random_state(random, self.device)

    def _plan(self, samples: Sequence[Sample]) -> list[list[list[Sample]]]:
        """The packs of every rank."""
        return packs_of_ranks(samples, self.micro_tokens, self.ranks.size, padded=self.learner.pads)

    # what every rank does

    def _score(self, packs: Sequence[Sequence[Sample]]) -> list[list[list[Floats]]] | None:
        """The log-probs of the samples of all ranks, on rank 0."""
        return self.ranks.quick.gather([self._logprobs(self.learner, pack) for pack in packs])

    def _begin(self) -> None:
        self.optimizer.zero()
        self._totals = TokenTotals()

    def _learn(self, credited: Sequence[Sequence[Sample]], others: Sequence[Sequence[Sample]]) -> None:
        for pack in (*credited, *(others if self.reference is not None else ())):
            reference = self._logprobs(self.reference, pack) if self.reference is not None else [None] * len(pack)
            weights = partial(self._weights, pack, reference) if pack else _no_weights
            self.learner.learn(pack or [FILLER], self.temperature, weights)
        for pack in others if self.reference is None else ():
            logp, entropy = self.learner.score(pack or [FILLER], self.temperature)
            if pack:
                self._weights(pack, [None] * len(pack), 0, len(pack), *map(_floats, (logp, entropy)))

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
            w = self.algorithm.weights(SampledTokens(logp=now, proximal=proximal, advantage=s.advantage, whole=s.whole))
            clipped = (w == 0) & (s.advantage != 0)
            importance, capped = importance_weights(
                proximal,
                s.behavior,
                mode=self.importance,
                cap=self.importance_cap,
                level="token" if s.lag is None else self.algorithm.importance_level,
            )
            w = w * importance
            share = self.algorithm.normalizer(s.length, s.limit) * s.share
            if ref is not None:
                # A mean over tokens that weights a response like the algorithm's own loss does (algorithms/kl.py).
                w = w + kl_weights(now, ref, self.kl * share / len(now))
            self._totals.count(
                np.abs(proximal - s.behavior),
                np.zeros(len(now)) if s.lag is None else s.lag,
                s.engines,
                entropy=entropies,
                clipped=clipped,
                capped=capped,
                kl=np.zeros(len(now)) if ref is None else k3(now, ref),
            )
            out.append(w)
            self._totals.divisor += share
            self._totals.responses += s.share
        return np.concatenate(out)

    def _logprobs(self, learner: Any, pack: Sequence[Sample]) -> list[Floats]:
        logp, _ = learner.score(pack or [FILLER], self.temperature)
        return np.split(_floats(logp), np.cumsum([len(s.targets) for s in pack])[:-1]) if pack else []

    def _finish(self) -> Report:
        """Every rank computes the same report, and updates its own rows."""
        mine, t = self._totals, TokenTotals()
        mine.peak_bytes = peak_bytes(self.device)
        for totals in self.ranks.quick.all_gather(mine):
            t.add(totals)
        n, lr, older = max(t.tokens, 1), self.optimizer.rate(), t.tokens - t.fresh
        gap = t.gap / t.fresh if t.fresh else 0.0
        checked = not older or t.fresh >= MIN_FRESH
        if checked and not (np.isfinite(gap) and gap <= self.gap_limit):  # a NaN fails every comparison
            raise gap_error(gap, t.gap_max, self.gap_limit, t.engine_gaps())
        norm, skipped = self.optimizer.update(t.divisor)
        self._totals = TokenTotals()  # the update has already set the gradients to zero
        return Report(
            tokens=t.tokens,
            responses=round(t.responses),
            grad_norm=norm,
            lr=lr,
            entropy=t.entropy / n,
            engine_gap=gap,
            engine_gap_max=t.gap_max,
            engine_gaps=t.engine_gaps(),
            clipped=t.clipped / n,
            capped=t.capped / n,
            drift=t.drift / older if older else 0.0,
            kl=t.kl / n,
            skipped=skipped,
            peak_bytes=t.peak_bytes,
        )

    def _write_optimizer(self, path: Path) -> None:
        try:
            sharded_file.write(path, self.optimizer.state() | random_state(self.device), self.ranks)
        except OSError as e:
            if self.ranks.first:
                raise
            raise RankLost(f"rank 0 reports that {path} cannot be written: {e}") from e


def _floats(t: torch.Tensor) -> Floats:
    return t.double().cpu().numpy()


def _no_weights(first: int, last: int, logp: Floats, entropy: Floats) -> Floats:
    """The loss weights of a pack without samples."""
    return np.zeros(len(logp))


def random_state(device: torch.device) -> dict[str, RankRows]:
    """The state of torch's random number generators."""
    states = {"random.cpu": torch.get_rng_state()}
    if device.type == "cuda":
        states["random.cuda"] = torch.cuda.get_rng_state(device)
    return {name: RankRows(local=state, shape=tuple(state.shape)) for name, state in states.items()}


def set_random_state(states: Mapping[str, RankRows], device: torch.device) -> None:
    torch.set_rng_state(states["random.cpu"].local)
    if "random.cuda" in states:
        torch.cuda.set_rng_state(states["random.cuda"].local, device)


def peak_bytes(device: torch.device) -> int:
    """Most memory that this process used since the last call: of the GPU, or resident memory (now) without one."""
    if device.type != "cuda":
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    peak = torch.cuda.max_memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    return peak


def gap_error(gap: float, gap_max: float, limit: float, engines: Mapping[str, float]) -> WindfallError:
    """The engine's policy is not the one that is trained, so an update would follow a wrong gradient. `engines`: the
    gap of each."""
    how = f"differ by {gap:.3g} nats on average ({gap_max:.3g} at most), but the limit is {limit:g}"
    if not np.isfinite(gap):
        how = f"cannot be compared, because some are not finite (their mean difference is {gap})"
    if len(engines) > 1:
        how += f" ({', '.join(f'{name}: {x:.3g}' for name, x in engines.items())})"
    return WindfallError(
        f"engine and trainer disagree on this model: their log-probs for the same tokens {how}; the update was skipped",
        where="train.engine_gap_limit",
        fix="Likely causes: the engine does not compute this architecture as transformers does, a different version of "
        "transformers or torch on a worker, damaged weights, or a dtype too narrow for this model. Try model.dtype = "
        "'float32', or workers on a CPU, to find which. `windfall resume` continues from the last checkpoint. Raise "
        "the limit only if you know the cause of the gap.",
    )
