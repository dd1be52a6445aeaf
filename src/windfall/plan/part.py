"""The planner: `windfall plan` and the section [plan]."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from windfall.parts import Command, ProgramPart

if TYPE_CHECKING:
    from windfall.plan.section import PlanSection


class PlanPart(ProgramPart):
    name = "plan"
    needs = ("sim",)

    def commands(self) -> Sequence[Command]:
        from windfall.plan.options import plan

        example = "plan 8B --gpus '8xH100 + 6x2xH100:spot' --objective cost"
        return [Command(panel="Plan", example=example, function=plan)]

    def section(self) -> tuple[str, type[PlanSection]]:
        from windfall.plan.section import PlanSection

        return "plan", PlanSection


PART = PlanPart()
