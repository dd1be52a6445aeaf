"""Draw a run's reward as an SVG, from its event log: `python scripts/plot_run.py runs/NAME OUT.svg`."""

from __future__ import annotations

import sys
from pathlib import Path

from windfall.events import read

WIDTH, HEIGHT, LEFT, BOTTOM, TOP, RIGHT = 720, 300, 52, 40, 18, 16


def points(pairs: list[tuple[float, float]], last: float) -> list[tuple[float, float]]:
    wide, high = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM
    return [(LEFT + x / last * wide, TOP + (1 - y) * high) for x, y in pairs]


def svg(run: Path) -> str:
    scalars = [e for e in read(run / "events.jsonl") if e["kind"] == "scalar" and e["reward"] is not None]
    steps = [(e["step"], e["reward"]) for e in scalars if e["name"] == "step"]
    evals = [(e["step"], e["reward"]) for e in scalars if e["name"] == "eval"]
    last = max(x for x, _ in steps + evals)
    line = " ".join(f"{x:.1f},{y:.1f}" for x, y in points(steps, last))
    grid = "".join(
        f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}" stroke="#ccc"/>'
        f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{v / 4:.2f}</text>'
        for v in range(5)
        for _, y in points([(0, v / 4)], last)
    )
    dots = "".join(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="5" fill="#c2410c"/>' for x, y in points(evals, last))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        'font-family="sans-serif" font-size="12">'
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>{grid}'
        f'<polyline points="{line}" fill="none" stroke="#2563eb" stroke-width="1.5"/>{dots}'
        f'<text x="{LEFT}" y="{HEIGHT - 12}">step 0</text>'
        f'<text x="{WIDTH - RIGHT}" y="{HEIGHT - 12}" text-anchor="end">step {last}</text>'
        f'<text x="{WIDTH / 2}" y="{HEIGHT - 12}" text-anchor="middle">reward: line in training, dots on held-out tasks'
        "</text></svg>\n"
    )


if __name__ == "__main__":
    Path(sys.argv[2]).write_text(svg(Path(sys.argv[1])))
