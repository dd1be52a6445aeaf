"""How long a step of an engine takes, learned online from the steps that were measured. Pure.

    seconds = fixed + each * rows + attended * context

`rows` are the tokens that the step computes, and `context` the tokens that they attend to, over all sequences. The
coefficients are never negative. Older steps count less and less, so the estimate follows a change of the machine.

Every step is predicted before it is learned from. `error` is the recent mean of |actual / predicted - 1|; predictions
for admission are widened by it, so an estimate that is wrong becomes careful (`upper_s`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from windfall.scheduling.least_squares import non_negative

FORGET = 0.96
"""Weight of the past when a new step is added: about the last 25 steps count."""
FIT_EVERY = 4
"""Number of steps between two fits, once there are enough."""
MAX_ERROR = 2.0
"""One step counts with at most this relative error: a single pause of the machine says little about the next step."""
MAX_OUTLIER = 4.0
"""A step that takes more than this many times its prediction is learned from as if it had taken this many times it."""


@dataclass(frozen=True, slots=True)
class StepShape:
    """What a step computes."""

    rows: int
    context: int


class StepTime:
    def __init__(self) -> None:
        self._products = np.zeros((4, 4))
        self._fixed = self._each = self._attended = 0.0
        self.steps = 0
        """Number of steps learned from."""
        self.error = 0.0
        self.predicted_s = self.actual_s = 0.0
        """Sums over all steps that could be predicted, for the metrics."""

    @property
    def known(self) -> bool:
        return self.steps > 0

    def predict_s(self, rows: float, context: float) -> float:
        """The expected time of a step. 0 if nothing is known."""
        return self._fixed + self._each * rows + self._attended * context if rows > 0 else 0.0

    def upper_s(self, rows: float, context: float) -> float:
        """The expected time, widened by the error of recent predictions."""
        return self.predict_s(rows, context) * (1.0 + self.error)

    def observe(self, shape: StepShape, actual_s: float) -> None:
        """A step of this shape took this long. A step without rows or without a positive time is ignored."""
        if shape.rows <= 0 or not 0.0 < actual_s < math.inf:
            return
        predicted_s = self.predict_s(shape.rows, shape.context)
        if predicted_s > 0.0:
            self.predicted_s += predicted_s
            self.actual_s += actual_s
            miss = min(MAX_ERROR, abs(actual_s / predicted_s - 1.0))
            self.error += (miss - self.error) * max(1.0 - FORGET, 1.0 / self.steps)
            actual_s = min(actual_s, MAX_OUTLIER * predicted_s) if self.steps >= FIT_EVERY else actual_s
        row = np.array([1.0, shape.rows, shape.context, actual_s]) / actual_s  # relative errors count alike
        self._products = self._products * FORGET + np.outer(row, row)
        self.steps += 1
        if self.steps <= FIT_EVERY or self.steps % FIT_EVERY == 0:
            self._fit()

    def _fit(self) -> None:
        products = self._products
        if not products[2, 2]:  # no step had a context
            self._fixed, self._each = non_negative(products[np.ix_((0, 1, 3), (0, 1, 3))])
        else:
            self._fixed, self._each, self._attended = non_negative(products)
        if self.steps == 1:  # one point determines no line: a larger step takes in proportion
            value = products[3, 3] / products[1, 3]
            self._fixed, self._each, self._attended = 0.0, value, 0.0

    def most_rows(self, slack_s: float, *, context_per_row: float = 0.0) -> int:
        """The largest number of rows that are expected to take at most `slack_s`, each with so much context."""
        if slack_s <= 0.0 or not self.known:
            return 0
        left_s = slack_s / (1.0 + self.error) - self._fixed
        each = self._each + self._attended * context_per_row
        if left_s < 0.0:
            return 0
        return min(MOST_ROWS, int(left_s / each)) if each * MOST_ROWS > left_s else MOST_ROWS


MOST_ROWS = 1 << 20
"""More rows than any step has."""
