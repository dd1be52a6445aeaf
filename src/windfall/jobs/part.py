"""Several jobs on one fleet: `windfall up`, `jobs`, `stop` and `join`, and `train` and `resume` with --on."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from windfall.parts import Command
from windfall.run.submission import Submission, SubmitPart

if TYPE_CHECKING:
    from rich.console import Group

    from windfall.recipe.sections import Recipe


class JobsPart(SubmitPart):
    name = "jobs"

    def commands(self) -> Sequence[Command]:
        from windfall.jobs import commands

        panel = "Several jobs"
        return [
            Command(panel=panel, example="up fleet.toml", function=commands.up),
            Command(panel=panel, example="jobs mine --on http://10.0.0.5:8765", function=commands.jobs),
            Command(panel=panel, example="stop mine --on http://10.0.0.5:8765", function=commands.stop),
            Command(panel=panel, example="join --on http://10.0.0.5:8765 --token fleet/token", function=commands.join),
        ]

    def view(self, folder: Path) -> Group | None:
        from windfall.jobs.views import table

        return table.of_folder(folder) if table.is_service(folder) else None

    def snapshot(self, folder: Path) -> dict[str, Any] | None:
        from windfall.jobs.views import table

        return table.snapshot_of(folder) if table.is_service(folder) else None

    def submit(self, recipe: Recipe, submission: Submission) -> None:
        from windfall.jobs import commands

        commands.submit(recipe, submission)

    def resume(self, name: str, on: str, token: str | None, ca: Path | None, max_usd: float | None) -> None:
        from windfall.jobs import commands

        commands.resume(name, on, token, ca, max_usd)


PART = JobsPart()
