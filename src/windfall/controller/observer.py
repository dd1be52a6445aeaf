"""What a part may run in the controller's process: it sees the events and responses of the run, and can serve pages."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from windfall.parts import ProgramPart

if TYPE_CHECKING:
    from aiohttp import web

    from windfall.controller.rollout.stream import Rollout
    from windfall.events.log import Event, EventLog
    from windfall.link.socket import Port
    from windfall.recipe.sections import Recipe


class RunObserver(Protocol):
    """Rule: none of it may delay or end the run."""

    def observe(self, event: Event) -> None:
        """An event that is in the log already, or was just written."""

    def attach(self, rollout: Rollout) -> None:
        """The rollout of this run, before it begins."""

    def pages(self) -> Mapping[str, Callable[[web.Request], Awaitable[web.StreamResponse]]]:
        """Handlers of plain HTTP requests on the controller's port, by path. `listening` follows."""
        ...

    def listening(self, port: Port) -> None:
        """The port is open. A handler calls `port.welcome` once a request has authenticated."""

    async def run(self, snapshot: Callable[[], dict[str, Any] | None]) -> None:
        """Run until canceled. `snapshot` returns the last state of the fleet."""

    async def close(self, how: str) -> None:
        """The run has ended: `how` is finished, stopped or failed."""


class ObserverPart(ProgramPart, ABC):
    """A part that observes runs."""

    @abstractmethod
    def observer(self, recipe: Recipe, folder: Path, events: EventLog) -> RunObserver | None:
        """Called before the run begins. None: a part that only attached a function to the event log, or nothing."""
