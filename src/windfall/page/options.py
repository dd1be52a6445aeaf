"""`windfall page` and `windfall plot`: their options."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Runs = Annotated[list[Path], typer.Argument(metavar="RUN", help="Folders of runs, in progress or ended.")]
RunsAndPredictions = Annotated[
    list[Path],
    typer.Argument(
        metavar="RUN",
        help="Folders of runs, in progress or ended; then simulations (windfall sim --out) or recipes (windfall plan "
        "--write) to compare with.",
    ),
]


def page(
    runs: RunsAndPredictions,
    out: Annotated[Path | None, typer.Option(help="Write one self-contained HTML file instead of serving.")] = None,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on. 0: any free one.")] = 0,
    open: Annotated[bool, typer.Option("--open", help="Open the page in a browser.")] = False,
    samples: Annotated[bool, typer.Option(help="Include the sampled responses in the file.")] = True,
) -> None:
    """Show a run, or several beside each other, in a browser: serve the page, or write it as one file."""
    from windfall.page import command as pages

    if out is not None:
        print(pages.write(runs, out, samples=samples))
    else:
        pages.serve(runs, host=host, port=port, open_browser=open)


def plot(
    runs: Runs,
    out: Annotated[Path, typer.Option(help="File to write; its name ends with .png, .svg or .pdf.")] = Path("run.png"),
    panels: Annotated[str, typer.Option(help="Panels, such as reward,length,timeline. Default: all series.")] = "",
    time: Annotated[bool, typer.Option("--time", help="Plot over hours instead of steps.")] = False,
) -> None:
    """Write a figure of one or several runs for a paper or a report (needs matplotlib: the extra `plot`)."""
    from windfall.page import plot as plots

    print(plots.main(runs, out, panels=[name for name in panels.split(",") if name], by_time=time))
