"""How `windfall train --on` and `windfall resume --on` reach the part that hands jobs to a service."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING

from windfall import parts
from windfall.errors import WindfallError
from windfall.parts import ProgramPart

if TYPE_CHECKING:
    from pathlib import Path

    from windfall.recipe.sections import Recipe


@dataclass(frozen=True, kw_only=True, slots=True)
class Submission:
    """What a user asks of the service for a job, besides its recipe."""

    on: str
    """Address of the service, or its folder on this machine."""
    token: str | None
    """The fleet's token, or the file that holds it. None: that in the service's folder."""
    ca: Path | None = None
    """A certificate to trust, for an https address."""
    name: str = ""
    """Empty: the name in the recipe."""
    share: float = 1.0
    priority: int = 0
    max_usd: float = 0.0
    """0: no limit."""
    deadline: str = ""
    """Local date and time, as "2026-11-20T08:00"; empty: none."""


class SubmitPart(ProgramPart, ABC):
    """A part that runs jobs on a shared fleet."""

    @abstractmethod
    def submit(self, recipe: Recipe, submission: Submission) -> None: ...

    @abstractmethod
    def resume(self, name: str, on: str, token: str | None, ca: Path | None, max_usd: float | None) -> None: ...


def refuse_options(**given: object) -> None:
    """Refuse options that only a job of a service has. `given`: by name, what was given without --on; falsy: nothing.

    >>> refuse_options(max_usd=0, deadline="")
    """
    for name in (name for name, value in given.items() if value):
        fix = "Add --on with the address of the service (windfall up), or leave this option out."
        raise WindfallError("only for a job of a service", where=f"--{name.replace('_', '-')}", fix=fix)


def part() -> SubmitPart:
    found = next((part for part in parts.found() if isinstance(part, SubmitPart)), None)
    if found is None:
        raise WindfallError("this installation has no service for jobs", where="--on", fix=parts.restore("jobs"))
    return found
