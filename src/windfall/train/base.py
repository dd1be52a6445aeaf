"""The Trainer seam: accumulate as groups arrive, update, save. Imports no torch: the controller needs only this."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from windfall.train.sample import Sample

Skipped = Literal["", "nothing", "not finite"]
NOTHING: Skipped = "nothing"
"""The gradient is exactly zero: no response had any credit, or every token was clipped."""
NOT_FINITE: Skipped = "not finite"


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """What one update did. Means are over the tokens trained on."""

    tokens: int
    responses: int
    grad_norm: float
    lr: float
    entropy: float
    engine_gap: float
    """Mean absolute difference between the trainer's log-probs and the engine's, before the first update."""
    engine_gap_max: float
    clipped: float
    """Share of tokens whose weight the clip set to zero though they had an advantage."""
    kl: float
    """Mean of k3 over the tokens; 0 without a reference."""
    skipped: Skipped
    """Why the weights stay as they were; "" if they were updated."""


class Trainer(Protocol):
    """The seam. `tests/train/test_trainer.py` says what every implementation must do."""

    def prepare(self, samples: Sequence[Sample]) -> list[Sample]: ...
    def begin(self) -> None: ...
    def accumulate(self, samples: Sequence[Sample]) -> None: ...
    def finish(self) -> Report: ...


class TrainerLost(Exception):
    """The trainer's process is gone, or does not answer. Another takes its place, at the last checkpoint."""
