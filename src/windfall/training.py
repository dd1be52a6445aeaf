"""What a loop and a trainer exchange: samples, reports, and the state of a run. No torch: the controller uses it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from itertools import compress
from typing import Any, Literal, Self

import numpy as np

from windfall.algorithms.base import Floats, SampledTokens
from windfall.algorithms.given import Loss
from windfall.chosen_experts import UNKNOWN
from windfall.errors import WindfallError
from windfall.types import Response

Skipped = Literal["", "nothing", "not finite", "engine gap"]
NOTHING: Skipped = "nothing"
"""The gradient is exactly zero: every advantage was zero, or every token was clipped."""
NOT_FINITE: Skipped = "not finite"
ENGINE_GAP: Skipped = "engine gap"
"""The log-probs of engines with a KV cache in fp8 are too far from the trainer's."""
MIN_FRESH = 64
"""A mean gap over fewer fresh tokens says little: one unlikely token could decide it."""

MAX_TOP = 1024
"""Upper limit for the most likely tokens that a caller may ask for at each position of a text."""
MAX_LAG = np.iinfo(np.uint16).max
"""Larger lags are stored as this one, so that they cannot wrap around to 0."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Sample:
    """One sequence to train on: a prompt and what follows it, that is a response or one segment of it. `targets`:
    indices in `ids` of the sampled tokens (never 0)."""

    ids: tuple[int, ...]
    targets: tuple[int, ...]
    behavior: Floats
    """Log-probs of the targets, as reported by the engine. Empty if a given loss does not need them."""
    advantage: float
    limit: int
    """Maximum number of tokens of a response (rollout.max_tokens)."""
    old: Floats | None = None
    """Log-probs of the proximal policy: those of the trainer before the first update of the step. None: use those
    computed now, which are the same until the first update."""
    lag: np.ndarray | None = None
    """Age of each target: the trainer's version minus the one that sampled the token (uint16). None: all 0."""
    engines: tuple[tuple[str, int], ...] = ()
    """(engine, number of targets) of consecutive stretches; an empty name if it is unknown. Empty: all unknown."""
    whole: int = 0
    """Number of sampled tokens of the whole response, of which this is one segment. 0: it is the whole response."""
    advantages: Floats | None = None
    """For a given loss (algorithms/given.py): the weight or advantage of each target. None: `advantage` for all."""
    experts: bytes = b""
    """In a model with experts: those of every token but the last (chosen_experts.py), which the trainer uses, too.
    Empty: its own router chooses."""
    labels: np.ndarray | None = None
    """For a given loss: the token of each target (uint32), if it is not the one in `ids`. None: those in `ids`."""

    @property
    def length(self) -> int:
        return self.whole or len(self.targets)

    @property
    def share(self) -> float:
        """The share of the response's sampled tokens that are in this sequence. Shares of a response add up to 1."""
        return len(self.targets) / self.whole if self.whole else 1.0

    @property
    def replayed(self) -> int:
        """Number of targets with known experts: those of the token before, which predicts the target."""
        if not self.experts:
            return 0
        rows = np.frombuffer(self.experts, np.uint8).reshape(len(self.ids) - 1, -1)
        return int((rows[np.array(self.targets, int) - 1] != UNKNOWN[0]).any(1).sum())

    def tokens(self, logp: Floats) -> SampledTokens:
        """What a given loss is a function of. `logp`: log-probs of the targets now."""
        advantage = self.advantage if self.advantages is None else self.advantages
        return SampledTokens(logp=logp, proximal=self.behavior, advantage=advantage, whole=self.whole)


def given(
    ids: Sequence[int],
    targets: Sequence[int],
    advantages: Sequence[float] | Floats,
    behavior: Sequence[float] | Floats = (),
    labels: Sequence[int] | np.ndarray | None = None,
) -> Sample:
    """A sample for a given loss. `advantages`: the weight or advantage of each target. `behavior`: the log-prob of each
    target when it was sampled; empty for cross entropy. `labels`: the token of each target, if not that in `ids`."""
    return Sample(
        ids=tuple(ids),
        targets=tuple(targets),
        behavior=np.array(behavior, np.float64),
        advantage=0.0,
        limit=len(targets),
        advantages=np.array(advantages, np.float64),
        labels=None if labels is None else np.array(labels, np.uint32),
    )


def check_given(sample: Sample, loss: Loss, where: str) -> None:
    """Raises WindfallError if the loss is not defined for the sample."""
    n, wrong = len(sample.targets), ""
    if sample.advantages is not None and len(sample.advantages) != n:
        wrong = f"{len(sample.advantages)} weights or advantages for {n} targets"
    elif loss.needs_behavior and len(sample.behavior) != n:
        wrong = f"{loss.name} needs the log-prob of each target when it was sampled: {len(sample.behavior)} for {n}"
    elif sample.labels is not None and len(sample.labels) != n:
        wrong = f"{len(sample.labels)} labels for {n} targets"
    elif any(not 0 < t < len(sample.ids) for t in sample.targets):
        wrong = f"a target is not a position from 1 to {len(sample.ids) - 1}"
    if wrong:
        raise WindfallError(wrong, where=where, fix="Give one number per target.")


@dataclass(frozen=True, kw_only=True, slots=True)
class Gradient:
    """The result of one call of forward_backward."""

    s: float
    """Seconds that the trainer worked on it."""
    loss: float = 0.0
    """The given loss: the sum over all targets. 0 for the algorithm of the recipe."""
    logprobs: tuple[Floats, ...] = ()
    """With a given loss: log-probs of the targets of each sample, before any update."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Adam:
    """Settings of AdamW for one update, instead of those of the recipe."""

    lr: float
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.0
    clip_norm: float = 0.0
    """Upper limit for the norm of the gradient. 0 sets none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AdapterSpec:
    """A new adapter for a slot, or what an existing one has (docs/policies.md)."""

    rank: int
    alpha: float
    seed: int = 0
    """Random seed of the numbers that a new adapter begins with."""
    targets: tuple[str, ...] = ()
    """Its layers, as in train.lora.targets; empty: all linear layers of the decoder layers."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadedAdapter:
    """The adapter that a slot has now."""

    spec: AdapterSpec
    parameters: int


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Scores:
    """What a policy predicts for each token of a sequence after the first."""

    logprobs: Floats
    top_ids: np.ndarray
    """The most likely tokens: (tokens, top_k), most likely first."""
    top_logprobs: Floats
    """Their log-probs, of the same shape."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """The result of one update. Means are over the trained tokens."""

    tokens: int
    responses: int
    grad_norm: float = 0.0
    lr: float = 0.0
    entropy: float = 0.0
    engine_gap: float = 0.0
    """Mean absolute difference between the trainer's log-probs and the engine's, before the first update, over fresh
    tokens (lag 0). On older tokens the difference is the drift of the policy. 0 if no token is fresh."""
    engine_gap_max: float = 0.0
    router_gap: float = 0.0
    """In a model with experts that were replayed: `engine_gap` as it would be without, over the fresh tokens of some
    short samples of each rank. 0 if none were."""
    replayed_experts: float = 0.0
    """Share of the tokens whose engine had recorded the experts."""
    expert_load: float = 0.0
    """How many times as many tokens as the average expert the busiest one of a layer computes, by what engines have
    recorded; the mean over layers. 1 is an even load, 0 if nothing was recorded."""
    engine_gaps: dict[str, float] = field(default_factory=dict)
    """`engine_gap` by engine (Capabilities.rounding), over the fresh tokens whose engine is known."""
    engine_tokens: dict[str, int] = field(default_factory=dict)
    """Number of these tokens by engine."""
    clipped: float = 0.0
    """Share of tokens that have a nonzero advantage but whose weight was clipped to zero."""
    capped: float = 0.0
    """Share of tokens whose importance weight was truncated or masked (algorithms/importance.py)."""
    drift: float = 0.0
    """Mean absolute difference between the log-probs of the proximal and the behavior policy over tokens of older
    versions, in nats. 0 if there are none."""
    kl: float = 0.0
    """Mean of the k3 estimator over the tokens; 0 without a reference model."""
    peak_bytes: int = 0
    """Most memory that any rank used: of its GPU since the last update, or resident memory without a GPU."""
    update_s: float = 0.0
    """Seconds of the update of the weights, after the last backward pass."""
    state_moved_bytes: int = 0
    """Bytes of masters and moments that the update copied from and to host memory, on one rank."""
    skipped: Skipped = ""
    """Reason why the weights were not updated; "" if they were."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointState:
    step: int
    """Steps completed."""
    next_task: int
    """Index of the first task that was not drawn for a completed step or ahead of it."""
    open_tasks: tuple[int, ...] = ()
    """Tasks before `next_task` that were drawn but not trained on. Empty if rollout.staleness is 0."""
    replay: tuple[int, ...] = ()
    """Tasks whose groups were trained on and may be replayed."""
    selection: tuple[int, ...] = ()
    """What is known about prompts, if they are selected (PromptSelection.state)."""

    @classmethod
    def of(cls, message: Any) -> Self:
        """The state that a message carries, in fields of the same names."""
        return cls(**{f.name: getattr(message, f.name) for f in fields(cls)})


@dataclass(frozen=True, kw_only=True, slots=True)
class NewVersion:
    """A version that workers can pull."""

    version: int
    digest: str
    update_bytes: int = 0
    """Bytes that a worker with the previous version must pull for this one."""


class TrainerLost(Exception):
    """The trainer's process is gone or does not answer. A new one starts from the last checkpoint."""


class TrainerFailed(TrainerLost):
    """It ended because of an unexpected error while it performed a verb."""


class VerbRefused(WindfallError):
    """A slot cannot perform a verb as it was given: the caller can correct it. The message that was refused has changed
    nothing, unless the text says that the slot is empty now. A call with very many samples is several messages."""


def samples_of(r: Response, advantage: float, limit: int, version: int | None = None) -> list[Sample]:
    """One sample for each segment of a response. `limit`: most tokens that it could have had. `version`: the trainer's,
    for the age of each token; None: all tokens count as fresh. Raises ValueError if a token is newer."""
    whole = r.sampled_count if r.more else 0
    return [_sample(segment, advantage, limit, version, whole) for segment in r.segments]


def _sample(r: Response, advantage: float, limit: int, version: int | None, whole: int) -> Sample:
    first = len(r.prompt)
    return Sample(
        ids=r.prompt + r.tokens,
        targets=tuple(compress(range(first, first + len(r.tokens)), r.sampled)),
        behavior=np.fromiter(compress(r.logprobs, r.sampled), dtype=float),
        advantage=advantage,
        limit=limit,
        lag=None if version is None else _lag(r, version),
        engines=r.engines,
        whole=whole,
        experts=r.experts,
    )


def _lag(r: Response, version: int) -> np.ndarray | None:
    lag = version - np.fromiter(compress(r.versions, r.sampled), dtype=np.int64)
    if not lag.any():
        return None
    if lag.min() < 0:
        newest = version - int(lag.min())
        raise ValueError(f"response {r.id}: a token is from version {newest}, but the trainer is at version {version}")
    return np.minimum(lag, MAX_LAG).astype(np.uint16)
