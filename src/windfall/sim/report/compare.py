"""Simulates variants of a recipe over several seeds and reports the results as rows, a table, JSON, CSV and SVG."""

from __future__ import annotations

import csv
import io
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from windfall.config import Recipe
from windfall.errors import WindfallError
from windfall.events.log import Event
from windfall.sim.core import run
from windfall.sim.core.scenario import Scenario, build
from windfall.sim.report import plots, variants
from windfall.sim.report.figures import Figures, Moment, Spread, figures, spread, timeline

SPREADS = (
    "tok_per_s", "tok_per_usd", "usd", "step_mean_s", "trainer_idle", "workers_there", "workers_idle", "workers_lost",
    "killed", "moved", "again", "virtual_s",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class VariantResult:
    """The results of one variant over all seeds."""

    name: str
    runs: tuple[Figures, ...]
    spreads: dict[str, Spread]
    wall_s: float
    steps_s: Spread
    """Seconds of single steps, over all seeds."""


OnEvent = Callable[[str, int, Event], None]
"""Called with the variant, the seed, and every event of its simulation."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    rows: tuple[VariantResult, ...]
    moments: tuple[Moment, ...]
    """The timeline of the last row's first seed."""
    failed: dict[str, WindfallError]
    """Variants without figures, and why. A variant with one failed seed has no figures, because its mean would be over
    other seeds than the means of the other variants."""


def compare(
    recipe: Recipe, names: Sequence[str], seeds: int, folder: Path, progress: OnEvent | None = None
) -> Comparison:
    """Simulate every variant with every seed. Event logs stay in `folder`. A variant that fails does not stop the
    others; if all fail, the first error is raised."""
    rows: list[VariantResult] = []
    moments: list[Moment] = []
    failed: dict[str, WindfallError] = {}
    for name in names:
        began, runs, first_timeline = time.perf_counter(), list[Figures](), list[Moment]()
        try:
            for scenario in [build(r) for r in variants.seeded(variants.apply(recipe, name), seeds)]:
                log = folder / f"{name}-{scenario.real.run.seed}.jsonl"
                runs.append(_simulate(scenario, log, name, progress))
                first_timeline = first_timeline or timeline(log, scenario.granule)
        except WindfallError as e:
            failed[name] = e
            continue
        moments = first_timeline
        rows.append(_row(name, runs, time.perf_counter() - began))
    if not rows:
        raise next(iter(failed.values()))
    return Comparison(rows=tuple(rows), moments=tuple(moments), failed=failed)


def _simulate(scenario: Scenario, log: Path, name: str, progress: OnEvent | None) -> Figures:
    seed = scenario.real.run.seed
    done = run.simulate(scenario, log, sink=(lambda event: progress(name, seed, event)) if progress else None)
    return figures(log, scenario, done.stays)


def _row(name: str, runs: Sequence[Figures], wall_s: float) -> VariantResult:
    rows = [f.row() for f in runs]
    return VariantResult(
        name=name, runs=tuple(runs), spreads={key: spread([r[key] for r in rows]) for key in SPREADS}, wall_s=wall_s,
        steps_s=spread([s for f in runs for s in f.step_s]),
    )  # fmt: skip


COLUMNS = (
    ("tok/s", 10), ("x", 6), ("tok/$", 12), ("x", 6), ("step s", 9), ("from", 9), ("to", 9), ("idle", 9),
    ("there", 9), ("idle", 6), ("lost", 6), ("killed", 8), ("moved", 8), ("again", 7),
)  # fmt: skip


def table(rows: Sequence[VariantResult]) -> list[str]:
    """The table as lines of text, independent of the terminal width. Ratios (x) are to the first row."""
    base = rows[0].spreads
    lines = [f"{'':16}{'':61}{'trainer':>9}{'workers':>9}"]
    lines.append(f"{'variant':16}" + "".join(f"{head:>{width}}" for head, width in COLUMNS))
    for row in rows:
        s = {key: value.mean for key, value in row.spreads.items()}
        x = [s[k] / base[k].mean if base[k].mean else 0.0 for k in ("tok_per_s", "tok_per_usd")]
        cells = (
            f"{s['tok_per_s']:,.0f}", f"{x[0]:.2f}", f"{s['tok_per_usd']:,.0f}" if s["tok_per_usd"] else "-",
            f"{x[1]:.2f}" if x[1] else "-", f"{s['step_mean_s']:.4g}", f"{row.steps_s.least:.4g}",
            f"{row.steps_s.most:.4g}", f"{s['trainer_idle']:.0%}", f"{s['workers_there']:.2f}",
            f"{s['workers_idle']:.0%}", f"{s['workers_lost']:.0%}", f"{s['killed']:.0f}", f"{s['moved']:.0f}",
            f"{s['again']:.1%}",
        )  # fmt: skip
        lines.append(f"{row.name:16}" + "".join(f"{c:>{w}}" for c, (_, w) in zip(cells, COLUMNS, strict=True)))
    return lines


def spreads(rows: Sequence[VariantResult]) -> list[str]:
    """The range over the seeds, one line per variant."""
    return [
        f"{row.name}: tok/s {row.spreads['tok_per_s']}, tok/$ {row.spreads['tok_per_usd']}"
        for row in rows
        if len(row.runs) > 1
    ]


def ensure_folder(folder: Path) -> Path:
    """Create the folder if it does not exist."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as e:
        what = f"cannot create the folder: {e.strerror}"
        raise WindfallError(what, where=f"--out {folder}", fix="Name an existing or a new folder.") from e
    return folder


def write(rows: Sequence[VariantResult], folder: Path) -> list[Path]:
    """Write figures.json and figures.csv."""
    ensure_folder(folder)
    results = {
        row.name: {
            "wall_s": row.wall_s, "step_s": asdict(row.steps_s),
            "spreads": {k: asdict(v) for k, v in row.spreads.items()}, "runs": [f.row() for f in row.runs],
        }
        for row in rows
    }  # fmt: skip
    lines = io.StringIO()
    sheet = csv.writer(lines, lineterminator="\n")
    sheet.writerow(["variant", *(f"{key}{end}" for key in SPREADS for end in ("", "_least", "_most"))])
    for row in rows:
        cells = [row.spreads[key] for key in SPREADS]
        sheet.writerow([row.name, *(v for s in cells for v in (s.mean, s.least, s.most))])
    contents = {"figures.json": json.dumps(results, indent=1) + "\n", "figures.csv": lines.getvalue()}
    for name, content in contents.items():
        (folder / name).write_text(content, encoding="utf-8")
    return [folder / name for name in contents]


def plot(comparison: Comparison, folder: Path, title: str) -> Path:
    """Draw figures.svg."""
    dots = [
        plots.Dot(name=row.name, tok_per_s=row.spreads["tok_per_s"].mean, usd_per_million=1e6 / tok_per_usd)
        for row in comparison.rows
        if (tok_per_usd := row.spreads["tok_per_usd"].mean)
    ]
    path = folder / "figures.svg"
    plots.draw(comparison.moments, dots, title, path)
    return path
