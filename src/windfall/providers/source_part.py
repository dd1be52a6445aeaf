"""What a part that adds a source of workers implements. Imports nothing at run time: `windfall --help` imports it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from windfall.parts import ProgramPart

if TYPE_CHECKING:
    from windfall.providers.base import OnEvent, Provider
    from windfall.recipe.sections import Recipe


@dataclass(frozen=True, kw_only=True, slots=True)
class Employer:
    """The run that a provider starts workers for."""

    name: str
    label: str
    """Name for what the run starts in other systems (run_label)."""
    folder: Path
    url: Callable[[], Awaitable[str]]
    """Waits for the address at which workers reach the controller."""
    secrets: Mapping[str, str]
    """Environment variables that a worker needs."""
    on_event: OnEvent


class SourcePart(ProgramPart, ABC):
    """A system that workers come from. `source` is an instance of the class of its section [fleet.NAME]."""

    logs: str
    """Where to find the output of workers."""
    needs_ports = False
    """Whether workers must know the ports of the run before it starts."""

    @abstractmethod
    def section(self) -> tuple[str, type[Any]]: ...

    @abstractmethod
    def check(self, source: Any) -> None:
        """Raise WindfallError if the system cannot be used from here, for example because its program is missing."""

    @abstractmethod
    def provider(self, source: Any, run: Employer) -> Provider:
        """What starts workers and keeps them running (providers/base.py)."""

    @abstractmethod
    def preview(self, source: Any, recipe: Recipe, *, label: str, url: str) -> str:
        """What the system would read, as text; its first line may continue the heading, after a semicolon."""

    def host(self, recipe: Recipe) -> str:
        """The host of the controller as workers see it. Empty: the address of this machine."""
        del recipe
        return ""
