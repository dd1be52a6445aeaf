"""Variants of a recipe over several seeds, one after the other: what each came to, as rows, a table, JSON, CSV, SVG."""

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
from windfall.sim.report import svg, variants
from windfall.sim.report.figures import Figures, Moment, Spread, figures, spread, timeline

SPREADS = (
    "tok_per_s", "tok_per_usd", "usd", "step_mean_s", "trainer_idle", "workers_there", "workers_idle", "workers_lost",
    "killed", "moved", "again", "virtual_s",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class VariantResult:
    """One variant over all seeds."""

    name: str
    runs: tuple[Figures, ...]
    spreads: dict[str, Spread]
    wall_s: float
    steps_s: Spread
    """Of single steps, over all seeds."""


Progress = Callable[[str, int, Event], None]
"""Variant, seed, and what has just happened in it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Compared:
    rows: tuple[VariantResult, ...]
    moments: tuple[Moment, ...]
    """The timeline of the last row's first seed."""
    without: dict[str, WindfallError]
    """Variants that have no figures, and why. With one seed that failed, a variant has none: its mean would be over
    other seeds than those beside it."""


def compare(
    recipe: Recipe, names: Sequence[str], seeds: int, folder: Path, progress: Progress | None = None
) -> Compared:
    """Simulates every variant with every seed. Logs are left in `folder`. A variant that fails does not take the others
    with it; if all of them fail, the first error is raised."""
    rows: list[VariantResult] = []
    moments: list[Moment] = []
    without: dict[str, WindfallError] = {}
    for name in names:
        began, found, seen = time.perf_counter(), list[Figures](), list[Moment]()
        try:
            for world in [build(r) for r in variants.seeded(variants.apply(recipe, name), seeds)]:
                log = folder / f"{name}-{world.real.run.seed}.jsonl"
                found.append(_one(world, log, name, progress))
                seen = seen or timeline(log, world.granule)
        except WindfallError as e:
            without[name] = e
            continue
        moments = seen
        rows.append(_row(name, found, time.perf_counter() - began))
    if not rows:
        raise next(iter(without.values()))
    return Compared(rows=tuple(rows), moments=tuple(moments), without=without)


def _one(world: Scenario, log: Path, name: str, progress: Progress | None) -> Figures:
    seed = world.real.run.seed
    done = run.simulate(world, log, sink=(lambda event: progress(name, seed, event)) if progress else None)
    return figures(log, world, done.stays)


def _row(name: str, found: Sequence[Figures], wall_s: float) -> VariantResult:
    rows = [f.row() for f in found]
    return VariantResult(
        name=name, runs=tuple(found), spreads={key: spread([r[key] for r in rows]) for key in SPREADS}, wall_s=wall_s,
        steps_s=spread([s for f in found for s in f.step_s]),
    )  # fmt: skip


COLUMNS = (
    ("tok/s", 10), ("x", 6), ("tok/$", 12), ("x", 6), ("step s", 9), ("from", 9), ("to", 9), ("idle", 9),
    ("there", 9), ("idle", 6), ("lost", 6), ("killed", 8), ("moved", 8), ("again", 7),
)  # fmt: skip


def table(rows: Sequence[VariantResult]) -> list[str]:
    """Lines of text, whatever the width of a terminal. Ratios are to the first row."""
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
    """How far apart the seeds are."""
    return [
        f"{row.name}: tok/s {row.spreads['tok_per_s']}, tok/$ {row.spreads['tok_per_usd']}"
        for row in rows
        if len(row.runs) > 1
    ]


def made(folder: Path) -> Path:
    """The folder, there."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as e:
        what = f"cannot write there: {e.strerror}"
        raise WindfallError(what, where=f"--out {folder}", fix="Name a folder, there or new.") from e
    return folder


def write(rows: Sequence[VariantResult], moments: Sequence[Moment], folder: Path, title: str) -> list[Path]:
    """figures.json, figures.csv and figures.svg."""
    made(folder)
    said = {
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
    dots = [
        svg.Dot(name=r.name, tok_per_s=r.spreads["tok_per_s"].mean, usd_per_million=1e6 / r.spreads["tok_per_usd"].mean)
        for r in rows
        if r.spreads["tok_per_usd"].mean
    ]
    contents = {
        "figures.json": json.dumps(said, indent=1) + "\n", "figures.csv": lines.getvalue(),
        "figures.svg": svg.page(moments, dots, title),
    }  # fmt: skip
    for name, content in contents.items():
        (folder / name).write_text(content, encoding="utf-8")
    return [folder / name for name in contents]
