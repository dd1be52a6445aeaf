"""`windfall sim`: simulates a recipe and its variants over several seeds. The results are a table and a JSON file.

All variants of a seed are compared over the steps that each of them has completed (figures.py).
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from rich.console import Console

from windfall.errors import WindfallError
from windfall.events.log import Event
from windfall.recipe.sections import Recipe
from windfall.sim.core.scenario import build
from windfall.sim.report import variants
from windfall.sim.report.figures import Figures, SimulatedRun, Spread, figures_of_equal_steps, simulate, spread

SPREADS = (
    "tok_per_s", "tok_per_usd", "usd", "step_mean_s", "trainer_idle", "workers_there", "workers_idle", "workers_lost",
    "killed", "moved", "again", "virtual_s",
)  # fmt: skip
COLUMNS = (
    ("tok_per_s", 10, ",.0f", "", "tok/s"),
    ("speed_ratio", 7, ".2f", "", "ratio"),
    ("tok_per_usd", 12, ",.0f", "", "tok/$"),
    ("cost_ratio", 7, ".2f", "", "ratio"),
    ("step_mean_s", 9, ".4g", "step", "mean s"),
    ("step_least_s", 9, ".4g", "step", "min s"),
    ("step_most_s", 9, ".4g", "step", "max s"),
    ("trainer_idle", 9, ".0%", "trainer", "idle"),
    ("workers_there", 9, ".2f", "workers", "mean"),
    ("workers_idle", 9, ".0%", "workers", "idle"),
    ("workers_lost", 9, ".0%", "workers", "overhead"),
    ("killed", 9, ".0f", "workers", "killed"),
    ("moved", 11, ".0f", "responses", "moved"),
    ("again", 9, ".1%", "tokens", "repeated"),
)
"""Figure, width, format, and the two lines of the heading."""
UNKNOWN_IF_0 = ("tok_per_usd", "cost_ratio")
"""Figures that are 0 if no price is known."""
LEGEND = (
    "ratio: to the first row; idle: share of the paid time; overhead: share of the paid time spent on booting, pulling "
    "weights, repeated prefill, draining and lost work; repeated: share of all tokens that were generated again"
)


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
    failed: dict[str, WindfallError]
    """Variants without figures, and why. If one seed of a variant fails, the variant has no figures, because its mean
    would be over different seeds than the means of the other variants."""


def compare(
    recipe: Recipe, names: Sequence[str], seeds: int, folder: Path, progress: OnEvent | None = None
) -> Comparison:
    """Simulate every variant with every seed. Event logs stay in `folder`. A variant that fails does not stop the
    others; if all fail, the first error is raised."""
    done: dict[str, list[SimulatedRun]] = {}
    wall_s: dict[str, float] = {}
    failed: dict[str, WindfallError] = {}
    for name in names:
        began = time.perf_counter()
        try:
            done[name] = _simulate_seeds(recipe, name, seeds, folder, progress)
        except WindfallError as e:
            failed[name] = e
        wall_s[name] = time.perf_counter() - began
    if not done:
        raise next(iter(failed.values()))
    by_seed = [figures_of_equal_steps(runs) for runs in zip(*done.values(), strict=True)]
    rows = tuple(_row(name, runs, wall_s[name]) for name, runs in zip(done, zip(*by_seed, strict=True), strict=True))
    return Comparison(rows=rows, failed=failed)


def _simulate_seeds(
    recipe: Recipe, name: str, seeds: int, folder: Path, progress: OnEvent | None
) -> list[SimulatedRun]:
    out = []
    for scenario in [build(r) for r in variants.seeded(variants.apply(recipe, name), seeds)]:
        seed = scenario.real.run.seed
        sink = partial(progress, name, seed) if progress else None
        out.append(simulate(scenario, folder / f"{name}-{seed}.jsonl", sink))
    return out


def _row(name: str, runs: tuple[Figures, ...], wall_s: float) -> VariantResult:
    values = [f.row() for f in runs]
    return VariantResult(
        name=name,
        runs=runs,
        spreads={key: spread([v[key] for v in values]) for key in SPREADS},
        wall_s=wall_s,
        steps_s=spread([s for f in runs for s in f.step_s]),
    )


def table(rows: Sequence[VariantResult]) -> list[str]:
    """The table as lines of text, independent of the terminal width."""
    base = rows[0].spreads
    tops, bottoms = ("".join(f"{column[n]:>{column[1]}}" for column in COLUMNS) for n in (3, 4))
    lines = [f"{'':16}{tops}", f"{'variant':16}{bottoms}"]
    for row in rows:
        values = {key: value.mean for key, value in row.spreads.items()}
        for ratio, key in (("speed_ratio", "tok_per_s"), ("cost_ratio", "tok_per_usd")):
            values[ratio] = values[key] / base[key].mean if base[key].mean else 0.0
        values |= {"step_least_s": row.steps_s.least, "step_most_s": row.steps_s.most}
        cells = (
            f"{'-' if key in UNKNOWN_IF_0 and not values[key] else format(values[key], form):>{width}}"
            for key, width, form, _, _ in COLUMNS
        )
        lines.append(f"{row.name:16}" + "".join(cells))
    return lines


def steps(rows: Sequence[VariantResult]) -> str:
    """How many steps of each seed the figures cover: the same ones in all variants."""
    counts = sorted({f.steps for f in rows[0].runs})
    number = f"{counts[0]}" if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
    return f"{number} step{'s' if counts[-1] > 1 else ''}{' that all variants completed' if len(rows) > 1 else ''}"


def spreads(rows: Sequence[VariantResult]) -> list[str]:
    """The range over the seeds, one line per variant."""
    return [
        f"{row.name}: tok/s {row.spreads['tok_per_s']}, tok/$ {row.spreads['tok_per_usd']}"
        for row in rows
        if len(row.runs) > 1
    ]


@contextmanager
def output_folder(out: Path | None) -> Iterator[Path]:
    """The folder given with --out, created if it does not exist. None: a temporary folder."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = out or Path(temporary)
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as e:
            what = f"cannot create the folder: {e.strerror}"
            raise WindfallError(what, where=f"--out {folder}", fix="Name an existing or a new folder.") from e
        yield folder


def write(rows: Sequence[VariantResult], folder: Path) -> Path:
    """Write figures.json."""
    results = {
        row.name: {
            "wall_s": row.wall_s,
            "step_s": row.steps_s._asdict(),
            "spreads": {k: v._asdict() for k, v in row.spreads.items()},
            "runs": [f.row() for f in row.runs],
        }
        for row in rows
    }
    path = folder / "figures.json"
    path.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    return path


def main(recipe: Recipe, *, seeds: int, names: str, out: Path | None) -> None:
    chosen = variants.names(names)
    with output_folder(out) as folder, Console().status("") as status:

        def progress(name: str, seed: int, event: Event) -> None:
            if event["name"] == "step":
                status.update(f"{name}, seed {seed}: step {event['step']}, {event['m']:,.0f} virtual s")

        done = compare(recipe, chosen, seeds, folder, progress)
    rows = done.rows
    for row in rows:
        print(f"{row.name:16}{variants.VARIANTS[row.name].description}")
    print("\n".join(["", *table(rows), "", *spreads(rows)]))
    for row in rows:
        for name, policy in row.runs[0].policies.items():
            waits = f"its trainer waits {policy.wait:.0%} of the time"
            print(f"{row.name}, policy {name}: {policy.steps} steps of {policy.step_s:.4g} s; {waits}")
    for name, error in done.failed.items():
        print(f"no figures for {name}: {'. '.join(str(error).splitlines())}")
    for row in rows:
        for advice in row.runs[0].advice:
            print(f"advice, {row.name}: {advice}")
    virtual_s, wall_s = sum(f.whole_s for r in rows for f in r.runs), sum(r.wall_s for r in rows)
    print(
        f"{virtual_s:,.0f} virtual s in {wall_s:.1f} s, {seeds} seed{'s' if seeds > 1 else ''}. Values are means over "
        f"seeds of {steps(rows)} after the first {recipe.sim.skip_steps}; {LEGEND}"
    )
    if out is not None:
        print(f"written: {write(rows, out)}")
