"""Plot the reward of one or several runs as an SVG, from their event logs:
`python scripts/plot_run.py runs/NAME [runs/OTHER ...] OUT.svg`. Needs matplotlib (the extra `plot`)."""

from __future__ import annotations

import sys
from pathlib import Path

from windfall.errors import WindfallError
from windfall.events.log import read
from windfall.sim.report import plots

COLORS = (("#2563eb", "#1e3a8a"), ("#f97316", "#9a3412"), ("#16a34a", "#14532d"))
"""Colors of each run: in training, on held-out tasks."""


def rewards(run: Path, name: str) -> tuple[list[int], list[float]]:
    """Steps and rewards of the `step` events (training) or `eval` events (held-out tasks) of a run."""
    scalars = [e for e in read(run / "events.jsonl") if e["kind"] == "scalar" and e["reward"] is not None]
    return [e["step"] for e in scalars if e["name"] == name], [e["reward"] for e in scalars if e["name"] == name]


def plot(runs: list[Path], path: Path) -> None:
    figure = plots.new_figure()
    axes = figure.subplots()
    for n, run in enumerate(runs):
        line, dot = COLORS[n % len(COLORS)]
        axes.plot(*rewards(run, "step"), color=line, label=run.name.replace("-", " "))
        axes.plot(*rewards(run, "eval"), "o", color=dot)
    axes.set(xlabel="step (reward: lines in training, dots on held-out tasks)", ylabel="reward", ylim=(0, 1))
    axes.grid(axis="y")
    if len(runs) > 1:
        axes.legend()
    plots.save(figure, path)


if __name__ == "__main__":
    if len(sys.argv) < 3:
        sys.exit(str(__doc__))
    try:
        plot([Path(run) for run in sys.argv[1:-1]], Path(sys.argv[-1]))
    except WindfallError as e:
        sys.exit(str(e))
