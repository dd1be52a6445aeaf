"""Supervised fine-tuning: `windfall sft`, the section [sft], and the loop of its runs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from windfall.controller.own_loop import LoopPart
from windfall.parts import Command

if TYPE_CHECKING:
    from windfall.controller.own_loop import OwnLoop
    from windfall.recipe.sections import Recipe
    from windfall.sft.section import SftSection


class SftPart(LoopPart):
    name = "sft"
    samples = False

    def commands(self) -> Sequence[Command]:
        from windfall.sft.command import sft

        example = "sft recipes/sft-demo.jsonl --recipe recipes/sft-demo.toml"
        return [Command(panel="Train", example=example, function=sft)]

    def section(self) -> tuple[str, type[SftSection]]:
        from windfall.sft.section import SftSection

        return "sft", SftSection

    def loop(self, recipe: Recipe, folder: Path) -> OwnLoop | None:
        if recipe.sft.path is None:
            return None
        from windfall.sft.loop import SupervisedLoop

        return SupervisedLoop(recipe, folder)

    def check(self, recipe: Recipe) -> bool:
        return recipe.sft.path is not None


PART = SftPart()
