"""The trainer of a torch model, by the verbs of a loop.

    trainer.forward_backward(samples)    any number of times, in any order: gradients add up
    report = trainer.optim_step()        divide once, clip, step; the next version of the weights is in the module

The gradient of any algorithm is one weight per token (see algorithms/base.py), so the loss differentiated here is
always the same: the negative sum of weight * log-prob.

The proximal policy (algorithms/base.py) is the one at the start of the step. A step with one update needs no separate
pass for it: until the update, the log-probs computed for the gradient are those of the proximal policy. A step with
several updates calls `forward` on all its samples before the first update.

Tokens of older versions differ from the proximal policy because the policy has moved (`drift`). Only fresh tokens tell
whether engine and trainer compute the same model (`engine_gap`), so only they can end the run. An update with few fresh
tokens among older ones (MIN_FRESH) is not checked. If the gap comes from engines with a KV cache in fp8, the update is
skipped instead, and the run goes on without fp8.

With several ranks, these methods run on rank 0, which plans the packs of all ranks and gives the orders; methods with a
leading underscore run on every rank. One rank alone takes the same path.
"""

from __future__ import annotations

import heapq
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError

from windfall.algorithms.base import Algorithm, Floats, SampledTokens
from windfall.algorithms.given import Loss
from windfall.algorithms.importance import ImportanceMode, importance_weights
from windfall.algorithms.kl import k3, kl_weights
from windfall.errors import WindfallError
from windfall.recipe.sections import Recipe
from windfall.trainer.model.gradients import trained
from windfall.trainer.model.logprobs import BaseLearner, Learner, PolicyModule
from windfall.trainer.model.lora import Adapters
from windfall.trainer.optimizer import Optimizer
from windfall.trainer.ranks import sharded_file
from windfall.trainer.ranks.ranks import Orders, RankLost, TrainerRanks
from windfall.trainer.ranks.ulysses import ContextGroup
from windfall.training import ENGINE_GAP, MIN_FRESH, Adam, Report, Sample
from windfall.types import in_fp8

FILLER = Sample(ids=(0, 0), targets=(1,), behavior=np.zeros(1), advantage=0.0, limit=1)
"""What a rank without work computes, with weight zero: all ranks must make the same passes."""

COMPARED_TOKENS = 4096
"""Most tokens that a rank computes without replay, once per update, to measure what replay does."""

GIVEN_TEMPERATURE = 1.0
"""Temperature of the policy in a given loss. The temperature of the recipe belongs to its algorithm."""


class TokenTotals:
    """Totals over trained tokens, which add up over packs and ranks."""

    def __init__(self) -> None:
        self.sums: Counter[str] = Counter()
        """`responses`: a segment counts as its share of the response. `gap` and `drift`: distance between proximal and
        behavior log-probs over fresh tokens, and over tokens of older versions."""
        self.engine_tokens: Counter[str] = Counter()
        """Number of fresh tokens by engine."""
        self.engine_sums: Counter[str] = Counter()
        """The sum of their `gap`."""
        self.gap_max = 0.0
        self.loads: Any = 0
        """How many tokens each expert computes, by layer."""
        self.peak_bytes = 0

    def count(self, distance: Floats, older: Floats, engines: Sequence[tuple[str, int]] = (), **sums: Any) -> None:
        """`distance`: between proximal and behavior log-probs. `older`: lag of each token."""
        fresh, start = older <= 0, 0
        for name, count in engines:
            part = slice(start, start + count)
            self.engine_tokens[name] += int(fresh[part].sum())
            self.engine_sums[name] += np.where(fresh, distance, 0.0)[part].sum().item()
            start += count
        self.gap_max = float(np.maximum(self.gap_max, distance[fresh].max(initial=0.0)))
        sums |= {"tokens": len(distance), "fresh": fresh, "gap": distance[fresh], "drift": distance[~fresh]}
        for name, values in sums.items():
            self.sums[name] += np.sum(values).item()

    def add(self, other: TokenTotals) -> None:
        for name in ("sums", "engine_tokens", "engine_sums"):
            getattr(self, name).update(getattr(other, name))
        self.gap_max = np.maximum(self.gap_max, other.gap_max).item()
        self.loads = self.loads + other.loads
        self.peak_bytes = max(self.peak_bytes, other.peak_bytes)

    def expert_load(self) -> float:
        """That of the busiest expert of a layer, relative to the mean of the layer; the mean over layers."""
        return float((self.loads.max(1) / self.loads.mean(1)).mean()) if np.any(self.loads) else 0.0

    def engine_gaps(self) -> dict[str, float]:
        """The mean gap of each known engine."""
        return {name: self.engine_sums[name] / n for name, n in self.known_tokens().items()}

    def known_tokens(self) -> dict[str, int]:
        """The number of fresh tokens of each known engine."""
        return {name: n for name, n in sorted(self.engine_tokens.items()) if name and n}


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
        adapters: Adapters | None = None,
        learner: Learner | None = None,
        context: ContextGroup | None = None,
        host_share: float = 0.0,
    ) -> None:
        """`model`: a model of transformers or a sharded policy (sharding.py). `adapters`: train only these; other
        trainers may train other adapters of the same model. `reference`: the model of the KL penalty, or the
        `Adapters` of `model`, for its base. `orders` reach all ranks. `learner`: of this model, if it has one that
        trainers share. `context`: the ranks with which this one computes its packs; by default none. `host_share`: of
        masters and moments, how much is in host memory."""
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
        self.fp8 = recipe.engine.kv_dtype == "fp8"
        self.orders = orders or Orders(TrainerRanks.alone())
        self.ranks = self.orders.ranks
        self.device = policy.device
        updates = recipe.run.steps * train.minibatches
        self._adapters = adapters
        weights = trained(self.model) if adapters is None else adapters.weights()
        options: dict[str, Any] = {"ranks": self.ranks, "dtype": policy.dtype, "host_share": host_share}
        self.optimizer = Optimizer(weights, train, updates, **options)
        self.context = context or ContextGroup()
        activations, pack = train.checkpoint_activations, self.context.pack
        self.learner = learner or Learner(
            policy, self.optimizer.gradients, checkpoint_activations=activations, pack=pack
        )
        self.must_replay = train.replay_routing is True
        self.replays = train.replay_routing is not False and self.learner.replays
        self.reference: Any = None
        if reference is not None:
            adapted = isinstance(reference, Adapters)
            self.reference = BaseLearner(self.learner, reference) if adapted else Learner(reference, pack=pack)
        self.orders.add(self)
        self._zero_grad()

    # what the controller asks for; rank 0 passes it on to the others

    def forward(self, samples: Sequence[Sample], loss: Loss | None = None) -> list[Sample]:
        """Store the log-probs of the policy as `old`: at the start of a step of several updates, or with the loss that
        will be given."""
        plan = self._plan([s for s in samples if s.targets])
        temperature = self.temperature if loss is None else GIVEN_TEMPERATURE
        found = self._by_sample(plan, self.orders.call(self._forward, each=[(packs, temperature) for packs in plan]))
        return [replace(s, old=found.get(id(s), np.zeros(0))) for s in samples]

    def zero_grad(self) -> None:
        self.orders.call(self._zero_grad)

    def forward_backward(self, samples: Sequence[Sample], loss: Loss | None = None) -> list[Floats]:
        """Add the gradient of the algorithm, or of a given loss. With a given loss, returns the samples' log-probs."""
        if loss is not None:
            plan = self._plan([s for s in samples if s.targets])
            learned = self.orders.call(self._forward_backward_given, each=[(packs, loss) for packs in plan])
            found = self._by_sample(plan, learned)
            return [found.get(id(s), np.zeros(0)) for s in samples]
        # Samples without an advantage get packs of their own. They need no backward pass, and only count in the report.
        credited = self._plan([s for s in samples if s.targets and s.advantage])
        others = self._plan([s for s in samples if s.targets and not s.advantage])
        self.orders.call(
            self._forward_backward, each=list(zip(credited, others, self._to_compare(samples), strict=True))
        )
        return []

    def optim_step(self, adam: Adam | None = None) -> Report:
        return self.orders.call(self._optim_step, adam)

    def write_optimizer(self, path: Path) -> None:
        """Write the state of the optimizer into a file."""
        self.orders.call(self._write_optimizer, path)

    def restore_optimizer(self, path: Path) -> None:
        """Restore what `write_optimizer` wrote, maybe by another number of ranks. Every rank calls this itself."""
        try:
            self.optimizer.restore(path)
        except (OSError, SafetensorError, ValueError) as e:
            fix = "Use a checkpoint of the same weights and train.optimizer, or restore its files from a copy."
            raise WindfallError(f"the optimizer's state cannot be read: {e}", where=str(path), fix=fix) from e

    def _plan(self, samples: Sequence[Sample]) -> list[list[list[Sample]]]:
        """The packs of every rank."""
        sizes = {"ranks": self.ranks.size, "context": self.context.size}
        return packs_of_ranks(samples, self.micro_tokens, **sizes, padded=self.learner.pads)

    def _by_sample(
        self, plan: Sequence[Sequence[Sequence[Sample]]], found: Sequence[Sequence[Sequence[Floats]]] | None
    ) -> dict[int, Floats]:
        """What all ranks have found of the samples of their packs, by the identity of the sample."""
        assert found is not None, "this is rank 0"
        return {
            id(s): logp
            for packs, groups_rows in zip(plan[:: self.context.size], found, strict=True)
            for pack, rows in zip(packs, groups_rows, strict=True)
            for s, logp in zip(pack, rows, strict=True)
        }

    def _to_compare(self, samples: Sequence[Sample]) -> list[list[list[Sample]]]:
        """What every rank computes without replay, too: one pack of the shortest samples with fresh tokens and known
        experts, once per update. No packs if there are no such samples."""
        known = [s for s in samples if s.targets and s.experts and (s.lag is None or not s.lag.all())]
        known = [] if self._routing_compared or not self.replays else sorted(known, key=lambda s: len(s.ids))
        room = COMPARED_TOKENS * self.ranks.size // self.context.size
        few = known[: max(1, sum(end <= room for end in accumulate(len(s.ids) for s in known)))]
        self._routing_compared |= bool(few)
        return [packs[:1] for packs in self._plan(few)]

    # what every rank does

    def _forward(self, packs: Sequence[Sequence[Sample]], temperature: float) -> list[list[list[Floats]]] | None:
        """The log-probs of the samples of all context groups, on rank 0."""
        self._use_adapters()
        return self._gather([self._logprobs(self.learner.score, pack, temperature) for pack in packs])

    def _gather(self, found: list[list[Floats]]) -> list[list[list[Floats]]] | None:
        """What the first rank of every context group has found, on rank 0: that of the others is equal."""
        groups = self.ranks.quick.gather([] if self.context.rank else found)
        return groups and groups[:: self.context.size]

    def _compare_routing(self, pack: Sequence[Sample]) -> None:
        """Measure the gap that a pack would have without replay."""
        rows = self._logprobs(partial(self.learner.score, replay=False), pack, self.temperature)
        for s, now in zip(pack, rows, strict=True):
            fresh = np.full(len(now), True) if s.lag is None else s.lag <= 0
            distance = np.abs(now - s.behavior)[fresh]
            self._totals.sums["router_gap"] += distance.sum().item()
            self._totals.sums["router_tokens"] += len(distance)

    def _zero_grad(self) -> None:
        self.optimizer.zero()
        self._routing_compared = False
        self._totals = TokenTotals()

    def _use_adapters(self) -> None:
        if self._adapters is not None:
            self._adapters.use()

    def _forward_backward(
        self, credited: Sequence[Sequence[Sample]], others: Sequence[Sequence[Sample]],
        compared: Sequence[Sequence[Sample]] = (),
    ) -> None:  # fmt: skip
        self._use_adapters()
        for pack in compared:
            self._compare_routing(pack)
        self._totals.loads = sum(map(self.learner.loads, (*credited, *others)), self._totals.loads)
        for pack in (*credited, *(others if self.reference is not None else ())):
            reference: Sequence[Any] = [None] * len(pack)
            if self.reference is not None:
                reference = self._logprobs(self.reference.score, pack, self.temperature)
            weights = partial(self._weights, pack, reference) if pack else _no_weights
            self.learner.learn(pack or [FILLER], self.temperature, weights)
        for pack in others if self.reference is None else ():
            logp, entropy = self.learner.score(pack or [FILLER], self.temperature)
            if pack:
                self._weights(pack, [None] * len(pack), 0, len(pack), *map(_floats, (logp, entropy)))

    def _forward_backward_given(self, packs: Sequence[Sequence[Sample]], loss: Loss) -> list[list[list[Floats]]] | None:
        """Add the gradient of a given loss. Returns the log-probs of all samples, on rank 0."""
        self._use_adapters()
        found: list[list[Floats]] = [[] for _ in packs]
        for pack, rows in zip(packs, found, strict=True):
            weights = partial(self._given_weights, pack, loss, rows) if pack else _no_weights
            self.learner.learn(pack or [FILLER], GIVEN_TEMPERATURE, weights)
        return self._gather(found)

    def _given_weights(
        self, pack: Sequence[Sample], loss: Loss, found: list[Floats], first: int, last: int, logp: Floats,
        entropy: Floats,
    ) -> Floats:  # fmt: skip
        """Loss weights of the tokens of samples `first` to `last` of the pack. Adds their log-probs to `found`."""
        pack = pack[first:last]
        rows = np.split(logp, np.cumsum([len(s.targets) for s in pack])[:-1])
        found += rows
        zero = np.zeros(len(logp))  # the caller answers for the engine's log-probs
        self._totals.count(zero, zero, entropy=entropy, responses=len(pack), given=len(logp))
        return np.concatenate([loss.weights(s.tokens(now)) for s, now in zip(pack, rows, strict=True)])

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
                kl=0.0 if ref is None else k3(now, ref),
                divisor=share,
                responses=s.share,
                replayed_experts=s.replayed if self.replays else 0,
            )
            out.append(w)
        return np.concatenate(out)

    def _logprobs(self, score: Any, pack: Sequence[Sample], temperature: float) -> list[Floats]:
        logp, _ = score(pack or [FILLER], temperature)
        return np.split(_floats(logp), np.cumsum([len(s.targets) for s in pack])[:-1]) if pack else []

    def _optim_step(self, adam: Adam | None = None) -> Report:
        """Every rank computes the same report, and updates its own rows."""
        mine, t = self._totals, TokenTotals()
        mine.peak_bytes = peak_bytes(self.device)
        totals = self.ranks.quick.all_gather(mine)
        for each in totals[:: self.context.size]:  # those of a context group are equal
            t.add(each)
        t.peak_bytes = max(each.peak_bytes for each in totals)
        sums, adam = t.sums, adam or self.optimizer.settings()
        if sums["given"] and sums["divisor"]:
            raise WindfallError(
                "an update cannot have both the gradient of a given loss, which is a sum, and that of the algorithm",
                where="forward_backward",
                fix="Give a loss with every call before an optim_step, or with none.",
            )
        n, older = max(sums["tokens"], 1), sums["tokens"] - sums["fresh"]
        gap = sums["gap"] / sums["fresh"] if sums["fresh"] else 0.0
        checked = not older or sums["fresh"] >= MIN_FRESH
        rejected = checked and not gap <= self.gap_limit  # a NaN fails every comparison
        if rejected and not self._only_fp8(t.engine_gaps()):
            raise gap_error(gap, t.gap_max, self.gap_limit, t.engine_gaps())
        if self.must_replay and not sums["given"] and sums["replayed_experts"] < sums["tokens"]:
            without = int(sums["tokens"] - sums["replayed_experts"])
            raise WindfallError(
                f"the engines did not record the experts of {without} of {int(sums['tokens'])} tokens",
                where="train.replay_routing",
                fix="Use workers with engine.name = 'windfall' (vLLM's log says why it records none), or set 'auto'.",
            )
        divisor = 1.0 if sums["given"] else sums["divisor"]
        norm, skipped = self.optimizer.update(0.0 if rejected else divisor, adam)
        self._routing_compared = False
        self._totals = TokenTotals()  # the update has already set the gradients to zero
        return Report(
            tokens=sums["tokens"],
            responses=round(sums["responses"]),
            grad_norm=norm,
            lr=adam.lr,
            engine_gap=gap,
            engine_gap_max=t.gap_max,
            engine_gaps=t.engine_gaps(),
            engine_tokens=t.known_tokens(),
            expert_load=t.expert_load(),
            router_gap=sums["router_gap"] / max(sums["router_tokens"], 1),
            drift=sums["drift"] / older if older else 0.0,
            skipped=ENGINE_GAP if rejected else skipped,
            peak_bytes=t.peak_bytes,
            update_s=self.optimizer.update_s,
            state_moved_bytes=self.optimizer.moved_bytes,
            **{name: sums[name] / n for name in ("entropy", "clipped", "capped", "kl", "replayed_experts")},
        )

    def _only_fp8(self, engine_gaps: Mapping[str, float]) -> bool:
        """Whether a KV cache in fp8 explains a gap. Tokens from a journal count as such: their engine is not known."""
        return self.fp8 and all(gap <= self.gap_limit for name, gap in engine_gaps.items() if not in_fp8(name))

    def _write_optimizer(self, path: Path) -> None:
        try:
            sharded_file.write(path, self.optimizer.state(), self.ranks)
        except OSError as e:
            if self.ranks.first:
                raise
            raise RankLost(f"rank 0 reports that {path} cannot be written: {e}") from e


def _floats(t: torch.Tensor) -> Floats:
    return t.double().cpu().numpy()


def _no_weights(first: int, last: int, logp: Floats, entropy: Floats) -> Floats:
    """The loss weights of a pack without samples."""
    return np.zeros(len(logp))


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
        "transformers or torch on a worker, damaged weights, or a dtype too narrow for this model or for its KV cache "
        "(engine.kv_dtype). Try model.dtype = 'float32', or workers on a CPU, to find which. `windfall resume` goes on "
        "from the last checkpoint. Raise the limit only if you know the cause of the gap.",
    )


def packs(samples: Sequence[Sample], tokens: int, *, padded: bool = True) -> list[list[Sample]]:
    """Micro-batches of at most `tokens` each, longest samples first. With padding, the size of a pack is its number of
    samples times the longest one; without, its number of tokens. A longer sample is a pack alone. Deterministic."""
    ordered = sorted(samples, key=lambda s: -len(s.ids))
    if not padded:
        return [pack for pack in _even(ordered, tokens, padded=False) if pack]
    out: list[list[Sample]] = []
    room = 0
    for s in ordered:
        if not out or room < len(out[-1][0].ids):
            out.append([])
            room = max(tokens, len(s.ids))
        out[-1].append(s)
        room -= len(out[-1][0].ids)
    return out


def packs_of_ranks(
    samples: Sequence[Sample], tokens: int, ranks: int, *, padded: bool, context: int = 1
) -> list[list[list[Sample]]]:
    """The packs of every rank: the same number for each, about equally full, with empty ones where there are too few
    samples. All ranks make a pass together, so a pass takes as long as its largest pack. The ranks of a context group,
    `context` of them, have the same packs."""
    if context > 1:
        of_groups = packs_of_ranks(samples, tokens, ranks // context, padded=padded)
        return [packs for packs in of_groups for _ in range(context)]
    if ranks == 1:
        return [packs(samples, tokens, padded=padded)]
    ordered = sorted(samples, key=lambda s: -len(s.ids))
    made = _even(ordered, tokens, padded=padded, multiple=ranks)
    made.sort(key=lambda pack: -sum(len(s.ids) for s in pack))
    return [made[rank::ranks] for rank in range(ranks)]


def _even(samples: Sequence[Sample], tokens: int, *, padded: bool, multiple: int = 1) -> list[list[Sample]]:
    """As few packs as possible (a multiple of `multiple`), about equally full: each sample goes to the emptiest; packs
    are added until all fit. The samples are ordered, longest first."""
    count = -(-sum(len(s.ids) for s in samples) // tokens)
    while True:
        count = -(-count // multiple) * multiple
        out: list[list[Sample]] = [[] for _ in range(count)]
        heap = [(0, i) for i in range(count)]
        for s in samples:
            full, i = heapq.heappop(heap)
            out[i].append(s)
            heapq.heappush(heap, (full + len(s.ids), i))
        if all(len(pack) < 2 or _size(pack, padded) <= tokens for pack in out):
            return out
        count += 1


def _size(pack: Sequence[Sample], padded: bool) -> int:
    return len(pack) * len(pack[0].ids) if padded else sum(len(s.ids) for s in pack)
