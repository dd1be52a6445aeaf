"""A run's folder: who may write to it, and what is where.

runs/NAME/
  recipe.toml  events.jsonl  checkpoints/  journal/       what the run is, and all it knows
  recipe.began.toml  data.began.json                      the recipe and the data files that the run began with
  token  trainer.secret                                   for joining, as a worker or as the trainer; for its owner only
  address.json  fleet.json                                where the controller listens; the fleet as it was last
  controller.log  trainer.log  nursery.log  workers/*.log what the processes said
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import xxhash

from windfall import config
from windfall.config import Recipe
from windfall.errors import WindfallError

BEGAN = "recipe.began.toml"
DATA_BEGAN = "data.began.json"
DATA_BLOCK = 1 << 20
LOOK_S = 0.3
"""A lock is tried for so long at least: somebody may just be looking whether it is held, which takes microseconds."""


def new_folder(recipe: Recipe) -> Path:
    """runs/name, or runs/name-2, -3, ... when that is taken: a run never writes into another."""
    recipe = anchored(recipe)
    data = json.dumps(_data(recipe))
    wanted = recipe.run.folder / recipe.run.name
    for n in range(1, 10_000):
        folder = wanted if n == 1 else wanted.with_name(f"{wanted.name}-{n}")
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            continue
        except OSError as e:
            raise WindfallError(f"cannot make the run's folder: {e}", where=str(folder), fix="Set run.folder.") from e
        try:
            write_recipe(recipe, folder)
            replace(folder / BEGAN, config.dump(recipe))
            replace(folder / DATA_BEGAN, data)
        except OSError as e:
            remove(folder)
            fix = "Make room, or set run.folder."
            raise WindfallError(f"cannot write the recipe: {e.strerror or e}", where=str(folder), fix=fix) from e
        return folder
    raise WindfallError("ten thousand runs of this name exist", where=str(wanted), fix="Set run.name.")


def remove(folder: Path) -> None:
    """Take back what `new_folder` made."""
    shutil.rmtree(folder, ignore_errors=True)
    with contextlib.suppress(OSError):  # other runs are in it
        folder.parent.rmdir()


def began(folder: Path) -> Recipe:
    """The recipe that the run began with. A run that is older than this record has the one of its last life."""
    path = folder / BEGAN
    if not path.exists():
        return config.load(folder / "recipe.toml")
    try:
        return config.load(path)
    except WindfallError as e:
        fix = "This is the recipe that the run began with. Put it back; without this file, recipe.toml is taken for it."
        raise WindfallError(e.what, where=e.where, fix=fix) from e


def check_data(recipe: Recipe, folder: Path) -> None:
    """Refuses data files that do not hold what they held when the run began: the task of every index follows from
    their rows. A run that is older than this record gets one of the files as they are now."""
    now, path = _data(recipe), folder / DATA_BEGAN
    if not path.exists():
        try:
            replace(path, json.dumps(now))
        except OSError as e:
            raise WindfallError(f"cannot record the data files: {e.strerror or e}", where=str(path)) from e
        return
    began = read_json(path)
    if began is None or not all(
        isinstance(was, dict) and {*was} >= {"file", "bytes", "xxh3"} for was in began.values()
    ):
        fix = "Put it back, or remove it: the data files as they are now are then taken for those of the run."
        raise WindfallError("the record of the run's data files is damaged", where=str(path), fix=fix)
    changed = [_data_change(key, began[key], now[key]) for key in began if key in now and _differ(began[key], now[key])]
    if changed:
        what = "\n  ".join(["the data is not what this run began with:", *changed])
        fix = "Restore the file as it was and resume, or start a new run with it: windfall train RECIPE.toml"
        raise WindfallError(what, where=str(folder), fix=fix)


def data_warnings(folder: Path) -> list[str]:
    """For a run that has data files and no record of what they held when it began."""
    if (folder / DATA_BEGAN).exists() or not isinstance(began(folder).env, config.JsonLinesEnv):
        return []
    return [f"{folder / DATA_BEGAN}: missing; the data files as they are now are taken for those the run began with"]


def _differ(was: dict[str, Any], now: dict[str, Any]) -> bool:
    return (was["bytes"], was["xxh3"]) != (now["bytes"], now["xxh3"])


def _data_change(key: str, was: dict[str, Any], now: dict[str, Any]) -> str:
    path = Path(now["file"])
    how = f"{was['bytes']:,} bytes before, {now['bytes']:,} now"
    if now["bytes"] == was["bytes"]:
        how = "as long as before, with other contents"
    elif now["bytes"] > was["bytes"] and _digest(key, path, was["bytes"])["xxh3"] == was["xxh3"]:
        how = f"{now['bytes'] - was['bytes']:,} bytes were added at its end, which changes the order of its rows"
    place = f"{path} instead of {was['file']}" if now["file"] != was["file"] else str(path)
    return f"{key}: {place}: {how}"


def _data(recipe: Recipe) -> dict[str, dict[str, Any]]:
    """What is in each data file that the recipe names, by its key."""
    if not isinstance(recipe.env, config.JsonLinesEnv):
        return {}
    files = {"env.path": recipe.env.path, "env.eval_path": recipe.env.eval_path}
    return {key: _digest(key, path) for key, path in files.items() if path is not None}


def _digest(key: str, path: Path, most: int | None = None) -> dict[str, Any]:
    """Of the file, or of its first so many bytes."""
    digest, size = xxhash.xxh3_128(), 0
    try:
        with path.open("rb") as file:
            while block := file.read(DATA_BLOCK if most is None else min(DATA_BLOCK, most - size)):
                digest.update(block)
                size += len(block)
    except OSError as e:
        fix = "Restore the file, or correct its path."
        raise WindfallError(f"cannot read the data file: {e.strerror or e}", where=f"{key} = {path}", fix=fix) from e
    return {"file": str(path), "bytes": size, "xxh3": digest.hexdigest()}


def write_recipe(recipe: Recipe, folder: Path) -> None:
    """What the run goes by from now on."""
    replace(folder / "recipe.toml", config.dump(recipe))


def replace(path: Path, text: str) -> None:
    """Written whole or not at all."""
    work = path.with_name(f".{path.name}")
    work.write_text(text, encoding="utf-8")
    work.replace(path)


def anchored(recipe: Recipe) -> Recipe:
    """Paths that exist made absolute: a run is resumed from any folder."""
    changes: dict[str, Any] = {}
    if Path(recipe.model.path).is_dir():
        changes["model"] = recipe.model.model_copy(update={"path": str(Path(recipe.model.path).resolve())})
    if isinstance(recipe.env, config.JsonLinesEnv):
        own = recipe.env.eval_path.resolve() if recipe.env.eval_path is not None else None
        changes["env"] = recipe.env.model_copy(update={"path": recipe.env.path.resolve(), "eval_path": own})
    if recipe.trace.file is not None:
        changes["trace"] = recipe.trace.model_copy(update={"file": recipe.trace.file.resolve()})
    if recipe.fleet.tls_cert is not None and recipe.fleet.tls_key is not None:
        files = {"tls_cert": recipe.fleet.tls_cert.resolve(), "tls_key": recipe.fleet.tls_key.resolve()}
        changes["fleet"] = recipe.fleet.model_copy(update=files)
    return recipe.model_copy(update=changes)


@contextmanager
def owned(folder: Path, role: str = "", timeout_s: float = 0.0) -> Iterator[None]:
    """Only one process at a time may be this role of a run. The lock ends with the process, however it ends."""
    try:
        opened = _lock(folder, role).open("w")
    except OSError as e:
        fix = "A run writes to its folder: make it writable, and move away what is in the way."
        raise WindfallError(f"cannot lock the run: {e.strerror or e}", where=str(e.filename), fix=fix) from e
    with opened as lock:
        give_up = time.monotonic() + max(LOOK_S, timeout_s)
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError:
                if time.monotonic() >= give_up:
                    what = f"another process is this run's {role}" if role else "another process is running this"
                    raise WindfallError(what, where=str(folder), fix="Stop it first.") from None
                time.sleep(0.05)
        yield


def held(folder: Path, role: str = "") -> bool:
    """Is there a process that is this role of the run; by default, that runs it?"""
    try:
        with _lock(folder, role).open("rb") as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)  # shared: those who look do not see each other
            return False
    except FileNotFoundError:
        return False
    except OSError:
        return True


def _lock(folder: Path, role: str) -> Path:
    return folder / f".{role or 'run'}.lock"


def keep_newest(folder: Path, most: int, spare: set[str]) -> None:
    """Of the files in it, without those to be spared, only the newest so many are kept."""
    files = [p for p in folder.iterdir() if p.name not in spare and p.is_file()]
    files.sort(key=lambda p: p.stat().st_mtime)
    for path in files[: max(0, len(files) - most)]:
        path.unlink(missing_ok=True)


def read_json(path: Path) -> dict[str, Any] | None:
    """None: it is not there, or not yet; or it is no JSON object."""
    try:
        said = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    return said if isinstance(said, dict) else None


def address(folder: Path) -> dict[str, Any] | None:
    """Where the controller listens, or listened last: `url`, `port` and `pid`. None: nothing that can be used."""
    said = read_json(folder / "address.json") or {}
    url, port = said.get("url"), said.get("port")
    right = isinstance(url, str) and url.startswith(("http://", "https://"))
    return said if right and type(port) is int and 0 < port < 1 << 16 else None


def fail(folder: Path, role: str, error: WindfallError) -> None:
    """Leave word of what a person can put right; the supervisor shows it."""
    said = {"role": role, "what": error.what, "where": error.where, "fix": error.fix}
    try:
        replace(folder / f".{role}.failure", json.dumps(said))
    except OSError:  # no room even for this: the process's log may have some left
        print(f"error: {error}", file=sys.stderr)


def failure(folder: Path, role: str, code: int) -> WindfallError:
    """What a process that ended with this status left word of; else the end of its log."""
    log = folder / f"{role}.log"
    said = read_json(folder / f".{role}.failure")
    if said is not None and said.get("what"):
        return WindfallError(str(said["what"]), where=str(said.get("where", "")), fix=str(said.get("fix", "")))
    try:
        tail = "\n".join(log.read_text(errors="replace").splitlines()[-8:])
    except OSError:
        tail = ""
    return WindfallError(f"the {role} ended with status {code}", where=str(log), fix=tail)
