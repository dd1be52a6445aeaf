"""`windfall sim`: a recipe and its variants simulated, with a progress bar, a table and files."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from windfall.config import Recipe
from windfall.events.log import Event
from windfall.sim.report import compare, variants


def main(recipe: Recipe, *, seeds: int, names: str, out: Path | None, quiet: bool = False) -> None:
    console = Console()
    asked = variants.names(names)
    with _folder(out) as folder, _bar(console, recipe, len(asked) * seeds, quiet) as progress:
        done = compare.compare(recipe, asked, seeds, folder, progress)
    rows = done.rows
    for row in rows:
        print(f"{row.name:16}{variants.SAY[row.name]}")
    print("\n".join(["", *compare.table(rows), "", *compare.spreads(rows)]))
    for name, why in done.without.items():
        print(f"no figures of {name}: {'. '.join(str(why).splitlines())}")
    for row in rows:
        for said in row.runs[0].advice:
            print(f"advice, {row.name}: {said}")
    virtual_s, wall_s = sum(f.whole_s for r in rows for f in r.runs), sum(r.wall_s for r in rows)
    print(
        f"{virtual_s:,.0f} virtual s in {wall_s:.1f} s, {seeds} seed{'s' if seeds > 1 else ''}; means over seeds, of "
        f"steps after the first {recipe.sim.skip_steps}; from, to: single steps; idle, lost: shares of time paid for"
    )
    if out is not None:
        title = f"{recipe.run.name}, {rows[-1].name}: workers (blue) and tok/s of each step (red)"
        for path in compare.write(rows, done.moments, out, title):
            print(f"written: {path}")


@contextmanager
def _folder(out: Path | None) -> Iterator[Path]:
    if out is not None:
        yield compare.made(out)
        return
    with tempfile.TemporaryDirectory() as place:
        yield Path(place)


@contextmanager
def _bar(console: Console, recipe: Recipe, runs: int, quiet: bool) -> Iterator[compare.Progress | None]:
    """Virtual time beside wall time; a step is a unit."""
    if quiet or not console.is_terminal:
        yield None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[virtual]}"), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        limit_s = recipe.sim.seconds
        task = bar.add_task("", total=runs * (limit_s or recipe.run.steps), virtual="")
        told = 0.0
        began: dict[tuple[str, int], float] = {}
        done: dict[tuple[str, int], float] = {}

        def heard(name: str, seed: int, event: Event) -> None:
            nonlocal told
            done[name, seed] = event["m"] if limit_s else max(done.get((name, seed), 0), event.get("step", 0))
            now = time.perf_counter()
            began.setdefault((name, seed), now)
            if now - told > 0.1:
                told = now
                rate = event["m"] / max(1e-3, now - began[name, seed])
                bar.update(
                    task, completed=sum(done.values()), description=f"{name}, seed {seed}",
                    virtual=f"{event['m']:,.0f} virtual s, {rate:,.0f} times as fast",
                )  # fmt: skip

        yield heard
