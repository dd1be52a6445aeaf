"""`windfall gateway`: where agents of a run reach the policy."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def gateway(run: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a run that is running.")]) -> None:
    """Print the address of a run's gateway. Every agent gets a key of its own for it; docs/agents.md describes it."""
    from windfall.controller.gateway import agents

    print(agents.address(run))
