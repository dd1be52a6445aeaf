"""A run from its start to its end: a new one, or one that goes on. The processes are the supervisor's business."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path

from windfall import config, unhandled
from windfall import run_folder as folders
from windfall.config import KeyChange, Recipe
from windfall.errors import WindfallError
from windfall.events import log as events
from windfall.events.log import EventLog
from windfall.launch import resume_check, supervisor
from windfall.link import auth
from windfall.views.console import Console


def train(recipe: Recipe, folder: Path, *, token: str | None = None, quiet: bool = False) -> None:
    """A new run in `folder`, to its end or until it is stopped. `token`: what workers join with; None makes one."""
    with folders.owned(folder):
        try:
            auth.make_token(folder / "token", token)
            _run(recipe, folder, Console(recipe, folder) if not quiet else None)
        except WindfallError as e:
            # No worker ever came. The folder is kept only if the message sends its reader there.
            if not _worked(folder) and not any(said in str(e) for said in (str(folder), ".log", "windfall resume")):
                folders.remove(folder)
            raise


def resume(recipe: Recipe, folder: Path, *, quiet: bool = False) -> None:
    """Go on with the run in `folder`, by its recipe as it is now."""
    console = Console(recipe, folder) if not quiet else None
    with folders.owned(folder):
        warnings = resume_check.check_files(folder)
        recipe = folders.anchored(recipe)
        changes = resume_check.check_changes(recipe, folder)
        steps = resume_check.finished(recipe, folder)
        if steps is not None:
            if console is not None:
                console.is_finished(steps)
            return
        said = supervisor.check(recipe)
        if console is not None:
            console.say(said)
        _record(recipe, folder, changes)
        if console is not None:
            console.resuming(changes, warnings)
        _run(recipe, folder, console)


def _record(recipe: Recipe, folder: Path, changes: list[KeyChange]) -> None:
    """What this life goes by: with what the run began with, the log knows the recipe of every life."""
    began = folders.began(folder)
    try:
        folders.write_recipe(recipe, folder)  # what was changed with --set holds for the next resume, too
        if not (folder / folders.BEGAN).exists():
            folders.replace(folder / folders.BEGAN, config.dump(began))
    except OSError as e:
        raise WindfallError(f"cannot write the recipe: {e.strerror or e}", where=str(folder)) from e
    if (folder / "events.jsonl").is_file():
        with contextlib.closing(EventLog(folder / "events.jsonl")) as log:
            log.instant("recipe", changed={c.key: [c.old, c.new] for c in changes})


def _worked(folder: Path) -> bool:
    """Has a worker joined, or a step been completed? Then logs and journal tell what became of it. Nothing is written
    to the journal but its head before a worker has joined."""
    log, signs = folder / "events.jsonl", (("instant", "worker_joined"), ("scalar", "step"))
    return log.is_file() and any((e["kind"], e["name"]) in signs for e in events.scan(log))


def _run(recipe: Recipe, folder: Path, console: Console | None) -> None:
    for left in (*folder.glob(".*.failure"), *folder.glob(supervisor.FROZEN_TRAINER)):
        left.unlink()
    auth.make_token(folder / "token")
    auth.make_token(folder / "trainer.secret")
    with console or contextlib.nullcontext():
        try:
            done = asyncio.run(unhandled.guard(supervisor.Supervisor(recipe, folder, console).run()))
        except asyncio.CancelledError:  # by a second Ctrl-C
            raise KeyboardInterrupt from None
    if console is not None:
        console.summary(finished=done)
