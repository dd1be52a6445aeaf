"""`windfall plan`: its options. The command itself is plan/command.py, which is imported only when it runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from windfall.errors import WindfallError


def plan(
    what: Annotated[str, typer.Argument(metavar="RECIPE.toml | MODEL", help="Recipe, or a model such as 8B.")] = "",
    cluster: Annotated[Path | None, typer.Option(metavar="FILE", help="Machines and links, as TOML.")] = None,
    gpus: Annotated[str, typer.Option(help="Machines as text, such as '8xH100 + 6x2xH100:spot'.")] = "",
    budget: Annotated[str, typer.Option(metavar="USD/h", help="Upper limit for the price, such as 90/h.")] = "",
    objective: Annotated[str, typer.Option(help="What to optimize: throughput, cost or deadline.")] = "throughput",
    deadline: Annotated[float, typer.Option(min=0.0, help="Hours for all steps, with --objective deadline.")] = 0.0,
    staleness: Annotated[int | None, typer.Option(min=0, help="Staleness. Default: the recipe's, or 1.")] = None,
    spot: Annotated[Path | None, typer.Option(metavar="TRACE", help="Trace of spot machines' availability.")] = None,
    measured: Annotated[
        Path | None, typer.Option(metavar="RUN", help="Use the times and lengths that this run measured.")
    ] = None,
    top: Annotated[int, typer.Option(min=1, max=20, help="Number of plans to show.")] = 3,
    simulate: Annotated[bool, typer.Option(help="Simulate the plans and rank them by that.")] = True,
    set_: Annotated[
        list[str] | None, typer.Option("--set", metavar="a.b=value", help="Override a recipe key; may be repeated.")
    ] = None,
    write: Annotated[Path | None, typer.Option(metavar="FILE", help="Recipe of the best plan to write.")] = None,
    check: Annotated[Path | None, typer.Option(metavar="RUN", help="Compare this run with its plan.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, for scripts.")] = False,
) -> None:  # fmt: skip
    """Plan a run: which GPUs train, which generate, how fast that is and what it costs."""
    from windfall.plan import command

    if check is not None:
        command.check(check, as_json=as_json)
        return
    if not what:
        raise WindfallError("nothing to plan", where="windfall plan", fix="Give a recipe or a model, such as 8B.")
    command.main(
        what,
        cluster=cluster,
        gpus=gpus,
        budget=budget,
        objective=objective,
        deadline=deadline,
        staleness=staleness,
        spot=spot,
        measured_in=measured,
        top=top,
        simulate=simulate,
        write=write,
        overrides=set_ or (),
        as_json=as_json,
    )
