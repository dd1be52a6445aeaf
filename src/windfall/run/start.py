"""Runs a new or resumed run from start to end. The supervisor handles its processes."""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
from collections.abc import Iterator
from pathlib import Path

from windfall import errors
from windfall import run_folder as folders
from windfall.errors import WindfallError
from windfall.events.log import EventLog
from windfall.link import auth
from windfall.models import load
from windfall.recipe.changes import KeyChange
from windfall.recipe.file import dump_recipe
from windfall.recipe.sections import Recipe
from windfall.run import recipe_check, resume_check, supervisor
from windfall.run.views.console import Console


def new_folder(recipe: Recipe) -> Path:
    """Create runs/name, or runs/name-2, -3, ... if that exists: a run never writes into another run's folder."""
    recipe = folders.with_absolute_paths(recipe)
    data = json.dumps(resume_check.data_digests(recipe))
    wanted = recipe.run.folder / recipe.run.name
    for n in range(1, 10_000):
        folder = wanted if n == 1 else wanted.with_name(f"{wanted.name}-{n}")
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            continue
        except OSError as e:
            what = f"cannot create the run's folder: {errors.describe_write(e, folder)}"
            raise WindfallError(what, where=str(folder), fix="Set run.folder to a folder that you may write to.") from e
        try:
            folders.write_recipe(recipe, folder)
            folders.replace(folder / folders.BEGAN, dump_recipe(recipe))
            folders.replace(folder / folders.DATA_BEGAN, data)
        except OSError as e:
            error = errors.unwritable("the recipe", folder, e, "Free disk space, or set run.folder.")
            shutil.rmtree(folder, ignore_errors=True)
            raise error from e
        return folder
    raise WindfallError("ten thousand runs with this name exist", where=str(wanted), fix="Set run.name.")


def train(recipe: Recipe, folder: Path, *, token: str | None = None, secret: str | None = None) -> int:
    """Run training in `folder` until it ends or is stopped; returns the exit status (supervisor.py). `token`: what
    workers join with; `secret`: what the other machines of the trainer join with. None creates one."""
    console = Console(recipe, folder)
    notice_older(recipe, folder, console)
    with folders.owned(folder):
        auth.make_token(folder / "token", token)
        auth.make_token(folder / "trainer.secret", secret)
        return _run(recipe, folder, console)


def notice_older(recipe: Recipe, folder: Path, console: Console) -> None:
    """Say so if an older run has the name of this one."""
    if (wanted := recipe.run.folder / recipe.run.name) != folder:
        number = int(folder.name.removeprefix(f"{wanted.name}-")) - 1
        before = wanted.with_name(f"{wanted.name}-{number}") if number > 1 else wanted
        console.name_is_taken(before, resume_check.describe(before))


def resume(recipe: Recipe, folder: Path) -> int:
    """Continue a run; returns the exit status."""
    console = Console(recipe, folder)
    with folders.owned(folder):
        ready = prepare(recipe, folder, console)
        return 0 if ready is None else _run(ready, folder, console)


def prepare(recipe: Recipe, folder: Path, console: Console, *, here: bool = True) -> Recipe | None:
    """Check how a run continues, and record its recipe, which is returned with absolute paths. None: it is finished.
    `here`: its processes start on this machine, so this must have what they need."""
    warnings = resume_check.check_files(folder)
    recipe = folders.with_absolute_paths(recipe)
    changes = resume_check.check_changes(recipe, folder)
    steps = resume_check.finished(recipe, folder)
    if steps is not None:
        console.is_finished(steps)
        return None
    if here and (report := recipe_check.check(recipe)):
        console.notice(report)
    record(recipe, folder, changes)
    console.resuming(changes, warnings)
    return recipe


def record(recipe: Recipe, folder: Path, changes: list[KeyChange]) -> None:
    """Save the recipe and log its changes. Together with the original recipe, the log then shows which recipe each
    resume used."""
    try:
        folders.write_recipe(recipe, folder)  # changes by --set also apply to the next resume
    except OSError as e:
        fix = "Free disk space or make the folder writable."
        raise errors.unwritable("the recipe", folder, e, fix) from e
    if (folder / "events.jsonl").is_file():
        with contextlib.closing(EventLog(folder / "events.jsonl")) as log:
            log.instant("recipe", changed={c.key: [c.old, c.new] for c in changes})


def _preparations(recipe: Recipe, folder: Path) -> Iterator[str]:
    """What must be done before the models of the recipe can be loaded."""
    for name in recipe.names():
        view = recipe.of(name)
        if view.train.lora is not None or not (folders.policy_folder(folder, name) / "checkpoints").is_dir():
            yield load.preparation(view.model.path)


def clear(folder: Path) -> None:
    """Remove what processes that have ended reported, and create the secrets that are missing."""
    for left in (*folder.glob(".*.failure"), *folder.glob(folders.FROZEN_TRAINER)):
        left.unlink()
    auth.make_token(folder / "token")
    auth.make_token(folder / "trainer.secret")


def _run(recipe: Recipe, folder: Path, console: Console) -> int:
    clear(folder)
    console.starting("; ".join(filter(None, dict.fromkeys(_preparations(recipe, folder)))))
    with console:
        try:
            status = asyncio.run(errors.guard(supervisor.Supervisor(recipe, folder, console).run()))
        except asyncio.CancelledError:  # after a second Ctrl-C
            raise KeyboardInterrupt from None
    console.summary(finished=status == 0)
    return status
