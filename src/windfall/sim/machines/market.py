"""Prices of spot machines that change over time. Pure except for the price file."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from windfall.errors import WindfallError


@dataclass(frozen=True, kw_only=True, slots=True)
class Prices:
    """A price per hour as a step function of time, which starts at 0 s.

    >>> p = Prices(from_s=(0.0, 3600.0), usd_per_h=(2.0, 4.0))
    >>> p.at(1800), p.at(3600), p.between(1800, 5400)
    (2.0, 4.0, 3.0)
    """

    from_s: Sequence[float]
    usd_per_h: Sequence[float]

    def at(self, now_s: float) -> float:
        return self.usd_per_h[max(0, bisect_right(self.from_s, now_s) - 1)]

    def between(self, start_s: float, end_s: float) -> float:
        """Dollars for one machine from `start_s` to `end_s`."""
        edges = [start_s, *(s for s in self.from_s if start_s < s < end_s), end_s]
        return sum(self.at(a) * (b - a) for a, b in pairwise(edges)) / 3600


def constant(usd_per_h: float) -> Prices:
    return Prices(from_s=(0.0,), usd_per_h=(usd_per_h,))


def prices(path: Path) -> Prices:
    """Read prices from a file with lines `seconds,usd_per_h`, in order of time; the first is for 0 s."""
    fix = "Write lines 'seconds,usd_per_h', in order of time; the first is for 0 s."
    rows: list[tuple[float, float]] = []
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as e:
        raise WindfallError(f"cannot read the prices: {e.strerror}", where=str(path), fix="Check the path.") from e
    for n, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            at_s, usd = map(float, line.split(","))
            in_order = at_s > rows[-1][0] if rows else at_s == 0
            if not (in_order and math.isfinite(usd) and usd > 0):
                raise ValueError
        except ValueError:
            raise WindfallError(f"{line[:80]!r} is not a price", where=f"{path}, line {n}", fix=fix) from None
        rows.append((at_s, usd))
    if not rows:
        raise WindfallError("no prices in the file", where=str(path), fix=fix)
    return Prices(from_s=tuple(r[0] for r in rows), usd_per_h=tuple(r[1] for r in rows))
