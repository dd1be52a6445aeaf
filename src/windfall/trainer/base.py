"""The trainer's interface: accumulate as groups arrive, update, save. Does not import torch: the controller uses it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from windfall.training import Report, Sample


class Trainer(Protocol):
    """Implemented by trainer.trainer.TorchTrainer. `tests/trainer/test_trainer.py` is its contract."""

    def prepare(self, samples: Sequence[Sample]) -> list[Sample]: ...
    def begin(self) -> None: ...
    def accumulate(self, samples: Sequence[Sample]) -> None: ...
    def finish(self) -> Report: ...
