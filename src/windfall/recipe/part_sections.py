"""The sections that parts add to a recipe (windfall.parts)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from pydantic import Field, create_model

from windfall import parts
from windfall.recipe.section import Section

Base = TypeVar("Base", bound=Section)


def part_sections(prefix: str = "") -> dict[str, type[Section]]:
    """The sections of all parts directly under `prefix`, such as "fleet.", by name."""
    found = [added for part in parts.found() if (added := part.section()) is not None]
    return {
        path.removeprefix(prefix): section
        for path, section in found
        if path.startswith(prefix) and "." not in path.removeprefix(prefix)
    }


def with_parts(prefix: str) -> Callable[[type[Base]], type[Base]]:
    """Decorate a section with a key for each section that a part adds under `prefix`. On the top level it always has a
    value, as every section; within another section it is None if it is left out."""

    def decorate(base: type[Base]) -> type[Base]:
        added: dict[str, Any] = {}
        for name, section in part_sections(prefix).items():
            help = f"The keys of [{prefix}{name}] below. {section.__doc__}"
            added[name] = (section | None, Field(default=None, description=help)) if prefix else (section, section())
        return create_model(base.__name__, __base__=base, __module__=base.__module__, __doc__=base.__doc__, **added)

    return decorate
