"""`windfall plot`: figures of one or several runs for a paper or a report, as PNG or SVG."""

from __future__ import annotations

import re
from itertools import accumulate
from pathlib import Path
from typing import Any

from windfall.errors import WindfallError, install_command, unwritable
from windfall.page.runs import RunReader, read_all
from windfall.page.timeline import STATES, TENTHS, TimelineRow

PANELS = {
    "reward": ("reward", ""),
    "length": ("response length", "tokens"),
    "entropy": ("entropy", "nats"),
    "grad_norm": ("gradient norm", ""),
    "engine_gap": ("log-prob disagreement", "nats"),
    "staleness_mean": ("staleness", "versions"),
    "tok_per_s": ("throughput", "tok/s"),
    "usd": ("cost so far", "$"),
}
COLORS = ("#2563eb", "#f97316", "#16a34a", "#db2777", "#7c3aed", "#0891b2", "#ca8a04", "#dc2626")
STATE_COLORS = (
    "#ffffff", "#a78bfa", "#38bdf8", "#22c55e", "#f59e0b", "#94a3b8", "#64748b", "#eab308", "#ef4444", "#6366f1",
    "#ec4899", "#14b8a6", "#fb7185", "#86efac",
)  # fmt: skip
FORMATS = (".png", ".svg", ".pdf")
MAX_ROWS = 60
"""Upper limit for the workers in the figure of a timeline."""


def main(runs: list[Path], out: Path, *, panels: list[str], by_time: bool) -> Path:
    """Draw these panels, with a line per run. The panel "timeline" shows the workers of the first run."""
    if out.suffix.lower() not in FORMATS:
        fix = f"Let its name end with {', '.join(FORMATS[:-1])} or {FORMATS[-1]}."
        raise WindfallError(f"unknown format {out.suffix!r}", where=str(out), fix=fix)
    unknown = [name for name in panels if name not in (*PANELS, "timeline")]
    if unknown:
        fix = f"Use some of: {', '.join((*PANELS, 'timeline'))}."
        raise WindfallError(f"unknown panel {unknown[0]!r}", where="--panels", fix=fix)
    try:
        from matplotlib import rc_context
        from matplotlib.figure import Figure
    except ImportError as e:
        fix = f"Install it: {install_command('plot')}"
        raise WindfallError("plots need matplotlib, which is not installed", where="windfall plot", fix=fix) from e
    readers = read_all(runs)
    panels = panels or [name for name in PANELS if any(_has(r, name) for r in readers)]
    if not any(_has(r, name) for r in readers for name in panels):
        raise WindfallError("there is nothing to plot yet: no step is complete", where=str(runs[0]))
    columns = 1 if len(panels) == 1 or "timeline" in panels else 2
    rows = -(-len(panels) // columns)
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "windfall", "font.size": 9}):
        figure = Figure(figsize=(7.6 if columns > 1 else 6.4, 2.5 * rows), layout="constrained")
        axes = list(figure.subplots(rows, columns, squeeze=False).flat)
        for ax, name in zip(axes, panels, strict=False):
            if name == "timeline":
                _timeline(ax, readers[0])
            else:
                _lines(ax, readers, name, by_time)
        for ax in axes[len(panels) :]:
            ax.set_axis_off()
        drawn = {name: ax for name, ax in zip(panels, axes, strict=False) if name != "timeline"}
        named = [next(iter(drawn))] if len(readers) > 1 and drawn else []
        if "reward" in drawn and any(_evaluations(reader) for reader in readers):
            color = "gray" if len(readers) > 1 else COLORS[0]
            drawn["reward"].plot([], [], "o", color=color, ms=4, label="held-out tasks")
            named.append("reward")
        for name in dict.fromkeys(named):
            drawn[name].legend(frameon=False)
        metadata = {"Date": None} if out.suffix.lower() == ".svg" else {}
        try:
            out.parent.mkdir(parents=True, exist_ok=True)
            figure.savefig(out, dpi=200, metadata=metadata)
        except OSError as e:
            raise unwritable("the figure", out, e, "Set --out.") from e
    return out


def _has(reader: RunReader, name: str) -> bool:
    """Whether a run has something to show in this panel."""
    if name == "timeline":
        return any(row.changes for row in reader.history.timeline.rows.values())
    return any(value is not None for value in reader.history.series[name])


def _evaluations(reader: RunReader) -> list[tuple[Any, ...]]:
    """Step, time in seconds, reward on held-out tasks, graded responses and all responses of each evaluation that has
    a reward."""
    return [e for e in reader.history.evals if e[2] is not None]


def _lines(ax: Any, readers: list[RunReader], name: str, by_time: bool) -> None:
    title, unit = PANELS[name]
    for n, reader in enumerate(readers):
        history, color = reader.history, COLORS[n % len(COLORS)]
        label = reader.name if len(readers) > 1 else "training tasks"
        x = [t / 3600 for t in history.series["t"]] if by_time else history.series["step"]  # pyright: ignore
        y = history.series[name]
        if name == "usd":
            y = list(accumulate(value or 0.0 for value in y))
        points = [(a, b) for a, b in zip(x, y, strict=True) if b is not None]
        ax.plot(*zip(*points, strict=True) if points else ([], []), color=color, lw=1.2, label=label)
        if name == "reward":
            evals = [(t / 3600 if by_time else step, *e) for step, t, *e in _evaluations(reader)]
            ax.plot([e[0] for e in evals], [e[1] for e in evals], "o", color=color, ms=4)
            for at, reward, graded, responses in evals:
                if graded is not None and graded != responses:
                    text = f"{graded} of {responses} graded"
                    ax.annotate(text, (at, reward), (0, 5), textcoords="offset points", ha="center", fontsize=6)
    ax.set(xlabel="hours" if by_time else "step", ylabel=f"{title} ({unit})" if unit else title)
    if not by_time:
        ax.xaxis.get_major_locator().set_params(integer=True)
    ax.grid(axis="y", alpha=0.3)


def _order(row: TimelineRow) -> tuple[bool, list[tuple[int, str]]]:
    """The trainer first, then workers by name, in which numbers are compared as numbers."""
    parts = re.findall(r"\d+|\D+", row.name)
    first = row.facts.get("lease") == "trainer" or row.name == "trainer"
    return not first, [(int(part), "") if part.isdecimal() else (0, part) for part in parts]


def _timeline(ax: Any, reader: RunReader) -> None:
    history, used = reader.history, set[int]()
    rows = sorted(history.timeline.rows.values(), key=_order)[:MAX_ROWS]
    end = (history.end_t - (history.start_t or 0.0)) if history.number else 0.0
    for n, row in enumerate(rows):
        starts = [c >> 4 for c in row.changes] + [round(end * TENTHS)]
        for i, change in enumerate(row.changes):
            state = change & 15
            if state:
                used.add(state)
                a, b = starts[i] / TENTHS / 60, starts[i + 1] / TENTHS / 60
                ax.barh(n, b - a, left=a, height=0.8, color=STATE_COLORS[state], lw=0)
    ax.set(
        yticks=range(len(rows)), yticklabels=[row.name for row in rows], xlabel="minutes", xlim=(0, max(end / 60, 0.1))
    )
    ax.invert_yaxis()
    for state in sorted(used):
        ax.plot([], [], "s", color=STATE_COLORS[state], label=STATES[state])
    ax.legend(frameon=False, ncol=6, loc="upper center", bbox_to_anchor=(0.5, -0.2), fontsize=7)
