"""`windfall tinker`: start a server, in a run folder and with the processes of `windfall train`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from windfall.run.commands.options import Overrides, service_ca_option, token_option
from windfall.run.submission import Submission

if TYPE_CHECKING:
    from windfall.recipe.sections import Recipe

BASE = "base"
"""The policy without an adapter."""
JOB = "As a job of a service"
"""Where the help shows these options."""


def tinker(
    model: Annotated[str | None, typer.Option(help="Base model: a folder or a hub id. Default: model.path.")] = None,
    port: Annotated[int | None, typer.Option(help="Port of the server.")] = None,
    name: Annotated[str | None, typer.Option(help="Name of the base for clients. Default: as --model.")] = None,
    rank: Annotated[int, typer.Option(min=1, help="Largest rank of an adapter.")] = 32,
    models: Annotated[
        int, typer.Option(min=1, help="Models in the trainer at once. Others wait on disk for their next call.")
    ] = 4,
    samplers: Annotated[
        int, typer.Option(min=1, help="Adapters in workers at once. Samples from others wait for room.")
    ] = 8,
    context: Annotated[int | None, typer.Option(min=2, help="Most tokens of prompt and response together.")] = None,
    workers: Annotated[int | None, typer.Option(min=0, help="Workers that this machine starts. Default: 1.")] = None,
    accounts: Annotated[
        Path | None, typer.Option(metavar="FILE", help="File of accounts, with their keys and limits.")
    ] = None,
    recipe: Annotated[Path | None, typer.Option(metavar="RECIPE.toml", help="Recipe. Default: all defaults.")] = None,
    set: Overrides = None,
    on: Annotated[
        str, typer.Option(metavar="URL", rich_help_panel=JOB, help="Run it as a job of the service at this address.")
    ] = "",
    job: Annotated[str, typer.Option(rich_help_panel=JOB, help="Name of the job. Default: run.name.")] = "",
    share: Annotated[
        float, typer.Option(min=0.01, rich_help_panel=JOB, help="Share of the devices, relative to other jobs.")
    ] = 1.0,
    priority: Annotated[
        int, typer.Option(rich_help_panel=JOB, help="Jobs with a higher one have the devices first.")
    ] = 0,
    max_usd: Annotated[
        float, typer.Option(min=0.0, rich_help_panel=JOB, help="Stop the job when its bill reaches this. 0: no limit.")
    ] = 0.0,
    token: Annotated[str | None, token_option(what="the fleet's token", envvar="", panel=JOB)] = None,
    tls_ca: Annotated[Path | None, service_ca_option(JOB)] = None,
) -> None:
    """Serve the Tinker API: clients train adapters of one base with loops of their own. Ctrl-C saves all models."""
    from windfall.recipe.file import load_recipe, parse_recipe
    from windfall.run import recipe_check, start, submission
    from windfall.tinker.wire import messages

    messages.check_installed()
    parsed = load_recipe(recipe, set) if recipe is not None else parse_recipe({}, where="--set", overrides=set or ())
    found = served(
        parsed, model=model, port=0 if on and port is None else port, name=name, rank=rank, models=models,
        samplers=samplers, context=context, workers=workers, accounts=accounts,
    )  # fmt: skip
    if on:
        asked = Submission(
            on=on, token=token, ca=tls_ca, name=job, share=share, priority=priority, max_usd=max_usd
        )  # fmt: skip
        submission.part().submit(found, asked)
        return
    submission.refuse_options(job=job, share=share != 1.0, priority=priority, max_usd=max_usd, token=token)
    recipe_check.check(found)
    start.train(found, start.new_folder(found))


def served(
    recipe: Recipe, *, model: str | None, port: int | None, name: str | None, rank: int, models: int, samplers: int,
    context: int | None, workers: int | None, accounts: Path | None = None,
) -> Recipe:  # fmt: skip
    """The recipe of a server. What is None stays as the recipe has it."""
    from windfall.recipe.file import parse_recipe

    data: dict[str, Any] = recipe.model_dump(exclude_unset=True)

    def update(section: str, **keys: Any) -> None:
        data[section] = {**data.get(section, {}), **{key: value for key, value in keys.items() if value is not None}}

    update("model", path=model)
    served_port = 8900 if port is None and recipe.tinker.port is None else port
    update("tinker", port=served_port, name=name, accounts=None if accounts is None else str(accounts))
    update("rollout", max_tokens=context, staleness=0)
    if "name" not in data.get("run", {}):
        update("run", name="tinker")
    own = 1 if workers is None and "workers" not in data.get("fleet", {}) else workers
    update("fleet", local=False, workers=own)
    update("eval", tasks=0)
    update("log", samples=0)
    policies: dict[str, Any] = {BASE: {"frozen": True}}
    policies |= {f"t{n}": {"slot": "train", "lora": {"rank": rank}} for n in range(models)}
    policies |= {f"s{n}": {"slot": "sample", "lora": {"rank": rank}} for n in range(samplers)}
    data["policies"] = policies
    return parse_recipe(data, where="windfall tinker")
