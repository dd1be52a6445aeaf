"""Weighted least squares: a line through points, and a non-negative fit of several columns. Pure.

All fits of step times here minimize the relative error, so that short and long steps count alike: a point with the
value y is weighted by 1 / y². Fits from sums can be updated point by point, without storing the points.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np


class LineSums(NamedTuple):
    """The weighted sums that determine every fit of y = fixed + each * x."""

    w: float
    wx: float
    wxx: float
    wy: float
    wxy: float

    @classmethod
    def relative(cls, points: Iterable[tuple[float, float, float]]) -> LineSums:
        """Sums over points (x, y, weight) for a fit in relative error.

        >>> [round(value, 6) for value in LineSums.relative([(1, 0.011, 1), (10, 0.02, 1), (100, 0.11, 2)]).line()]
        [0.01, 0.001]
        """
        w_ = wx = wxx = wy = wxy = 0.0
        for x, y, weight in points:
            w = weight / (y * y)
            w_, wx, wxx, wy, wxy = w_ + w, wx + w * x, wxx + w * x * x, wy + w * y, wxy + w * x * y
        return cls(w_, wx, wxx, wy, wxy)

    def line(self) -> tuple[float, float] | None:
        """(fixed, each) of the best line, without bounds; None if all x are equal."""
        det = self.w * self.wxx - self.wx * self.wx
        if det <= 1e-12 * self.w * self.wxx:
            return None
        fixed = (self.wy * self.wxx - self.wx * self.wxy) / det
        return fixed, (self.w * self.wxy - self.wx * self.wy) / det

    def constant(self) -> float:
        """`fixed` of the best line with each = 0."""
        return self.wy / self.w

    def slope(self) -> float:
        """`each` of the best line through the origin."""
        return self.wxy / self.wxx

    def proportional(self, ratio: float) -> float:
        """`fixed` of the best line with each = ratio * fixed."""
        return (self.wy + ratio * self.wxy) / (self.w + 2 * ratio * self.wx + ratio * ratio * self.wxx)


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
        x = np.linalg.lstsq(a / np.outer(scale, scale), b / scale, rcond=1e-10)[0] / scale
        error = float(products[count, count] - 2 * x @ b + x @ a @ x)
        if (x >= 0).all() and error < best:
            best, found = error, [0.0] * count
            for n, value in zip(columns, x.tolist(), strict=True):
                found[n] = value
    return found
