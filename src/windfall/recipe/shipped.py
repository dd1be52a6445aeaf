"""The recipes and examples that come with windfall: in a clone at its root, in a wheel within the package."""

from __future__ import annotations

from pathlib import Path

PACKAGE = Path(__file__).resolve().parent.parent
FOLDERS = ("recipes", "examples")


def root() -> Path:
    """The folder with `recipes` and `examples` in it."""
    inside = PACKAGE / "shipped"  # pyproject.toml puts them there in a wheel
    return inside if inside.is_dir() else PACKAGE.parent.parent


def hint(path: Path) -> str:
    """What to do if `path` is missing here but comes with windfall. Empty: it does not come with windfall."""
    for name in (path, "recipes" / path):
        if name.parts[:1] == ("recipes",) and (root() / name).is_file():
            return f"`windfall examples .` writes the recipes of windfall into this folder. Then give {name}."
    return ""
