"""Before a run goes on: are its files usable, what has changed since it began, and is anything left to do?

Whatever was damaged is named here, before any process starts. Only one file is ever removed: an address that nobody can
dial, because the next controller writes a new one.
"""

from __future__ import annotations

import os
from pathlib import Path

from windfall import config
from windfall import run_folder as folders
from windfall.config import KeyChange, Recipe
from windfall.errors import WindfallError
from windfall.events import log
from windfall.train import checkpoint, checksums

FILES = (
    "recipe.toml", folders.BEGAN, "events.jsonl", "token", "trainer.secret", "address.json", "fleet.json",
    "controller.log", "trainer.log", "nursery.log", ".controller.lock", ".trainer.lock", ".controller.failure",
    ".trainer.failure", ".trainer.frozen",
)  # fmt: skip
FOLDERS = ("checkpoints", "journal", "tokenizer", "workers", "tensorboard")


def check_files(folder: Path) -> list[str]:
    """Refuses a run whose files are not what they should be. Returns what is worth a warning."""
    for name in (*FILES, *FOLDERS):
        path, is_folder = folder / name, name in FOLDERS
        if not path.exists():
            continue
        if path.is_dir() is not is_folder:
            what = "a file where the run needs a folder" if is_folder else "a folder where the run needs a file"
            raise WindfallError(what, where=str(path), fix="Move it away, or put the right one back.")
        if not os.access(path, os.R_OK | os.W_OK | (os.X_OK if is_folder else 0)):
            raise WindfallError("the run cannot read and write this", where=str(path), fix="Change its permissions.")
    warnings = folders.data_warnings(folder)
    path = folder / "address.json"
    if path.exists() and folders.address(folder) is None:
        path.unlink()
        warnings.append(f"{path}: damaged, and removed; the controller may get another port than before")
    if not (folder / "token").exists():
        warnings.append(f"{folder / 'token'}: missing; a new token is made, and workers with the old one are refused")
    return warnings


def check_changes(recipe: Recipe, folder: Path) -> list[KeyChange]:
    """All keys that differ from what the run began with. Refuses those that cannot change (config/changes.py)."""
    changes = config.changes(folders.began(folder), recipe)
    fixed = [str(c) for c in changes if c.verdict == "fixed"]
    if fixed:
        what = "\n  ".join(["a run that has begun keeps these keys:", *fixed])
        fix = (
            f"Undo that with --set or in {folder / 'recipe.toml'}, or start a new run from what this one has learned:\n"
        )
        fix += f"windfall train RECIPE.toml --set model.path={folder / 'checkpoints' / 'step-...'}"
        raise WindfallError(what, where=str(folder), fix=fix)
    folders.check_data(recipe, folder)
    return changes


def finished(recipe: Recipe, folder: Path) -> int | None:
    """How many steps a finished run has; None: there is something left to do. A damaged last checkpoint is, too."""
    end = log.last(folder / "events.jsonl")
    if end is None or end["name"] != "end" or end.get("finished") is not True:
        return None
    step = end.get("step", 0)
    path = folder / "checkpoints" / checkpoint.name(step)
    if step < recipe.run.steps or not path.is_dir():
        return None
    try:
        checkpoint.check(path)
    except checksums.DamagedCheckpoint:  # the trainer says so, sets it aside, and repeats the last steps
        return None
    return step
