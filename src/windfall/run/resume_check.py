"""Checks before a run is resumed: which recipe keys and data files changed, and is anything left to do?"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import xxhash

from windfall import run_folder as folders
from windfall.envs.data import files as data_files
from windfall.errors import WindfallError, unwritable
from windfall.events import log
from windfall.recipe.changes import KeyChange, recipe_changes
from windfall.recipe.env_sections import DatasetEnv
from windfall.recipe.sections import Recipe
from windfall.trainer import checkpoint


def check_files(folder: Path) -> list[str]:
    """Remove an unusable address.json: the next controller writes a new one. Returns warnings."""
    warnings, path = [], folder / "address.json"
    if path.is_file() and folders.address(folder) is None:
        path.unlink()
        warnings.append(f"{path}: damaged and removed; the controller may get a different port")
    if not (folder / "token").exists():
        lost = "missing; a new token is created, and workers with the old one are refused"
        warnings.append(f"{folder / 'token'}: {lost}")
    return warnings


def check_changes(recipe: Recipe, folder: Path) -> list[KeyChange]:
    """All keys changed since the run started. Refuses those that may not change (recipe/changes.py)."""
    changes = recipe_changes(folders.initial_recipe(folder), recipe)
    fixed = [str(c) for c in changes if c.verdict == "fixed"]
    if fixed:
        what = "\n  ".join(["these keys cannot change after a run has started:", *fixed])
        model = folders.policy_folder(folder, recipe.names()[0]) / "checkpoints" / "step-..."
        new_run = f"windfall train RECIPE.toml --set model.path={model}"
        undo = f"Undo this with --set or in {folder / 'recipe.toml'}"
        fix = f"{undo}, or start a new run from a checkpoint of this one:\n{new_run}"
        raise WindfallError(what, where=str(folder), fix=fix)
    check_data(recipe, folder)
    return changes


def finished(recipe: Recipe, folder: Path) -> int | None:
    """The number of steps of a finished run; None if something is left to do."""
    end = log.last(folder / "events.jsonl")
    if end is None or end["name"] != "end" or end.get("finished") is not True:
        return None
    step = end.get("step", 0)
    if step < recipe.run.steps:
        return None
    for name in recipe.names():
        if not recipe.is_trained(name):
            continue
        found = checkpoint.list_checkpoints(folders.policy_folder(folder, name) / "checkpoints")
        if not found or checkpoint.step_of(found[-1]) < recipe.run.steps:
            return None
        checkpoint.check(found[-1])
    return step


def describe(folder: Path) -> str:
    """How the run in this folder stands."""
    if folders.held(folder):
        return "running"
    end = log.last(folder / "events.jsonl")
    if end is None:
        return "no step done"
    if end["name"] != "end":
        return "ended unexpectedly"
    return f"{'finished' if end.get('finished') else 'stopped'} after step {end.get('step', 0)}"


def check_data(recipe: Recipe, folder: Path) -> None:
    """Raise WindfallError if the data files have changed since the run began: the task of every index depends on their
    rows. Without a record of them, record them as they are now."""
    now, path = data_digests(recipe), folder / folders.DATA_BEGAN
    if not path.exists():
        try:
            folders.replace(path, json.dumps(now))
        except OSError as e:
            raise unwritable("the record of the data files", path, e) from e
        return
    before, fields = folders.read_json(path), {"file", "bytes", "xxh3"}
    if before is None or not all(isinstance(was, dict) and fields <= {*was} for was in before.values()):
        fix = "Restore it, or remove it to accept the data files as they are now."
        raise WindfallError("the record of the run's data files is damaged", where=str(path), fix=fix)
    changed = []
    for key, was in before.items():
        if key in now and (was["bytes"], was["xxh3"]) != (now[key]["bytes"], now[key]["xxh3"]):
            sizes = f"{was['bytes']:,} bytes before, {now[key]['bytes']:,} now"
            how = sizes if was["bytes"] != now[key]["bytes"] else "same length as before, but different contents"
            changed.append(f"{key}: {now[key]['file']}: {how}")
    if changed:
        what = "\n  ".join(["the data has changed since this run began:", *changed])
        fix = "Restore the file and resume, or start a new run with the changed file: windfall train RECIPE.toml"
        raise WindfallError(what, where=str(folder), fix=fix)


def data_digests(recipe: Recipe) -> dict[str, dict[str, Any]]:
    """Size and digest of each file of the recipe's data set, by recipe key, and by file if there are several. Those of
    the evaluation are left out: they may change, and with them its result."""
    env = recipe.task_env
    if not isinstance(env, DatasetEnv):
        return {}
    files = data_files.find(env.path, env.split, env.subset).files
    return {f"env.path {file.name}" if len(files) > 1 else "env.path": _digest("env.path", file) for file in files}


def _digest(key: str, path: Path) -> dict[str, Any]:
    digest, size = xxhash.xxh3_128(), 0
    try:
        with path.open("rb") as file:
            while block := file.read(1 << 20):
                digest.update(block)
                size += len(block)
    except OSError as e:
        fix = "Restore the file, or correct its path."
        raise WindfallError(f"cannot read the data file: {e.strerror or e}", where=f"{key} = {path}", fix=fix) from e
    return {"file": str(path), "bytes": size, "xxh3": digest.hexdigest()}
