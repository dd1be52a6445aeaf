"""The two plots of a simulation as an SVG file: the fleet over time, and the cost of each variant against its
throughput.

matplotlib is optional (the extra `plot`) and is imported only when something is drawn.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from windfall.errors import WindfallError, install_command
from windfall.sim.report.figures import Moment

WIDTH_IN, HEIGHT_IN = 7.6, 3.0
WORKERS_COLOR, SPEED_COLOR = "tab:blue", "tab:red"


def new_figure(height_in: float = HEIGHT_IN) -> Any:
    """An empty matplotlib figure, or an error that says how to install matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError as e:
        fix = f"Install it: {install_command('plot')}"
        raise WindfallError("plots need matplotlib, which is not installed", where="plot", fix=fix) from e
    return Figure(figsize=(WIDTH_IN, height_in), layout="constrained")


def save(figure: Any, path: Path) -> None:
    """Write an SVG file. Its text is stored as text, and the same data gives the same bytes."""
    import matplotlib

    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "windfall"}):
        figure.savefig(path, format="svg", metadata={"Date": None})


def draw(moments: Sequence[Moment], costs: Mapping[str, tuple[float, float]], title: str, path: Path) -> None:
    """Draw the timeline and, if prices are known, the variants below it. `costs`: tokens per second and dollars per
    million tokens, by variant."""
    rows = 2 if costs else 1
    figure = new_figure(HEIGHT_IN * rows)
    axes = figure.subplots(rows, 1, squeeze=False)[:, 0]
    _timeline(axes[0], moments, title)
    if costs:
        _variants(axes[1], costs)
    save(figure, path)


def _timeline(axes: Any, moments: Sequence[Moment], title: str) -> None:
    axes.set_title(title, loc="left", fontsize="medium")
    axes.step([m.at_s / 60 for m in moments], [m.workers for m in moments], where="post", color=WORKERS_COLOR)
    speed, steps = axes.twinx(), [m for m in moments if m.tok_per_s]
    speed.step([m.at_s / 60 for m in steps], [m.tok_per_s for m in steps], where="post", color=SPEED_COLOR)
    axes.set(xlabel="minutes", ylabel="workers", xlim=(0, None), ylim=(0, None))
    speed.set(ylabel="tok/s", ylim=(0, None))


def _variants(axes: Any, costs: Mapping[str, tuple[float, float]]) -> None:
    for name, (tok_per_s, usd) in costs.items():
        axes.plot(tok_per_s, usd, "o", label=name)
    most_tok_per_s, most_usd = (1.1 * max(values) for values in zip(*costs.values(), strict=True))
    axes.set(xlabel="tok/s", ylabel="$ per million tokens", xlim=(0, most_tok_per_s), ylim=(0, most_usd))
    axes.legend()
