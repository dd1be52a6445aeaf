"""A trainer that sleeps instead of computing. It implements the Trainer interface."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import numpy as np

from windfall.algorithms.given import Loss
from windfall.step_time import StepTime
from windfall.training import Adam, Report, Sample


class SleepingTrainer:
    def __init__(self, service: StepTime, sleep: Callable[[float], object] = time.sleep) -> None:
        self._service, self._sleep = service, sleep
        self.zero_grad()

    def forward(self, samples: Sequence[Sample], loss: Loss | None = None) -> list[Sample]:
        self._sleep(self._service.train_s * sum(len(s.targets) for s in samples) / 3)  # a forward pass
        return list(samples)

    def zero_grad(self) -> None:
        self._tokens = self._responses = 0

    def forward_backward(self, samples: Sequence[Sample], loss: Loss | None = None) -> list[np.ndarray]:
        tokens = sum(len(s.targets) for s in samples)
        self._sleep(self._service.train_s * tokens)
        self._tokens += tokens
        self._responses += len(samples)
        return [np.zeros(len(s.targets)) for s in samples] if loss is not None else []

    def optim_step(self, adam: Adam | None = None) -> Report:
        self._sleep(self._service.update_s)
        done = Report(tokens=self._tokens, responses=self._responses)
        self.zero_grad()
        return done
