"""`windfall new`, `examples` and `recipe`: write a recipe, or those of windfall, and look keys up."""

from __future__ import annotations

import itertools
import json
import re
import shutil
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from windfall.errors import WindfallError, nearest, unwritable
from windfall.run.commands.options import Json

if TYPE_CHECKING:
    from windfall.recipe.reference import Key

COLUMNS = {
    "prompt": ("prompt", "question", "problem", "instruction", "input"),
    "answer": ("answer", "solution", "target", "label", "output"),
}
"""Usual names of the columns of a data set."""
MANY_ROWS, SOME_ROWS = 200, 40
"""Rows from which on 5 %, or 20 %, are enough to evaluate on. With fewer, none are kept for it."""
MAX_TOKENS = 1024
"""Length of a response in a new recipe; at most half of the model's context."""


def new(
    model: Annotated[str, typer.Option(help="Model: tiny, smollm2-135m, a directory or a hub id.")],
    data: Annotated[Path, typer.Option(help="Data set: a JSONL or parquet file, or the folder of a data set.")],
    out: Annotated[
        Path | None, typer.Argument(metavar="RECIPE.toml", help="File to create. Default: print the recipe.")
    ] = None,
) -> None:
    """Write a recipe for a model and a data set, with the thirty keys that matter and what they mean."""
    from windfall.recipe import reference

    if out is not None and out.exists():
        raise WindfallError("this file already exists", where=str(out), fix="Choose another name.")
    values = {
        "run.name": re.sub(r"[^A-Za-z0-9._-]", "-", f"{Path(model).name}-{data.stem}".lower()).strip("-.") or "run",
        "model.path": model, "env.name": "dataset", "env.path": data, **describe_data(data), "train.lr": 1e-6,
        "rollout.max_tokens": response_tokens(model),
    }  # fmt: skip
    check = f"windfall train {out or 'RECIPE.toml'} --dry-run"
    head = f"# Check it with `{check}`. `windfall recipe --all` prints all keys.\n\n"
    text = head + reference.written(values)
    if out is None:
        print(text, end="")
        return
    try:
        out.write_text(text, encoding="utf-8")
    except OSError as e:
        raise unwritable("the recipe", out, e) from e
    print(f"created {out}; next: {check}")


def examples(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="Folder where recipes/ and examples/ are created.")],
) -> None:
    """Write the recipes and examples that come with windfall into a folder. Run them from that folder."""
    from windfall.recipe import shipped

    for name in shipped.FOLDERS:
        if (folder / name).exists():
            fix = "Choose another folder, or use these files."
            raise WindfallError("this already exists", where=str(folder / name), fix=fix)
    try:
        for name in shipped.FOLDERS:
            leave_out = shutil.ignore_patterns("__pycache__", "runs")
            shutil.copytree(shipped.root() / name, folder / name, ignore=leave_out)
    except OSError as e:
        raise unwritable("the examples", folder, e) from e
    recipes = sorted(p.relative_to(folder).as_posix() for p in (folder / "recipes").rglob("*.toml"))
    print("\n".join([*recipes, f"next, in {folder}: windfall train recipes/demo.toml"]))


def describe_data(data: Path) -> dict[str, Any]:
    """The keys of [env] that follow from the data: columns with usual names, and a share of rows for evaluation."""
    from windfall.envs.data import files, table

    file = files.find(data).files[0]
    rows = [row for _, row in itertools.islice(table.read_rows(file), MANY_ROWS)]
    row = rows[0] if rows else {}
    found = {role: next((name for name in names if name in row), "") for role, names in COLUMNS.items()}
    for role, name in found.items():
        if not name:
            fix = f"Rename one of its columns ({', '.join(row) or 'none'}) to {role!r}."
            raise WindfallError(f"the data set has no column that looks like the {role}", where=str(file), fix=fix)
    held_out = 0.05 if len(rows) == MANY_ROWS else 0.2 if len(rows) >= SOME_ROWS else None
    return {"env.columns": found, "env.held_out": held_out}


def response_tokens(model: str) -> int:
    """A length of responses that leaves half of the model's context for prompts, as far as its files are here."""
    from windfall.models import load

    return min(MAX_TOKENS, load.config(model).get("max_position_embeddings", 2 * MAX_TOKENS) // 2)


def recipe(
    section: Annotated[
        str,
        typer.Argument(metavar="SECTION", help="Print the keys of this section only; or one key, such as train.lr."),
    ] = "",
    all: Annotated[bool, typer.Option("--all", help="Print all keys, section by section.")] = False,
    as_json: Json = False,
) -> None:
    """Print the keys of a recipe with their defaults and meanings: the thirty that matter, or those of a section."""
    from rich.console import Console

    from windfall.recipe import reference
    from windfall.run.views.figures import plain_table

    columns = ("key", "default", "meaning")
    if not section and not all:
        if as_json:
            _print_keys((f"[{where}]", key) for where, key in reference.main_keys())
            return
        main = [(f"{where}.{key.name}", key.default, key.meaning) for where, key in reference.main_keys()]
        Console(highlight=False).print(plain_table(columns, main))
        return
    keys = {heading: list(reference.keys_of(found)) for heading, found in reference.all_sections()}
    chosen = {heading: found for heading, found in keys.items() if all or _name(heading) == section}
    chosen = chosen or {
        heading: same
        for heading, found in keys.items()
        if (same := [key for key in found if section in (key.name, f"{_name(heading)}.{key.name}")])
    }
    if not chosen:
        paths = {f"{_name(heading)}.{key.name}" for heading, found in keys.items() for key in found}
        fix = nearest(section, paths if "." in section else map(_name, keys))
        raise WindfallError(f"unknown section or key {section!r}", where="windfall recipe", fix=fix)
    if as_json:
        _print_keys((heading, key) for heading, found in chosen.items() for key in found)
        return
    for heading, found in chosen.items():
        rows = [(key.name, key.default, key.meaning) for key in found]
        Console(highlight=False).print(f"\n{heading}", plain_table(columns, rows), sep="\n", markup=False)


def _name(heading: str) -> str:
    """
    >>> _name("[train.lora]"), _name('[env] with name = "gym"')
    ('train.lora', 'env')
    """
    return heading.strip("[]").partition("]")[0]


def _print_keys(keys: Iterable[tuple[str, Key]]) -> None:
    print(json.dumps([{"section": heading, **asdict(key)} for heading, key in keys], indent=1))
