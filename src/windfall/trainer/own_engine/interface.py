"""What the trainer's process knows of its own engine, the worker named `local`. run/local_worker.py implements it."""

from __future__ import annotations

import asyncio
import threading
import traceback
from collections.abc import Callable, Coroutine
from typing import Any, Protocol

from windfall.errors import WindfallError, last_line
from windfall.trainer.ranks.process import RankPart
from windfall.trainer.service import Lock, TrainerService


class OwnEngine(Protocol):
    """Takes turns with the trainer on the trainer's devices."""

    @property
    def lock(self) -> Lock:
        """The lock that the trainer must hold while it works, and while it calls the following methods."""
        ...

    def make_room(self) -> None:
        """Free device memory before the trainer works."""
        ...

    def give_back(self) -> None:
        """Called after the trainer has worked: return device memory that it still holds, but no longer uses."""
        ...

    def invalidate(self) -> None:
        """The weights are about to change: generate nothing before they belong to a version again."""
        ...

    async def run(self, trainer: TrainerService) -> None:
        """Generate for the run. Raises an error if the engine cannot be built."""
        ...

    def close(self) -> None: ...


MakeEngine = Callable[[RankPart, str, Callable[[], str]], OwnEngine]
"""From the part of rank 0, the secret of the trainer, and a function that returns the address of the controller."""


class NoEngine:
    """For a run with fleet.local = false."""

    def __init__(self) -> None:
        self.lock = threading.Lock()

    def make_room(self) -> None:
        pass

    def give_back(self) -> None:
        pass

    def invalidate(self) -> None:
        pass

    async def run(self, trainer: TrainerService) -> None:
        pass

    def close(self) -> None:
        pass


async def run_beside(trainer: Coroutine[Any, Any, int], engine: Coroutine[Any, Any, None]) -> int:
    """The result of `trainer`. If its own engine cannot be built, this ends the process with the reason, because the
    controller would wait for its work."""
    running, local = asyncio.create_task(trainer), asyncio.create_task(engine)
    try:
        await asyncio.wait([running, local], return_when=asyncio.FIRST_COMPLETED)
        if local.done() and not running.done() and (error := local.exception()) is not None:
            if isinstance(error, WindfallError):
                raise error
            fix = "Set fleet.local = false to run without it; trainer.log has the traceback."
            traceback.print_exception(error)
            raise WindfallError(f"the trainer's own engine failed: {last_line(error)}", where="fleet.local", fix=fix)
        return await running
    finally:
        running.cancel()
        local.cancel()
        await asyncio.wait([running, local])
