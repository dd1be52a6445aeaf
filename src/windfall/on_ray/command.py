"""`windfall ray RECIPE.toml`: a whole run on a Ray cluster, also as a Ray job."""

from __future__ import annotations

from typing import Annotated

import typer

from windfall.run.commands.options import Overrides, RecipeFile


def ray(
    recipe: RecipeFile,
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
    from windfall.errors import WindfallError
    from windfall.link import auth
    from windfall.on_ray.whole_run import RayDriver, RayRun
    from windfall.providers.ray.provider import check_installed
    from windfall.recipe.file import load_recipe
    from windfall.run import start

    check_installed()
    if not cpus + gpus:
        raise WindfallError("a rank needs CPUs or GPUs", where="--cpus, --gpus", fix="Give one of them.")
    parsed = load_recipe(recipe, set)
    parsed.refuse_slots()
    wanted = parsed.train.ranks
    folder = start.new_folder(parsed)
    auth.make_token(folder / "trainer.secret")

    async def main() -> int:
        made = RayRun(
            folder=folder.resolve(), ranks=0 if wanted in ("auto", 1) else int(wanted), address=address, cpus=cpus,
            secret=auth.read_token(folder / "trainer.secret"), gpus=gpus, room_s=room, stop_s=stop,
        )  # fmt: skip
        return await RayDriver(made).drive()

    raise typer.Exit(asyncio.run(errors.guard(main())))
