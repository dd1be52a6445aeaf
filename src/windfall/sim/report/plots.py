"""The two plots of a simulation as an SVG file: the fleet over time, and the cost of each variant against its
throughput.

matplotlib is optional (`windfall[plot]`) and is imported only when something is drawn.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from windfall.errors import WindfallError
from windfall.sim.report.figures import Moment

WIDTH_IN, HEIGHT_IN = 7.6, 3.0
WORKERS_COLOR, SPEED_COLOR = "tab:blue", "tab:red"


@dataclass(frozen=True, kw_only=True, slots=True)
class Dot:
    """One variant in the plot of cost against throughput."""

    name: str
    tok_per_s: float
    usd_per_million: float


def new_figure(height_in: float = HEIGHT_IN) -> Any:
    """An empty matplotlib figure, or an error that says how to install matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError as e:
        fix = "Install it with: pip install 'windfall[plot]'"
        raise WindfallError("plots need matplotlib, which is not installed", where="plot", fix=fix) from e
    return Figure(figsize=(WIDTH_IN, height_in), layout="constrained")


def save(figure: Any, path: Path) -> None:
    """Write an SVG whose text stays text, the same bytes for the same data."""
    import matplotlib

    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "windfall"}):
        figure.savefig(path, format="svg", metadata={"Date": None})


def draw(moments: Sequence[Moment], dots: Sequence[Dot], title: str, path: Path) -> None:
    """Draw the timeline and, if prices are known, the variants below it."""
    rows = 2 if dots else 1
    figure = new_figure(HEIGHT_IN * rows)
    axes = figure.subplots(rows, 1, squeeze=False)[:, 0]
    _timeline(axes[0], moments, title)
    if dots:
        _variants(axes[1], dots)
    save(figure, path)


def _timeline(axes: Any, moments: Sequence[Moment], title: str) -> None:
    axes.set_title(title, loc="left", fontsize="medium")
    axes.step([m.at_s / 60 for m in moments], [m.workers for m in moments], where="post", color=WORKERS_COLOR)
    speed, steps = axes.twinx(), [m for m in moments if m.tok_per_s]
    speed.step([m.at_s / 60 for m in steps], [m.tok_per_s for m in steps], where="post", color=SPEED_COLOR)
    axes.set(xlabel="minutes", ylabel="workers", xlim=(0, None), ylim=(0, None))
    speed.set(ylabel="tok/s", ylim=(0, None))


def _variants(axes: Any, dots: Sequence[Dot]) -> None:
    for dot in dots:
        axes.plot(dot.tok_per_s, dot.usd_per_million, "o", label=dot.name)
    axes.set(xlabel="tok/s", ylabel="$ per million tokens", xlim=(0, 1.1 * max(d.tok_per_s for d in dots)))
    axes.set_ylim(0, 1.1 * max(d.usd_per_million for d in dots))
    axes.legend()
