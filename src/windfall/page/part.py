"""The page of a run, `windfall page` and `windfall plot`."""

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
        from windfall.page.options import page, plot

        figure = "plot runs/demo runs/demo-2 --out figure.svg --panels reward,tok_per_s"
        return [
            Command(panel="Watch", example="page runs/demo --out demo.html", function=page),
            Command(panel="Watch", example=figure, function=plot),
        ]

    def observer(self, recipe: Recipe, folder: Path, events: EventLog) -> LivePage:
        from windfall.page.live_page import LivePage

        return LivePage(recipe, folder, events)


PART = PagePart()
