"""The simulator: `windfall sim` and [sim]."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from windfall.parts import Command, ProgramPart

if TYPE_CHECKING:
    from windfall.sim.section import Sim


class SimPart(ProgramPart):
    name = "sim"

    def commands(self) -> Sequence[Command]:
        from windfall.sim.options import sim

        example = "sim recipes/sim-harvest.toml --compare colocated,restart,windfall --out figures"
        return [Command(panel="Plan", example=example, function=sim)]

    def section(self) -> tuple[str, type[Sim]]:
        from windfall.sim.section import Sim

        return "sim", Sim


PART = SimPart()
