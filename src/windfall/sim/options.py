"""`windfall sim`: its options. Its parts are imported only when they run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from windfall.errors import WindfallError
from windfall.run.commands.options import Json
from windfall.turns.sharing import SLICE_S

What = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="RECIPE.toml... | calibrate FILE...",
        help="Recipe to simulate, or several that share machines; or calibrate, followed by event logs of runs.",
    ),
]
Seeds = Annotated[int, typer.Option(min=1, help="Number of simulations, each with its own seed.")]
Out = Annotated[Path | None, typer.Option(help="Directory for figures (JSON) and event logs.")]
Compare = Annotated[str, typer.Option(help="Variants to compare, separated by commas, or all.")]
Overrides = Annotated[
    list[str] | None, typer.Option("--set", metavar="a.b=value", help="Override a recipe key; may be repeated.")
]
SliceS = Annotated[
    float, typer.Option(min=0.0, help="Seconds of a turn of generation, with several recipes. Others wait meanwhile.")
]
Share = Annotated[str, typer.Option(metavar="2,1", help="Shares of several recipes, in their order.")]
Priority = Annotated[str, typer.Option(metavar="1,0", help="Priorities of several recipes, in their order.")]


def sim(
    what: What = None, seeds: Seeds = 1, out: Out = None, compare: Compare = "windfall", set: Overrides = None,
    slice_s: SliceS = SLICE_S, share: Share = "", priority: Priority = "", as_json: Json = False,
) -> None:  # fmt: skip
    """Simulate a run in virtual time to see its cost and speed: the real controller with simulated machines.

    [b]RECIPE.toml[/b] simulates a recipe; several recipes: their jobs on the same machines, together and one after the
    other.

    [b]calibrate FILE...[/b] fits simulated machines to the event log of a run and prints them as a part of a recipe.
    """
    if not what:
        raise WindfallError("nothing to simulate", where="windfall sim", fix="Give a recipe.")
    if what[0] == "calibrate":
        from windfall.sim.calibrate import event_log

        event_log.main([Path(w) for w in what[1:]])
        return
    from windfall.recipe.file import load_recipe
    from windfall.sim.jobs import report
    from windfall.sim.report import compare as variants

    if len(what) > 1:
        recipes = [(file, load_recipe(Path(file), set)) for file in what]
        terms = {"slice_s": slice_s, "share": share, "priority": priority}
        report.main(recipes, seeds=seeds, names=compare, out=out, **terms, as_json=as_json)
        return
    if share or priority or as_json:
        fix = "Give several recipes."
        raise WindfallError("--share, --priority and --json are for several recipes", where="windfall sim", fix=fix)
    variants.main(load_recipe(Path(what[0]), set), seeds=seeds, names=compare, out=out)
