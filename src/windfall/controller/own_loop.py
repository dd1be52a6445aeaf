"""A loop of a part, which takes the place of the loop of reinforcement learning in the runs that it is for."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from windfall.parts import ProgramPart

if TYPE_CHECKING:
    from windfall.controller.assembly import ControllerLife
    from windfall.models.text import Text
    from windfall.recipe.sections import Recipe
    from windfall.training import CheckpointState


class OwnLoop(Protocol):
    async def run(self, life: ControllerLife, text: Callable[[str], Text]) -> CheckpointState:
        """Make all steps that are left, or those until `life.stop` is set. Returns the state that was reached and
        saved. `text` is called for a policy once its trainer has connected."""
        ...

    def snapshot(self) -> dict[str, Any]:
        """What it adds to fleet.json."""
        ...


class LoopPart(ProgramPart, ABC):
    """A part with a loop."""

    samples: bool = True
    """Whether its loop samples from workers, so that more of them help."""

    @abstractmethod
    def loop(self, recipe: Recipe, folder: Path) -> OwnLoop | None:
        """The loop of this run. None: the run is not for this part."""

    @abstractmethod
    def check(self, recipe: Recipe) -> bool:
        """Whether the run is for this part. Raises WindfallError, before any process starts, if its loop cannot run."""
