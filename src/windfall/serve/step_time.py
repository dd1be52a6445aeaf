"""How long a step of an engine takes, learned online from the steps that were measured. Pure.

    seconds = fixed + each * rows + attended * context

`rows` are the tokens that the step computes, and `context` the tokens that they attend to, over all sequences. The
coefficients are never negative. Older steps count less and less, so the estimate follows a change of the machine. But
steps are forgotten by their size: after a thousand decode steps of equal size, the last prefills still say what a row
costs. Steps of a size that has not occurred for a while count little, but never nothing.

Steps with a prefill have coefficients of their own: on a GPU a prefill is another pass through the model, and its rows
cost less than those of a decode step. Until there was such a step, the coefficients of the other kind are used.

Every step is predicted before it is learned from. `error` is the recent mean of |actual / predicted - 1|; predictions
for admission are widened by it, so an estimate that is wrong becomes careful (`upper_s`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from windfall.controller.scheduling.least_squares import non_negative

FORGET = 0.96
"""Weight of steps of the same size when a new one is added: about the last 25 count. Sizes are powers of two."""
AGE, LEAST_WEIGHT = 0.96, 0.001
"""Factor of a size's weight for every step of another size, and its lower limit."""
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
    prefill: bool = False
    """Whether some rows are of a prompt."""


class _Estimate:
    """The estimate for steps of one kind: with a prefill, or without."""

    def __init__(self) -> None:
        self._products: dict[int, np.ndarray] = {}
        self._weights: dict[int, float] = {}
        """Products and weights of the steps seen, by their size."""
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
        size = shape.rows.bit_length()
        self._weights = {n: max(LEAST_WEIGHT, w * AGE) for n, w in self._weights.items()}
        self._products[size] = self._products.get(size, 0.0) * FORGET + np.outer(row, row)
        self._weights[size] = 1.0
        self.steps += 1
        if self.steps <= FIT_EVERY or self.steps % FIT_EVERY == 0:
            self._fit()

    def _fit(self) -> None:
        products = np.sum([self._weights[n] * each for n, each in self._products.items()], axis=0)
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

    def worthwhile_rows(self, *, context_per_row: float = 0.0) -> float:
        """Number of rows with which half of a step's time is fixed."""
        each = self._each + self._attended * context_per_row
        return self._fixed / each if each > 0.0 else MOST_ROWS


MOST_ROWS = 1 << 20
"""More rows than any step has."""


class StepTime:
    """The estimate for the steps of one tenant."""

    def __init__(self) -> None:
        self._decode, self._prefill = _Estimate(), _Estimate()

    @property
    def known(self) -> bool:
        return self._decode.known or self._prefill.known

    @property
    def error(self) -> float:
        """Recent mean of the relative errors, of the kind of steps with the larger one."""
        return max(self._decode.error, self._prefill.error)

    @property
    def predicted_s(self) -> float:
        """Predicted time of all steps that could be predicted, for the metrics."""
        return self._decode.predicted_s + self._prefill.predicted_s

    @property
    def actual_s(self) -> float:
        """Actual time of the same steps."""
        return self._decode.actual_s + self._prefill.actual_s

    def observe(self, shape: StepShape, actual_s: float) -> None:
        (self._prefill if shape.prefill else self._decode).observe(shape, actual_s)

    def _estimate(self, prefill: bool) -> _Estimate:
        wanted, other = (self._prefill, self._decode) if prefill else (self._decode, self._prefill)
        return wanted if wanted.known else other

    def predict_s(self, rows: float, context: float, prefill: bool = False) -> float:
        """The expected time of a step. 0 if nothing is known."""
        return self._estimate(prefill).predict_s(rows, context)

    def upper_s(self, rows: float, context: float, prefill: bool = False) -> float:
        """The expected time, widened by the error of recent predictions."""
        return self._estimate(prefill).upper_s(rows, context)

    def most_rows(self, slack_s: float, *, context_per_row: float = 0.0, prefill: bool = False) -> int:
        """The largest number of rows that are expected to take at most `slack_s`, each with so much context."""
        return self._estimate(prefill).most_rows(slack_s, context_per_row=context_per_row)

    def worthwhile_rows(self, *, context_per_row: float = 0.0, prefill: bool = False) -> float:
        """Number of rows with which half of a step's time is fixed."""
        return self._estimate(prefill).worthwhile_rows(context_per_row=context_per_row)
