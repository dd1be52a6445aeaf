"""The trainer's interface: accumulate as groups arrive, update, save. Does not import torch: the controller uses it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from windfall.trainer.sample import Sample

Skipped = Literal["", "nothing", "not finite"]
NOTHING: Skipped = "nothing"
"""The gradient is exactly zero: every advantage was zero, or every token was clipped."""
NOT_FINITE: Skipped = "not finite"


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
    engine_gaps: dict[str, float] = field(default_factory=dict)
    """`engine_gap` by engine, over the fresh tokens whose engine is known."""
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
    experts: dict[str, Any] | None = None
    """How tokens spread over the experts of a model (trainer/model/experts.py); None for a model without experts."""
    skipped: Skipped = ""
    """Reason why the weights were not updated; "" if they were."""


class Trainer(Protocol):
    """Implemented by trainer.trainer.TorchTrainer. `tests/trainer/test_trainer.py` is its contract."""

    def prepare(self, samples: Sequence[Sample]) -> list[Sample]: ...
    def begin(self) -> None: ...
    def accumulate(self, samples: Sequence[Sample]) -> None: ...
    def finish(self) -> Report: ...


class TrainerLost(Exception):
    """The trainer's process is gone or does not answer. A new one starts from the last checkpoint."""
