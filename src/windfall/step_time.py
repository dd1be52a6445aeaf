"""How long a step of an engine takes: one model for scheduling, serving, the planner and the simulator. Pure.

    decode step = fixed_s (reading the weights) + each_s * responses + context_s * tokens in their contexts (KV cache)
    prefill     = prefill_s * tokens

The times are fitted to measurements (`fit`, `non_negative`), computed from a data sheet (plan/model/cost_model.py), or
given in a recipe. All fits minimize the relative error, so that short and long steps count alike. No time is below 0.
`LearnedStepTime` learns step by step, for an engine that must predict its next one.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import ClassVar, NamedTuple

import numpy as np

FORGET = 0.96
"""Weight of steps of the same size when a new one is learned: about the last 25 count. Sizes are powers of two."""
MIN_WEIGHT = 0.001
"""Lower limit for the weight of a size that does not occur; every step of another size multiplies it by FORGET."""
FIT_EVERY = 4
"""Number of steps between two fits, once there are enough."""
MAX_ERROR = 2.0
"""One step counts with at most this relative error: a single pause of the machine says little about the next step."""
MAX_OUTLIER = 4.0
"""A step that takes more than this many times its prediction is learned from as if it had taken this many times it."""
MOST_ROWS = 1 << 20
"""More rows than any step has."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepTime:
    """The times of one machine.

    >>> engine = StepTime(fixed_s=0.002, each_s=0.00001, prefill_s=0.00001)
    >>> round(engine.tok_per_s(100)), round(engine.tok_per_s(800)), round(engine.step_s(100), 6)
    (33333, 80000, 0.003)
    """

    fixed_s: float
    """Seconds of a step with an empty batch."""
    each_s: float
    """Seconds that a response with `usual_context` tokens in its context adds to a step."""
    context_s: float = 0.0
    """Seconds that every further token in the context of a response adds."""
    prefill_s: float = 0.0
    """Seconds to prefill one token."""
    train_s: float = 0.0
    """Seconds to train on one token."""
    update_s: float = 0.0
    """Seconds of an optimizer update, including the copy of the weights that workers pull."""
    over_batch: float = 0.0
    over_s: float = 0.0
    """Extra seconds for each response above `over_batch` in a step, for engines that slow down there. 0: none."""
    usual_context: float = 0.0
    TIMES: ClassVar = ("fixed_s", "each_s", "context_s", "prefill_s", "train_s", "update_s", "over_s")
    KEYS: ClassVar = (*TIMES, "over_batch")
    """What a recipe or a cluster file may give."""

    def step_s(self, batch: float, context: float | None = None) -> float:
        """Seconds between two tokens of a response. `context`: tokens in all contexts; None: the usual context."""
        seconds = self.fixed_s + self.each_s * batch
        if context is not None:
            seconds += self.context_s * (context - self.usual_context * batch)
        if self.over_s and batch > self.over_batch:
            seconds += self.over_s * (batch - self.over_batch)
        return seconds

    def steps_in(self, seconds: float, batch: float, context: float) -> float:
        """Number of consecutive steps of one batch that fit into `seconds`. Every step adds a token to each context.

        >>> s = StepTime(fixed_s=1.0, each_s=0.1, context_s=0.01)
        >>> round(s.steps_in(sum(s.step_s(2, 100 + 2 * n) for n in range(3)), 2, 100), 9)
        3.0
        """
        a, b = self.context_s * batch / 2, self.step_s(batch, context)
        if seconds <= 0 or not batch:
            return 0.0
        return seconds / b if a == 0 else (math.sqrt((b - a) ** 2 + 4 * a * seconds) - (b - a)) / (2 * a)

    def tok_per_s(self, batch: float) -> float:
        return batch / self.step_s(batch) if batch > 0 else 0.0

    def slower(self, factor: float) -> StepTime:
        """The same machine with every time multiplied by `factor`.

        >>> s = StepTime(fixed_s=1.0, each_s=0.5, over_batch=8, over_s=2.0).slower(2)
        >>> s.fixed_s, s.each_s, s.over_batch, s.over_s
        (2.0, 1.0, 8, 4.0)
        """
        return replace(self, **{name: getattr(self, name) * factor for name in self.TIMES})


class StepPoint(NamedTuple):
    """A measured step time."""

    batch: float
    step_s: float
    weight: float = 1.0


def fit(points: Iterable[tuple[float, float, float]], min_ratio: float) -> StepTime:
    """Fits fixed_s and each_s to points (batch, step_s, weight). Neither is less than `min_ratio` times the other, so
    that no response is free.

    >>> found = fit([StepPoint(1, 0.011), StepPoint(10, 0.02), StepPoint(100, 0.11, 2)], min_ratio=1e-4)
    >>> round(found.fixed_s, 6), round(found.each_s, 6)
    (0.01, 0.001)
    """
    w = wx = wxx = wy = wxy = 0.0
    for x, y, weight in points:
        scaled = weight / (y * y)
        w += scaled
        wx += scaled * x
        wxx += scaled * x * x
        wy += scaled * y
        wxy += scaled * x * y
    determinant, r = w * wxx - wx * wx, min_ratio
    if determinant > 1e-12 * w * wxx:
        fixed_s, each_s = (wy * wxx - wx * wxy) / determinant, (w * wxy - wx * wy) / determinant
    else:
        fixed_s, each_s = wy / w, 0.0  # one batch size says nothing about others
    if fixed_s < r * each_s:
        each_s = (wxy + r * wy) / (wxx + 2 * r * wx + r * r * w)
        fixed_s = r * each_s
    elif each_s < r * fixed_s:
        fixed_s = (wy + r * wxy) / (w + 2 * r * wx + r * r * wxx)
        each_s = r * fixed_s
    return StepTime(fixed_s=fixed_s, each_s=each_s)


def non_negative(products: np.ndarray) -> list[float]:
    """The coefficients of the best fit of the last column by the others, with no coefficient below 0.

    `products`: weighted sums of the products of every two columns. Every subset of columns is tried, with the other
    coefficients at 0, so use this only for a few columns.

    >>> rows = np.array([[1.0, batch, 3.0 + 2.0 * batch] for batch in (1, 2, 3)])
    >>> [round(x, 6) for x in non_negative(rows.T @ rows)]
    [3.0, 2.0]
    """
    count = len(products) - 1
    best, found = math.inf, [0.0] * count
    for mask in range(1, 1 << count):
        columns = [n for n in range(count) if mask >> n & 1]
        a, b = products[np.ix_(columns, columns)], products[columns, count]
        scale = np.sqrt(np.diag(a))
        if not scale.all():  # a column of zeros explains nothing
            continue
        x = np.linalg.lstsq(a / np.outer(scale, scale), b / scale, rcond=1e-10)[0] / scale
        error = float(products[count, count] - 2 * x @ b + x @ a @ x)
        if (x >= 0).all() and error < best:
            best, found = error, [0.0] * count
            for n, value in zip(columns, x.tolist(), strict=True):
                found[n] = value
    return found


class _LearnedKind:
    """The estimate for steps of one kind: with a prefill, or without."""

    def __init__(self) -> None:
        self._products: dict[int, np.ndarray] = {}
        self._weights: dict[int, float] = {}
        """Products and weights of the steps seen, by their size."""
        self.time = StepTime(fixed_s=0.0, each_s=0.0)
        self.steps = 0
        """Number of steps learned from."""
        self.error = 0.0
        self.predicted_s = 0.0
        self.actual_s = 0.0

    def predict_s(self, rows: float, context: float) -> float:
        return self.time.step_s(rows, context) if rows > 0 else 0.0

    def observe(self, seconds: float, rows: int, context: int) -> None:
        predicted_s = self.predict_s(rows, context)
        if predicted_s > 0.0:
            self.predicted_s += predicted_s
            self.actual_s += seconds
            miss = min(MAX_ERROR, abs(seconds / predicted_s - 1.0))
            self.error += (miss - self.error) * max(1.0 - FORGET, 1.0 / self.steps)
            seconds = min(seconds, MAX_OUTLIER * predicted_s) if self.steps >= FIT_EVERY else seconds
        row = np.array([1.0, rows, context, seconds]) / seconds  # relative errors count alike
        size = rows.bit_length()
        self._weights = {n: max(MIN_WEIGHT, w * FORGET) for n, w in self._weights.items()}
        self._products[size] = self._products.get(size, 0.0) * FORGET + np.outer(row, row)
        self._weights[size] = 1.0
        self.steps += 1
        if self.steps == 1:  # one point determines no line: a larger step takes in proportion
            self.time = StepTime(fixed_s=0.0, each_s=seconds / rows)
        elif self.steps <= FIT_EVERY or self.steps % FIT_EVERY == 0:
            products = sum(self._weights[n] * each for n, each in self._products.items())
            fixed_s, each_s, context_s = non_negative(np.asarray(products))
            self.time = StepTime(fixed_s=fixed_s, each_s=each_s, context_s=context_s)

    def row_s(self, context_per_row: float) -> float:
        return self.time.each_s + self.time.context_s * context_per_row


class LearnedStepTime:
    """The time of an engine's steps, learned from the steps that were measured.

    The rows of a step are the tokens that it computes; its context is the tokens that they attend to, over all
    sequences. Older steps count less and less, so the estimate follows a change of the machine. But steps are forgotten
    by their size: after a thousand decode steps of equal size, the last prefills still say what a row costs. Steps of a
    size that has not occurred for a while count little, but never nothing.

    Steps with a prefill have coefficients of their own: on a GPU a prefill is another pass through the model, and its
    rows cost less than those of a decode step. Until there was such a step, those of the other kind are used.

    Every step is predicted before it is learned from. `error` is the recent mean of |actual / predicted - 1|;
    predictions for admission are widened by it, so an estimate that is wrong becomes careful (`upper_s`).
    """

    def __init__(self) -> None:
        self._decode = _LearnedKind()
        self._prefill = _LearnedKind()

    @property
    def known(self) -> bool:
        return self._decode.steps + self._prefill.steps > 0

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
        return self._decode.actual_s + self._prefill.actual_s

    def observe(self, seconds: float, rows: int, context: int, prefill: bool = False) -> None:
        if rows > 0 and 0.0 < seconds < math.inf:
            (self._prefill if prefill else self._decode).observe(seconds, rows, context)

    def _kind(self, prefill: bool) -> _LearnedKind:
        wanted, other = (self._prefill, self._decode) if prefill else (self._decode, self._prefill)
        return wanted if wanted.steps else other

    def predict_s(self, rows: float, context: float, prefill: bool = False) -> float:
        """The expected time of a step. 0 if nothing is known."""
        return self._kind(prefill).predict_s(rows, context)

    def upper_s(self, rows: float, context: float, prefill: bool = False) -> float:
        """The expected time, widened by the error of recent predictions."""
        kind = self._kind(prefill)
        return kind.predict_s(rows, context) * (1.0 + kind.error)

    def most_rows(self, slack_s: float, *, context_per_row: float = 0.0, prefill: bool = False) -> int:
        """The largest number of rows that are expected to take at most `slack_s`, each with so much context."""
        kind = self._kind(prefill)
        left_s = slack_s / (1.0 + kind.error) - kind.time.fixed_s
        if slack_s <= 0.0 or not kind.steps or left_s < 0.0:
            return 0
        row_s = kind.row_s(context_per_row)
        return min(MOST_ROWS, int(left_s / row_s)) if row_s * MOST_ROWS > left_s else MOST_ROWS

    def worthwhile_rows(self, *, context_per_row: float = 0.0, prefill: bool = False) -> float:
        """Number of rows with which half of a step's time is fixed."""
        kind = self._kind(prefill)
        row_s = kind.row_s(context_per_row)
        return kind.time.fixed_s / row_s if row_s > 0.0 else MOST_ROWS
