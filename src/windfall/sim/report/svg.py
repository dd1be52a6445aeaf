"""The two figures of a simulation as SVG text: the fleet over time, and cost against throughput of the variants."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

from windfall.sim.report.figures import Moment

WIDTH, HEIGHT, LEFT, BOTTOM, TOP, RIGHT = 760, 300, 70, 40, 34, 70
COLOURS = ("#4269d0", "#efb118", "#ff725c", "#6cc5b0", "#3ca951", "#ff8ab7", "#a463f2", "#97bbf5", "#9c6b4e")


@dataclass(frozen=True, kw_only=True, slots=True)
class Dot:
    name: str
    tok_per_s: float
    usd_per_million: float


def page(moments: Sequence[Moment], dots: Sequence[Dot], title: str) -> str:
    """Both, one above the other."""
    height = HEIGHT * (2 if dots else 1)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" '
        f'viewBox="0 0 {WIDTH} {height}" font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{height}" fill="white"/>', _timeline(moments, title),
    ]  # fmt: skip
    if dots:
        parts.append(f'<g transform="translate(0,{HEIGHT})">{_scatter(dots)}</g>')
    return "\n".join([*parts, "</svg>", ""])


def ticks(most: float, count: int = 4) -> list[float]:
    """Round numbers from 0 up to `most`.

    >>> ticks(37)
    [0.0, 10.0, 20.0, 30.0]
    """
    if not most > 0:
        return [0.0]
    rough = most / count
    unit = 10.0 ** math.floor(math.log10(rough))
    step = next(unit * k for k in (1, 2, 5, 10) if unit * k >= rough * 0.999)
    return [n * step for n in range(int(most / step + 1e-9) + 1)]


def _timeline(moments: Sequence[Moment], title: str) -> str:
    end_s = max((m.at_s for m in moments), default=1.0) or 1.0
    workers, rates = max((m.workers for m in moments), default=1), max((m.tok_per_s for m in moments), default=1.0)
    x, y = _scale(end_s, LEFT, WIDTH - RIGHT), _scale(max(1, workers), HEIGHT - BOTTOM, TOP)
    z = _scale(max(1e-9, rates), HEIGHT - BOTTOM, TOP)
    return "\n".join([
        _text(LEFT, 18, title), _axes(x, y, end_s / 60, max(1, workers), "minutes", "workers", 60.0),
        *(_text(WIDTH - RIGHT + 6, z(v) + 4, f"{v:,.0f}") for v in ticks(rates)),
        _text(WIDTH - 4, 18, "tok/s", "end"),
        _stairs([(x(m.at_s), y(m.workers)) for m in moments], COLOURS[0]),
        _stairs([(x(m.at_s), z(m.tok_per_s)) for m in moments if m.tok_per_s], COLOURS[2]),
    ])  # fmt: skip


def _scatter(dots: Sequence[Dot]) -> str:
    most_x, most_y = 1.1 * max(d.tok_per_s for d in dots), 1.1 * max(d.usd_per_million for d in dots)
    x, y = _scale(most_x, LEFT, WIDTH - RIGHT), _scale(most_y or 1.0, HEIGHT - BOTTOM, TOP)
    parts = [_axes(x, y, most_x, most_y, "tok/s", "$ per million tokens", 1.0)]
    for n, dot in enumerate(dots):
        at, up = x(dot.tok_per_s), y(dot.usd_per_million)
        parts.append(f'<circle cx="{at:.1f}" cy="{up:.1f}" r="5" fill="{COLOURS[n % len(COLOURS)]}"/>')
        parts.append(_text(at + 8, up + 4, dot.name))
    return "\n".join(parts)


def _axes(
    x: Callable[[float], float], y: Callable[[float], float], most_x: float, most_y: float, under: str, beside: str,
    unit: float,
) -> str:  # fmt: skip
    base = HEIGHT - BOTTOM
    parts = [f'<path d="M{LEFT},{TOP}V{base}H{WIDTH - RIGHT}" fill="none" stroke="#888"/>']
    parts += [_text(x(v * unit), base + 16, f"{v:,.4g}", "middle") for v in ticks(most_x)]
    parts += [_text(LEFT - 6, y(v) + 4, f"{v:,.4g}", "end") for v in ticks(most_y)]
    parts += [_text((LEFT + WIDTH - RIGHT) / 2, base + 34, under, "middle"), _text(4, TOP - 4, beside)]
    return "\n".join(parts)


def _scale(most: float, low: float, high: float) -> Callable[[float], float]:
    return lambda value: low + (high - low) * value / most


def _text(x: float, y: float, words: str, anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(words)}</text>'


def _stairs(points: Sequence[tuple[float, float]], colour: str) -> str:
    if not points:
        return ""
    path = f"M{points[0][0]:.1f},{points[0][1]:.1f}" + "".join(f"H{x:.1f}V{y:.1f}" for x, y in points[1:])
    return f'<path d="{path}" fill="none" stroke="{colour}" stroke-width="1.5"/>'
