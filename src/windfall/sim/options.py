"""`windfall sim`: its options. Its parts are imported only when they run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from windfall.errors import WindfallError

FOR_RECIPE, FOR_REPLAY = "Options for RECIPE.toml", "Options for --replay"
FOR_CHAOS = "Options for chaos"
SimWhat = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="RECIPE.toml | calibrate FILE... | chaos",
        help="Recipe to simulate; or calibrate, followed by files of measurements; or chaos.",
    ),
]
SimOverrides = Annotated[
    list[str] | None,
    typer.Option(
        "--set", rich_help_panel=FOR_RECIPE, metavar="a.b=value", help="Override a recipe key; may be repeated."
    ),
]
SimReplay = Annotated[
    Path | None,
    typer.Option(
        rich_help_panel=FOR_REPLAY, metavar="RUN",
        help="Simulate this run from its own event log and compare the prediction with the measurements.",
    ),
]  # fmt: skip
SimFit = Annotated[
    str,
    typer.Option(
        rich_help_panel=FOR_REPLAY,
        help="Steps to fit machines to: first-half (the other half is predicted) or all.",
    ),
]


def sim(
    what: SimWhat = None,
    seeds: Annotated[
        int, typer.Option(min=1, help="Number of simulations, each with its own seed. Not for calibrate and --replay.")
    ] = 1,
    out: Annotated[
        Path | None, typer.Option(help="Directory for figures (JSON) and event logs. Not for calibrate.")
    ] = None,
    compare: Annotated[
        str, typer.Option(rich_help_panel=FOR_RECIPE, help="Variants to compare, separated by commas, or all.")
    ] = "windfall",
    set: SimOverrides = None,
    replay: SimReplay = None,
    fit: SimFit = "first-half",
    seed: Annotated[int, typer.Option(rich_help_panel=FOR_CHAOS, min=0, help="First seed.")] = 0,
    faults: Annotated[int, typer.Option(rich_help_panel=FOR_CHAOS, min=1, help="Number of faults per run.")] = 500,
) -> None:  # fmt: skip
    """Simulate a run in virtual time to see its cost and speed: the real controller with simulated machines.

    [b]RECIPE.toml[/b] simulates a recipe.

    [b]--replay RUN[/b] simulates a recorded run and compares the result with the recording.

    [b]calibrate FILE...[/b] fits simulated machines to measurements and prints them as a part of a recipe.

    [b]chaos[/b] injects faults into small runs and checks that no invariant is broken.
    """
    if replay is not None:
        from windfall.sim.replay import command as replays

        if what:
            raise WindfallError("a replay uses the recipe of its run", where="--replay", fix=f"Leave out {what[0]}.")
        if seeds > 1:
            raise WindfallError("a replay uses the seed of its run", where="--replay", fix="Leave out --seeds.")
        replays.main(replay, fit=fit, out=out)
        return
    if not what:
        raise WindfallError("nothing to simulate", where="windfall sim", fix="Give a recipe, or --replay RUN.")
    if what[0] == "calibrate":
        from windfall.sim.calibrate import command as calibrate

        calibrate.main([Path(w) for w in what[1:]])
        return
    if what[0] == "chaos":
        from windfall.sim.chaos import trial as chaos

        if len(what) > 1:
            fix = "Leave it out: chaos generates its own runs."
            raise WindfallError(f"unexpected argument {what[1]!r}", where="windfall sim chaos", fix=fix)
        chaos.main(seeds=seeds, seed=seed, faults=faults, out=out)
        return
    from windfall.recipe.file import load_recipe
    from windfall.sim.report import compare as variants

    if len(what) > 1:
        fix = "Simulate one recipe at a time."
        raise WindfallError(f"{len(what)} recipes given", where="windfall sim", fix=fix)
    variants.main(load_recipe(Path(what[0]), set), seeds=seeds, names=compare, out=out)
