"""The option with which a command takes the token of a run: a file, not the token itself."""

from __future__ import annotations

import sys
from typing import Any

import typer


def _warn_of_visible_token(context: typer.Context, parameter: typer.CallbackParam, value: str | None) -> str | None:
    """Warn if the token itself is on the command line, where the process list shows it."""
    from windfall.link.auth import token_or_path

    source = context.get_parameter_source(str(parameter.name))
    typed = source is not None and source.name == "COMMANDLINE"
    if typed and value and isinstance(token_or_path(value), str):
        why = "every user of this machine can read this token in the process list; give a file, or set WINDFALL_TOKEN"
        print(f"warning: --token: {why}", file=sys.stderr)
    return value


def token_option(note: str = "", *, help: str = "", envvar: str = "WINDFALL_TOKEN") -> Any:
    help = help or f"File that holds the run's token{note}."
    return typer.Option(metavar="FILE", envvar=envvar, callback=_warn_of_visible_token, help=help)
