"""The data files of a supervised run: which rows are trained on, and that the files stay as they were at the start."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import xxhash

from windfall import run_folder as folders
from windfall.errors import WindfallError
from windfall.recipe.sections import Recipe
from windfall.sft import rows
from windfall.sft.rows import Row

BEGAN = "sft.began.json"
"""File of a run with the digests of its data files when it began."""


def paths(recipe: Recipe) -> list[Path]:
    """The data set, and that of the evaluation if it has one of its own."""
    s = recipe.sft
    return [path for path in (s.path, s.eval_path) if path is not None]


def read(recipe: Recipe) -> tuple[tuple[Path, Sequence[Row]], tuple[Path, Sequence[Row]]]:
    """The rows to train on and those for the evaluation, with their files."""
    s = recipe.sft
    assert s.path is not None, "this is not a supervised run"
    found = rows.read(s.path)
    if s.eval_path is not None:
        if s.held_out:
            fix = "Set only one of them."
            raise WindfallError("sft.eval_path and sft.held_out are both set", where="sft", fix=fix)
        return (s.path, found), (s.eval_path, rows.read(s.eval_path))
    if s.held_out >= len(found):
        what = f"sft.held_out = {s.held_out} leaves none of the {len(found)} rows to train on"
        raise WindfallError(what, where=str(s.path), fix="Lower sft.held_out.")
    count = len(found) - s.held_out
    return (s.path, found[:count]), (s.path, found[count:])


def record(recipe: Recipe, folder: Path) -> None:
    folders.replace(folder / BEGAN, json.dumps(_digests(recipe)))


def check_unchanged(recipe: Recipe, folder: Path) -> None:
    """Raise WindfallError if a data file has changed since the run began: steps would train on other rows."""
    before, now = folders.read_json(folder / BEGAN), _digests(recipe)
    for key, digest in now.items():
        if before is not None and before.get(key, digest) != digest:
            what = "the data has changed since this run began"
            fix = "Restore the file and resume, or start a new run with the changed file."
            raise WindfallError(what, where=f"sft.{key} = {getattr(recipe.sft, key)}", fix=fix)


def _digests(recipe: Recipe) -> dict[str, str]:
    named = {"path": recipe.sft.path, "eval_path": recipe.sft.eval_path}
    return {key: _digest(path) for key, path in named.items() if path is not None}


def _digest(path: Path) -> str:
    try:
        with path.open("rb") as file:
            digest = xxhash.xxh3_128()
            while block := file.read(1 << 20):
                digest.update(block)
    except OSError as e:
        raise WindfallError(f"cannot read it: {e.strerror or e}", where=str(path), fix="Restore the file.") from e
    return digest.hexdigest()
