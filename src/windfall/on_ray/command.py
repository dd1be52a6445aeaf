"""`windfall ray RECIPE.toml` and `windfall ray RUN`: a whole run on a Ray cluster, also as a Ray job."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from windfall.run.commands.options import Overrides


def ray(
    source: Annotated[
        Path,
        typer.Argument(
            metavar="RECIPE.toml|RUN",
            help="Recipe to run; or folder of a run that was stopped or killed, to continue it.",
        ),
    ],
    set: Overrides = None,
    address: Annotated[str, typer.Option(help="Address of the Ray cluster, as for ray.init.")] = "auto",
    cpus: Annotated[float, typer.Option(min=0.0, help="CPUs that Ray reserves for each rank of the trainer.")] = 1.0,
    gpus: Annotated[float, typer.Option(min=0.0, help="GPUs that Ray reserves for each rank of the trainer.")] = 1.0,
    room: Annotated[float, typer.Option(min=1.0, help="Seconds to wait until the cluster has room.")] = 1800.0,
    stop: Annotated[float, typer.Option(min=0.0, help="Seconds that the run has to save when it is stopped.")] = 60.0,
) -> None:
    """Train on a Ray cluster: controller and trainer in a placement group, workers by the section fleet.ray.

    As a Ray job: ray job submit --working-dir . -- windfall ray RECIPE.toml. run.folder must be on storage that the
    nodes share.
    """
    import asyncio

    from windfall import errors
    from windfall import run_folder as folders
    from windfall.errors import WindfallError
    from windfall.link import auth
    from windfall.on_ray.whole_run import LEFT_S, RayDriver, RayRun, say
    from windfall.providers.ray.provider import check_installed
    from windfall.recipe.file import load_recipe
    from windfall.run import start
    from windfall.run.views.console import Console

    check_installed()
    if not cpus + gpus:
        raise WindfallError("a rank needs CPUs or GPUs", where="--cpus, --gpus", fix="Give one of them.")
    new = source.is_file() or source.suffix == ".toml"
    parsed = load_recipe(source if new else folders.recipe_file(folders.named(source)), set)
    parsed.refuse_slots()
    folder = start.new_folder(parsed) if new else folders.named(source)
    console = Console(parsed, folder, "ray")
    with folders.owned(folder, "driver"):
        if new:
            start.notice_older(parsed, folder, console)
        else:
            if folders.held(folder):
                say(f"{folder}: a process still runs it; waiting up to {LEFT_S:g} s for its end")
            with folders.owned(folder, timeout_s=LEFT_S):
                if start.prepare(parsed, folder, console, here=False) is None:
                    return
        wanted = parsed.train.ranks
        run = RayRun(
            folder=folder.resolve(), ranks=0 if wanted in ("auto", 1) else int(wanted), address=address, cpus=cpus,
            secret=auth.make_token(folder / "trainer.secret"), gpus=gpus, room_s=room, stop_s=stop,
        )  # fmt: skip
        say(f"the run's folder: {run.folder}; if it stops, `windfall ray {run.folder}` continues it")
        raise typer.Exit(asyncio.run(errors.guard(RayDriver(run).drive())))
