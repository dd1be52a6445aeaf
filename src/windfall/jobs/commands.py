"""The commands of the part: `windfall up`, `jobs`, `stop` and `join`, and what `train --on` and `resume --on` do."""

from __future__ import annotations

import datetime
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated
from urllib.parse import quote

import typer

from windfall.errors import WindfallError
from windfall.run.commands.options import Json, service_ca_option, token_option

if TYPE_CHECKING:
    from windfall.recipe.sections import Recipe
    from windfall.run.submission import Submission

On = Annotated[
    str,
    typer.Option(metavar="URL", envvar="WINDFALL_ON", help="Address of the service, or its folder on this machine."),
]
ServiceCa = Annotated[Path | None, service_ca_option()]
Token = Annotated[
    str | None,
    token_option(
        help="File that holds the fleet's token, or the job's. Default: the one in the service's folder.",
        envvar="WINDFALL_FLEET_TOKEN",
    ),
]


def up(
    file: Annotated[Path, typer.Argument(metavar="FLEET.toml", help="File that describes the fleet.")],
    folder: Annotated[
        Path | None, typer.Option(help="Directory of the service, instead of the one in the file.")
    ] = None,
) -> None:
    """Run jobs on shared devices until Ctrl-C, which saves all of them. Started again, it continues them."""
    from windfall.jobs import process, settings

    found = settings.load(file)
    if folder is not None:
        found = found.model_copy(update={"folder": folder.resolve()})
    raise typer.Exit(process.main(found))


def jobs(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Show this job only.")] = "",
    on: On = "fleet",
    token: Token = None,
    tls_ca: ServiceCa = None,
    as_json: Json = False,
    remove: Annotated[
        bool, typer.Option("--remove", help="Delete this job and its folder. It must have ended.")
    ] = False,
) -> None:
    """Show the jobs of a service: queue, progress, share, dollars so far, predicted end."""
    from rich.console import Console

    from windfall.jobs.client import JobsClient
    from windfall.jobs.views import table
    from windfall.run.views.top import WIDE

    path = f"/jobs/{quote(name, safe='')}" if name else "/jobs"
    if remove:
        if not name:
            fix = "Give the name of the job: windfall jobs NAME --remove."
            raise WindfallError("no job is named", where="--remove", fix=fix)
        JobsClient(on, token, tls_ca).delete(path)
        print(f"{name} is removed")
        return
    found = JobsClient(on, token, tls_ca).get(path)
    if as_json:
        print(json.dumps(found))
        return
    out = Console(highlight=False)
    if not out.is_terminal:
        out.width = max(out.width, WIDE)
    out.print(table.one(name, found, found.get("devices")) if name else table.table(found))


def stop(
    name: Annotated[str, typer.Argument(metavar="NAME", help="The job to stop.")],
    on: On = "fleet",
    token: Token = None,
    tls_ca: ServiceCa = None,
) -> None:
    """Stop a job. It saves, and keeps its place on disk: `windfall resume NAME --on URL` continues it."""
    from windfall.jobs.client import JobsClient

    state = JobsClient(on, token, tls_ca).post(f"/jobs/{quote(name, safe='')}/stop")["state"]
    print(f"{name} {'is stopping' if state == 'running' else f'is {state}'}")


def join(
    on: On,
    token: Annotated[str, token_option(what="the fleet's token", envvar="WINDFALL_FLEET_TOKEN")],
    tls_ca: ServiceCa = None,
    name: Annotated[str, typer.Option(help="Name of this machine. Default: its host name.")] = "",
    file: Annotated[
        Path | None, typer.Option("--fleet", help="File with devices, cpu_slots, price_usd_per_h of this machine.")
    ] = None,
) -> None:
    """Lend the devices of this machine to the jobs of a service on another one, until Ctrl-C."""
    from windfall.jobs.machine import join as joining
    from windfall.jobs.settings import FleetSettings, load

    raise typer.Exit(joining.main(on, token, tls_ca, name, FleetSettings() if file is None else load(file)))


def submit(recipe: Recipe, submission: Submission) -> None:
    from windfall import run_folder as folders
    from windfall.jobs.client import JobsClient
    from windfall.link import auth
    from windfall.recipe.file import dump_recipe

    client, name = JobsClient(submission.on, submission.token, submission.ca), submission.name or recipe.run.name
    made = client.post(
        "/jobs", recipe=dump_recipe(folders.with_absolute_paths(recipe), all_keys=False), name=name,
        share=submission.share, priority=submission.priority, max_usd=submission.max_usd,
        deadline_s=_unix_time(submission.deadline), directory=str(Path.cwd()),
    )  # fmt: skip
    kept = Path(made["folder"]) / "token"
    if not kept.is_file():  # the service is on another machine
        kept = Path(f"{name}.token")
        auth.make_token(kept, made["token"])
    print(f"{name} is {made['state']}; its token is in {kept}")
    print(f"see it: windfall jobs {name} --on {submission.on}")


def resume(name: str, on: str, token: str | None, ca: Path | None, max_usd: float | None) -> None:
    from windfall.jobs.client import JobsClient

    fields = {} if max_usd is None else {"max_usd": max_usd}
    state = JobsClient(on, token, ca).post(f"/jobs/{quote(name, safe='')}/resume", **fields)["state"]
    print(f"{name} is {state}")


def _unix_time(text: str) -> float:
    """
    >>> _unix_time("2026-11-20T08:00+00:00"), _unix_time("")
    (1795161600.0, 0.0)
    """
    try:
        return datetime.datetime.fromisoformat(text).timestamp() if text else 0.0
    except ValueError:
        fix = 'Write it as "2026-11-20T08:00", in local time.'
        raise WindfallError(f"{text!r} is not a date and time", where="--deadline", fix=fix) from None
