"""Draw the reward of one or several runs as an SVG, from their event logs:
`python scripts/plot_run.py runs/NAME [runs/OTHER ...] OUT.svg`."""

from __future__ import annotations

import sys
from pathlib import Path

from windfall.events.log import read

WIDTH, HEIGHT, LEFT, BOTTOM, TOP, RIGHT = 720, 300, 52, 40, 18, 16
COLOURS = (("#2563eb", "#1e3a8a"), ("#f97316", "#9a3412"), ("#16a34a", "#14532d"))
"""Of each run: in training, on held-out tasks."""

Points = list[tuple[float, float]]


def points(pairs: Points, last: float) -> Points:
    wide, high = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM
    return [(LEFT + x / last * wide, TOP + (1 - y) * high) for x, y in pairs]


def rewards(run: Path) -> tuple[Points, Points]:
    """(step, reward) in training, and on held-out tasks."""
    scalars = [e for e in read(run / "events.jsonl") if e["kind"] == "scalar" and e["reward"] is not None]
    steps, evals = ([(e["step"], e["reward"]) for e in scalars if e["name"] == name] for name in ("step", "eval"))
    return steps, evals


def svg(runs: list[Path]) -> str:
    found = {run.name: rewards(run) for run in runs}
    last = max(x for steps, evals in found.values() for x, _ in steps + evals)
    grid = "".join(
        f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}" stroke="#ccc"/>'
        f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{v / 4:.2f}</text>'
        for v in range(5)
        for _, y in points([(0, v / 4)], last)
    )
    drawn = ""
    for n, (name, (steps, evals)) in enumerate(found.items()):
        line, dot = COLOURS[n % len(COLOURS)]
        way = " ".join(f"{x:.1f},{y:.1f}" for x, y in points(steps, last))
        drawn += f'<polyline points="{way}" fill="none" stroke="{line}" stroke-width="1.5"/>'
        drawn += "".join(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="5" fill="{dot}"/>' for x, y in points(evals, last))
        if len(found) > 1:
            drawn += f'<text x="{LEFT + 12}" y="{TOP + 14 + 16 * n}" fill="{line}">{name.replace("-", " ")}</text>'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        'font-family="sans-serif" font-size="12">'
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>{grid}{drawn}'
        f'<text x="{LEFT}" y="{HEIGHT - 12}">step 0</text>'
        f'<text x="{WIDTH - RIGHT}" y="{HEIGHT - 12}" text-anchor="end">step {last}</text>'
        f'<text x="{WIDTH / 2}" y="{HEIGHT - 12}" text-anchor="middle">reward: lines in training, dots on held-out'
        "</text></svg>\n"
    )


if __name__ == "__main__":
    if len(sys.argv) < 3:
        sys.exit(str(__doc__))
    Path(sys.argv[-1]).write_text(svg([Path(run) for run in sys.argv[1:-1]]))
