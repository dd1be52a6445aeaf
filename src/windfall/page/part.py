"""The page of a run, and `windfall page`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from windfall.controller.observer import ObserverPart
from windfall.parts import Command

if TYPE_CHECKING:
    from windfall.events.log import EventLog
    from windfall.page.live_page import LivePage
    from windfall.recipe.sections import Recipe


class PagePart(ObserverPart):
    name = "page"

    def commands(self) -> Sequence[Command]:
        from windfall.page.command import page

        return [Command(panel="Watch", example="page runs/demo --out demo.html", function=page)]

    def observer(self, recipe: Recipe, folder: Path, events: EventLog) -> LivePage:
        from windfall.page.live_page import LivePage

        return LivePage(recipe, folder, events)


PART = PagePart()
