"""`windfall sim`: simulates a recipe and its variants, with a progress bar, a table and files."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from windfall.errors import WindfallError
from windfall.events.log import Event
from windfall.recipe.sections import Recipe
from windfall.sim.report import compare, variants


def main(recipe: Recipe, *, seeds: int, names: str, out: Path | None) -> None:
    chosen = variants.names(names)
    with compare.output_folder(out) as folder, _bar(recipe, len(chosen) * seeds) as progress:
        done = compare.compare(recipe, chosen, seeds, folder, progress)
    rows = done.rows
    for row in rows:
        print(f"{row.name:16}{variants.VARIANTS[row.name].description}")
    print("\n".join(["", *compare.table(rows), "", *compare.spreads(rows)]))
    for name, error in done.failed.items():
        print(f"no figures for {name}: {_one_line(error)}")
    for row in rows:
        for advice in row.runs[0].advice:
            print(f"advice, {row.name}: {advice}")
    virtual_s, wall_s = sum(f.whole_s for r in rows for f in r.runs), sum(r.wall_s for r in rows)
    print(
        f"{virtual_s:,.0f} virtual s in {wall_s:.1f} s, {seeds} seed{'s' if seeds > 1 else ''}. Values are means over "
        f"seeds of {compare.steps(rows)} after the first {recipe.sim.skip_steps}; {compare.LEGEND}"
    )
    if out is not None:
        for path in compare.write(rows, out):
            print(f"written: {path}")
        try:
            title = f"{recipe.run.name}, {rows[-1].name}: workers (blue) and tok/s of each step (red)"
            print(f"written: {compare.plot(done, out, title)}")
        except WindfallError as e:  # the figures themselves are complete without a plot
            print(f"no figures.svg: {_one_line(e)}")


def _one_line(error: WindfallError) -> str:
    return ". ".join(str(error).splitlines())


@contextmanager
def _bar(recipe: Recipe, runs: int) -> Iterator[compare.OnEvent | None]:
    """A progress bar that shows virtual time next to wall time. Progress is counted in steps, or in virtual seconds if
    these are limited."""
    console = Console()
    if not console.is_terminal:
        yield None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[virtual]}"), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        limit_s = recipe.sim.seconds
        task = bar.add_task("", total=runs * (limit_s or recipe.run.steps), virtual="")
        updated = 0.0
        began: dict[tuple[str, int], float] = {}
        done: dict[tuple[str, int], float] = {}

        def on_event(name: str, seed: int, event: Event) -> None:
            nonlocal updated
            done[name, seed] = event["m"] if limit_s else max(done.get((name, seed), 0), event.get("step", 0))
            now = time.perf_counter()
            began.setdefault((name, seed), now)
            if now - updated > 0.1:
                updated = now
                rate = event["m"] / max(1e-3, now - began[name, seed])
                bar.update(
                    task, completed=sum(done.values()), description=f"{name}, seed {seed}",
                    virtual=f"{event['m']:,.0f} virtual s, {rate:,.0f} times real time",
                )  # fmt: skip

        yield on_event
