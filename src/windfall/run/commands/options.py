"""Arguments and options that several commands have."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

RecipeFile = Annotated[Path, typer.Argument(metavar="RECIPE.toml", help="Recipe to run.")]
Overrides = Annotated[
    list[str] | None, typer.Option("--set", metavar="a.b=value", help="Override a recipe key; may be repeated.")
]

Policy = Annotated[str, typer.Option(metavar="NAME", help="Which policy, if the run has several.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON, for scripts.")]


def _warn_of_visible_token(context: typer.Context, parameter: typer.CallbackParam, value: str | None) -> str | None:
    """Warn if the token itself is on the command line, where the process list shows it."""
    from windfall.link.auth import token_or_path

    source = context.get_parameter_source(str(parameter.name))
    typed = source is not None and source.name == "COMMANDLINE"
    if typed and value and isinstance(token_or_path(value), str):
        why = "every user of this machine can read this token in the process list; give a file, or set WINDFALL_TOKEN"
        print(f"warning: --token: {why}", file=sys.stderr)
    return value


def token_option(
    note: str = "", *, what: str = "the run's token", help: str = "", envvar: str = "WINDFALL_TOKEN",
    panel: str | None = None,
) -> Any:  # fmt: skip
    """The option with which a command takes a token: a file, not the token itself."""
    help = help or f"File that holds {what}{note}."
    return typer.Option(
        metavar="FILE", envvar=envvar, callback=_warn_of_visible_token, help=help, rich_help_panel=panel
    )


def service_ca_option(panel: str | None = None) -> Any:
    """The option with which a command trusts the certificate of a service of jobs."""
    help = "Certificate (PEM) to trust, if the service has TLS."
    return typer.Option("--tls-ca", metavar="FILE", envvar="WINDFALL_TLS_CA", help=help, rich_help_panel=panel)
