"""The planner: `windfall plan`, [plan], and advice during a planned run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from windfall.controller.observer import ObserverPart
from windfall.parts import Command

if TYPE_CHECKING:
    from windfall.events.log import EventLog
    from windfall.plan.section import PlanSection
    from windfall.recipe.sections import Recipe


class PlanPart(ObserverPart):
    name = "plan"
    needs = ("sim", "serve")

    def commands(self) -> Sequence[Command]:
        from windfall.plan.options import plan

        example = "plan 8B --gpus '8xH100 + 6x2xH100:spot' --objective cost"
        return [Command(panel="Plan", example=example, function=plan)]

    def section(self) -> tuple[str, type[PlanSection]]:
        from windfall.plan.section import PlanSection

        return "plan", PlanSection

    def observer(self, recipe: Recipe, folder: Path, events: EventLog) -> None:
        del folder
        if recipe.plan.name:
            from windfall.plan.run import live

            live.attach(recipe, events)


PART = PlanPart()
