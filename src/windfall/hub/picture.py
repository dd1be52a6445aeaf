"""The reward over the steps of a run as a small PNG, where matplotlib is installed."""

from __future__ import annotations

import io

from windfall.hub.model_card import Curve


def draw(curve: Curve, title: str) -> bytes | None:
    """The bytes of the picture; None without matplotlib."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        return None
    figure = Figure(figsize=(6, 3), dpi=120, layout="constrained")
    canvas = FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.plot([step for step, _ in curve.points], [y for _, y in curve.points], linewidth=1.2, label=curve.label)
    if curve.evaluated:
        xs, ys = zip(*curve.evaluated, strict=True)
        axes.plot(xs, ys, "o-", markersize=4, linewidth=1.0, label=curve.evaluated_label)
    axes.set_xlabel("step")
    axes.set_title(title, fontsize=9)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    out = io.BytesIO()
    canvas.print_png(out, metadata={"Software": None})  # the same bytes whatever wrote them: a repeated push sends less
    return out.getvalue()
