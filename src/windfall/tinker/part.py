"""A server of the Tinker API: `windfall tinker`, the section [tinker], and the loop of its runs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from windfall.controller.own_loop import LoopPart
from windfall.parts import Command

if TYPE_CHECKING:
    from rich.console import Group

    from windfall.controller.own_loop import OwnLoop
    from windfall.recipe.sections import Recipe
    from windfall.tinker.section import TinkerSection

FIX_PORT = "Choose another port: --port, or tinker.port."


class TinkerPart(LoopPart):
    name = "tinker"

    def commands(self) -> Sequence[Command]:
        from windfall.tinker.command import tinker

        return [Command(panel="Train", example="tinker --model tiny --port 8900", function=tinker)]

    def section(self) -> tuple[str, type[TinkerSection]]:
        from windfall.tinker.section import TinkerSection

        return "tinker", TinkerSection

    def view(self, folder: Path) -> Group | None:
        from windfall.tinker.accounts import view

        return view.of_folder(folder)

    def loop(self, recipe: Recipe, folder: Path) -> OwnLoop | None:
        if recipe.tinker.port is None:
            return None
        from windfall.tinker.loop import TinkerLoop

        return TinkerLoop(recipe, folder)

    def check(self, recipe: Recipe) -> bool:
        if recipe.tinker.port is None:
            return False
        from windfall.link import network
        from windfall.tinker.accounts import keys

        if (file := recipe.tinker.accounts) is not None:
            keys.load(file, file.parent)
        network.check_port(recipe.tinker.host or recipe.fleet.host, recipe.tinker.port, FIX_PORT)
        return True


PART = TinkerPart()
