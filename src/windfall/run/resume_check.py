"""Checks before a run is resumed: are its files usable, which recipe keys changed, and is anything left to do?

Damaged files are reported here, before any process starts. The only file that is ever removed is an unusable
address.json: the next controller writes a new one.
"""

from __future__ import annotations

import os
from pathlib import Path

from windfall import recipe as config
from windfall import run_folder as folders
from windfall.errors import WindfallError
from windfall.events import log
from windfall.recipe import KeyChange, Recipe
from windfall.run.liveness import FROZEN_TRAINER
from windfall.trainer import checkpoint, checksums

FILES = (
    "recipe.toml", folders.BEGAN, "events.jsonl", "samples.jsonl", "token", "trainer.secret", "address.json",
    "fleet.json", "controller.log", "trainer.log", "fork_server.log", "env.log", ".controller.lock", ".trainer.lock",
    ".controller.failure", ".trainer.failure", FROZEN_TRAINER,
)  # fmt: skip
FOLDERS = ("checkpoints", "journal", "tokenizer", "workers", "tensorboard")


def check_files(folder: Path) -> list[str]:
    """Refuse a run with unusable files. Returns warnings."""
    for name in (*FILES, *FOLDERS):
        path, is_folder = folder / name, name in FOLDERS
        if not path.exists():
            continue
        if path.is_dir() is not is_folder:
            what = "a file where the run needs a folder" if is_folder else "a folder where the run needs a file"
            raise WindfallError(what, where=str(path), fix="Move it away, or restore the original.")
        if not os.access(path, os.R_OK | os.W_OK | (os.X_OK if is_folder else 0)):
            raise WindfallError("no permission to read and write this", where=str(path), fix="Change its permissions.")
    warnings = folders.data_warnings(folder)
    path = folder / "address.json"
    if path.exists() and folders.address(folder) is None:
        path.unlink()
        warnings.append(f"{path}: damaged and removed; the controller may get a different port")
    if not (folder / "token").exists():
        lost = "missing; a new token is created, and workers with the old one are refused"
        warnings.append(f"{folder / 'token'}: {lost}")
    return warnings


def check_changes(recipe: Recipe, folder: Path) -> list[KeyChange]:
    """All keys changed since the run started. Refuses those that may not change (recipe/changes.py)."""
    changes = config.changes(folders.initial_recipe(folder), recipe)
    fixed = [str(c) for c in changes if c.verdict == "fixed"]
    if fixed:
        what = "\n  ".join(["these keys cannot change after a run has started:", *fixed])
        new_run = f"windfall train RECIPE.toml --set model.path={folder / 'checkpoints' / 'step-...'}"
        undo = f"Undo this with --set or in {folder / 'recipe.toml'}"
        fix = f"{undo}, or start a new run from a checkpoint of this one:\n{new_run}"
        raise WindfallError(what, where=str(folder), fix=fix)
    folders.check_data(recipe, folder)
    return changes


def finished(recipe: Recipe, folder: Path) -> int | None:
    """The number of steps of a finished run; None if something is left to do, even if only a checkpoint is damaged."""
    end = log.last(folder / "events.jsonl")
    if end is None or end["name"] != "end" or end.get("finished") is not True:
        return None
    step = end.get("step", 0)
    path = folder / "checkpoints" / checkpoint.name(step)
    if step < recipe.run.steps or not path.is_dir():
        return None
    try:
        checkpoint.check(path)
    except checksums.DamagedCheckpoint:  # the trainer reports it, sets it aside, and repeats the last steps
        return None
    return step
