"""The parts beside the program: it works without each of them, and nothing in it imports them.

A part is a package with a module `part` that holds one object, PART. Packages of others register such an object as an
entry point of the group `windfall.parts`. A part may add commands, a section of the recipe, an observer of runs
(controller/observer.py), a loop of its own (controller/own_loop.py) or a source of workers (providers/base.py).
`windfall --help` imports every `part` module, so its methods import the rest of the part only when they are called.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

OWN = (
    "page", "plan", "serve", "sim", "jobs", "sft", "tinker", "hub", "on_ray",
    "providers.ray", "providers.kubernetes", "providers.skypilot", "providers.slurm",
)  # fmt: skip
"""The parts that come with windfall, in the order of their commands and sections."""
GROUP = "windfall.parts"


@dataclass(frozen=True, kw_only=True, slots=True)
class Command:
    """A command of a part."""

    panel: str
    """The panel of `windfall --help` that shows the command."""
    example: str
    """Arguments of `windfall` that start with the name of the command."""
    function: Callable[..., None]


class ProgramPart:
    name: str
    """Name of the package within windfall, or of the entry point."""
    needs: Sequence[str] = ()
    """All other parts that this one imports."""

    def commands(self) -> Sequence[Command]:
        return ()

    def section(self) -> tuple[str, type[Any]] | None:
        """The section of the recipe that the part adds, such as "sim" or "fleet.ray", and its class."""
        return None

    def view(self, folder: Path) -> Any:
        """What `windfall top` shows, now, of a folder that this part writes and that is no run. None: not its own."""
        return None

    def snapshot(self, folder: Path) -> dict[str, Any] | None:
        """What `windfall top --json` prints of such a folder. None: not its own."""
        return None


@functools.cache
def _installed() -> dict[str, ProgramPart]:
    """All parts that are there, even if others that they need are not."""
    own = [importlib.import_module(f"windfall.{name}.part").PART for name in OWN if _is_there(name)]
    others = [entry.load() for entry in importlib.metadata.entry_points(group=GROUP)]
    return {part.name: part for part in [*own, *others]}


def _is_there(name: str) -> bool:
    package = importlib.util.find_spec(f"windfall.{name}")
    # A folder that is left without its files, for example with __pycache__ only, is a package without a file, too.
    return package is not None and package.origin is not None


def found() -> list[ProgramPart]:
    installed = _installed()
    return [part for part in installed.values() if installed.keys() >= set(part.needs)]


def restore(word: str) -> str:
    """What to do if a section or a command is unknown because its part is missing. Empty: windfall has no such part."""
    name = next((name for name in OWN if name.rpartition(".")[2] == word), None)
    if name is None or name in (part.name for part in found()):
        return ""
    installed = _installed()
    missing = [n for n in (name, *(installed[name].needs if name in installed else ())) if n not in installed]
    folders = " and ".join(f"src/windfall/{n.replace('.', '/')}" for n in missing)
    return f"It needs {folders}, which this installation does not have: restore it, or install windfall again."
