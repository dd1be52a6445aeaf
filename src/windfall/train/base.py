"""The Trainer seam: accumulate as groups arrive, update, save. Imports no torch: the controller needs only this."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from windfall.train.sample import Sample


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
    skipped: bool
    """The gradient was not finite: the weights stay as they were."""


class Trainer(Protocol):
    """The seam. `tests/train/test_trainer.py` says what every implementation must do."""

    def prepare(self, samples: Sequence[Sample]) -> list[Sample]: ...
    def begin(self) -> None: ...
    def accumulate(self, samples: Sequence[Sample]) -> None: ...
    def finish(self) -> Report: ...


class TrainerLost(Exception):
    """The trainer's process is gone, or does not answer. Another takes its place, at the last checkpoint."""
