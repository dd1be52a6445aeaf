"""`windfall page`: write the page of one or several runs as one HTML file that can be mailed. A run that goes on serves
its page itself (live_page.py)."""

from __future__ import annotations

import webbrowser
from pathlib import Path
from typing import Annotated

import typer

from windfall.errors import unwritable


def page(
    runs: Annotated[
        list[Path],
        typer.Argument(
            metavar="RUN",
            help="Folders of runs, in progress or ended; then simulations (windfall sim --out) to compare with.",
        ),
    ],
    out: Annotated[Path | None, typer.Option(help="File to write. Default: page.html in the run's folder.")] = None,
    open: Annotated[bool, typer.Option("--open", help="Open the file in a browser.")] = False,
    samples: Annotated[bool, typer.Option(help="Include the sampled responses.")] = True,
) -> None:
    """Write the page of a run, or of several beside each other, as one file for a browser."""
    from windfall.run_folder import named

    runs = [named(run) for run in runs]
    path = write(runs, out or runs[0] / "page.html", samples=samples)
    print(path)
    if open:
        webbrowser.open(path.resolve().as_uri())


def write(runs: list[Path], out: Path, *, samples: bool = True) -> Path:
    """Write one self-contained file. `samples`: include the sampled responses."""
    from windfall.page import document
    from windfall.page.runs import read_all

    data = {"live": False, "runs": [reader.describe(samples=samples) for reader in read_all(runs)]}
    text = document.html(data, f"{data['runs'][0]['name']} · windfall")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(text, encoding="utf-8")
    except OSError as e:
        raise unwritable("the page", out, e, "Set --out.") from e
    return out
