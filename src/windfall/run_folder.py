"""A run's folder: its files, and the locks that say which process may write to it.

runs/NAME/
  recipe.toml  events.jsonl  checkpoints/  journal/        the recipe and the state of the run
  recipe.began.toml  data.began.json                       the recipe and the data files that the run began with
  token  trainer.secret                                    secrets for joining as a worker, or as (a machine of) the
                                                           trainer; owner only
  samples.jsonl                                            a sample of responses for the page ([log] samples)
  address.json  fleet.json                                 where the controller listens; the last state of the fleet
  controller.log  trainer.log  fork_server.log  workers/*.log  logs of the processes
  env.log  env.log.1                                       what the environment prints
  policies/NAME/checkpoints/  policies/NAME/tokenizer/     of each policy, if there are several
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from windfall.errors import WindfallError, describe_exit, describe_write, nearest
from windfall.recipe.env_sections import AgentLimits, DatasetEnv
from windfall.recipe.file import dump_recipe, load_recipe
from windfall.recipe.policies import PolicySection
from windfall.recipe.section_base import Section
from windfall.recipe.sections import ChatSection, Recipe

UNRECORDED = 64
"""Exit status of a process that could not record its error: this number plus the error number of the operating system
(ENOSPC: no space left). Logs may be empty then."""
BEGAN = "recipe.began.toml"
FROZEN_TRAINER = ".trainer.frozen"
"""File by which the controller reports a frozen trainer to the supervisor."""
DATA_BEGAN = "data.began.json"
LOCK_TRY_S = 0.3
"""Minimum seconds to try for a lock: a process that only checks whether it is free holds it for microseconds."""


def named(run: Path) -> Path:
    """The folder of the run that a user means: `demo` is `runs/demo`, unless there is such a folder here."""
    inside = Path("runs") / run
    return inside if len(run.parts) == 1 and not run.exists() and (inside / "recipe.toml").is_file() else run


def recipe_file(run: Path) -> Path:
    """The recipe of the run in this folder. Raises WindfallError if there is no run."""
    check_exists(run)
    if not (run / "recipe.toml").is_file():
        raise WindfallError("not a run: it has no recipe.toml", where=str(run), fix="Give a folder such as runs/demo.")
    return run / "recipe.toml"


def policy_folder(run: Path, policy: str) -> Path:
    """Where the checkpoints and the tokenizer of a policy are: in the run's folder, if that has one policy.

    >>> policy_folder(Path("runs/demo"), "").as_posix(), policy_folder(Path("runs/demo"), "solver").as_posix()
    ('runs/demo', 'runs/demo/policies/solver')
    """
    return run / "policies" / policy if policy else run


def run_of(checkpoint: Path) -> tuple[Path, str]:
    """The folder of the run that a checkpoint is in, and its policy.

    >>> run_of(Path("/runs/two/policies/solver/checkpoints/step-000004"))[1]
    'solver'
    """
    own = checkpoint.resolve().parent.parent
    return (own.parent.parent, own.name) if own.parent.name == "policies" else (own, "")


def trainer_role(base: str) -> str:
    """The name of the trainer of a base: of its process, its log and its lock.

    >>> trainer_role(""), trainer_role("solver")
    ('trainer', 'trainer-solver')
    """
    return f"trainer-{base}" if base else "trainer"


def choose_policy(run: Path, policy: str) -> str:
    """The policy of a run, or a model, that a command is for. Raises WindfallError if there is no such policy, or there
    are several and `policy` names none of them."""
    names = sorted(folder.name for folder in (run / "policies").glob("*"))
    if policy in (names or [""]):
        return policy
    what = f"there is no policy {policy!r}" if policy else "this run has several policies"
    fix = f"Give --policy with one of: {', '.join(names)}." if names else "Leave out --policy."
    raise WindfallError(what, where=str(run), fix=fix)


def check_exists(run: Path) -> None:
    if run.is_file():
        raise WindfallError("this is a file, not a run", where=str(run), fix="Give a folder such as runs/demo.")
    if not run.is_dir():
        beside = {file.parent.as_posix() for file in run.parent.glob("*/recipe.toml")}
        started = {file.parent.name: file.parent.as_posix() for file in Path("runs").glob("*/recipe.toml")}
        near = nearest(started.get(run.name, run.as_posix()), {*beside, *started.values()})
        raise WindfallError("no such run", where=str(run), fix=near or "Give a folder such as runs/demo.")


def initial_recipe(folder: Path) -> Recipe:
    """The recipe that the run began with, or its current recipe if the run was started before this was recorded."""
    path = folder / BEGAN
    if not path.exists():
        return load_recipe(folder / "recipe.toml")
    try:
        return load_recipe(path)
    except WindfallError as e:
        fix = "This is the recipe that the run began with. Restore it, or remove it to use recipe.toml instead."
        raise WindfallError(e.what, where=e.where, fix=fix) from e


def write_recipe(recipe: Recipe, folder: Path) -> None:
    replace(folder / "recipe.toml", dump_recipe(recipe))


def replace(path: Path, text: str) -> None:
    """Write a file atomically: completely or not at all."""
    temporary = path.with_name(f".{path.name}")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(path)


def with_absolute_paths(recipe: Recipe) -> Recipe:
    """Make paths absolute, so that the run can be resumed from any folder. run.folder stays as it is: a run goes on in
    its own folder."""
    changes: dict[str, Any] = {
        name: _resolved(section) for name, section in recipe if isinstance(section, Section) and name != "run"
    }
    changes["chat"] = recipe.chat.with_source()
    if Path(recipe.model.path).is_dir():
        changes["model"] = recipe.model.model_copy(update={"path": str(Path(recipe.model.path).resolve())})
    changes["policies"] = {name: _resolved_policy(own) for name, own in recipe.policies.items()}
    return recipe.model_copy(update=changes)


def _resolved_policy(own: PolicySection) -> PolicySection:
    changes: dict[str, Any] = {"lora": own.lora and _resolved(own.lora)}
    if own.model and Path(own.model).is_dir():
        changes["model"] = str(Path(own.model).resolve())
    if "template" in own.chat:
        changes["chat"] = {**own.chat, "template": ChatSection(template=own.chat["template"]).source() or ""}
    if "path" in own.eval:
        changes["eval"] = {**own.eval, "path": str(Path(own.eval["path"]).resolve())}
    return own.model_copy(update=changes)


def _resolved(section: Section) -> Section:
    changes: dict[str, Any] = {}
    for key, value in section:
        if isinstance(value, Path):
            changes[key] = value.resolve()
        elif isinstance(value, Section):
            changes[key] = _resolved(value)
    if isinstance(section, AgentLimits) and section.directory is None:
        changes["directory"] = Path.cwd().resolve()
    if isinstance(section, DatasetEnv):
        changes["rewards"] = [_with_absolute_file(reward) for reward in section.rewards]
    return section.model_copy(update=changes)


def _with_absolute_file(reward: str) -> str:
    """A reward function "file.py:name" with the absolute path of its file; every other reward unchanged."""
    file, _, name = reward.rpartition(":")
    return f"{Path(file).resolve()}:{name}" if file.endswith(".py") else reward


@contextmanager
def owned(folder: Path, role: str = "", timeout_s: float = 0.0) -> Iterator[None]:
    """Hold the lock for a role of the run (default: the process that runs it). Only one process at a time can hold it.
    It is released when the process ends, however it ends."""
    try:
        opened = _lock_file(folder, role).open("w")
    except OSError as e:
        fix = "Make the folder of the run writable. If something else is at the path of the lock file, remove it."
        raise WindfallError(f"cannot lock the run: {describe_write(e, folder)}", where=str(e.filename), fix=fix) from e
    with opened as lock:
        deadline = time.monotonic() + max(LOCK_TRY_S, timeout_s)
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError:
                if time.monotonic() >= deadline:
                    what = f"another process is already {f'its {role}' if role else 'running it'}"
                    raise WindfallError(what, where=str(folder), fix="Stop it first.") from None
                time.sleep(0.05)
        yield


def held(folder: Path, role: str = "") -> bool:
    """Whether a process holds the lock for this role of the run (default: the process that runs it)."""
    try:
        with _lock_file(folder, role).open("rb") as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)  # shared: two processes can check at the same time
            return False
    except FileNotFoundError:
        return False
    except OSError:
        return True


def _lock_file(folder: Path, role: str) -> Path:
    return folder / f".{role or 'run'}.lock"


def keep_newest(folder: Path, count: int, spare: set[str]) -> None:
    """Remove all files except those in `spare` and the newest `count` of the others."""
    files = [p for p in folder.iterdir() if p.name not in spare and p.is_file()]
    files.sort(key=lambda p: p.stat().st_mtime)
    for path in files[: max(0, len(files) - count)]:
        path.unlink(missing_ok=True)


def read_json(path: Path) -> dict[str, Any] | None:
    """Read a JSON object. None if the file is missing or holds something else."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def address(folder: Path) -> dict[str, Any] | None:
    """Where the controller listens, or listened last: `url`, `port` and `pid`. None if the file is not usable."""
    value = read_json(folder / "address.json") or {}
    url, port = value.get("url"), value.get("port")
    valid_url = isinstance(url, str) and url.startswith(("http://", "https://"))
    return value if valid_url and type(port) is int and 0 < port < 1 << 16 else None


def fail(folder: Path, role: str, error: WindfallError, status: int = 1, *, first: bool = False) -> int:
    """Record the error that ends this process, so that the supervisor can show it. Returns the exit status: `status`,
    or another one if nothing can be written to the folder. `first`: keep an error that another process of this role has
    already recorded, because this one follows from it."""
    fields = {"role": role, "what": error.what, "where": error.where, "fix": error.fix}
    path = folder / f".{role}.failure"
    try:
        if not first:
            replace(path, json.dumps(fields))
            return status
        own = path.with_name(f"{path.name}.{os.getpid()}")
        own.write_text(json.dumps(fields), encoding="utf-8")
        with contextlib.suppress(FileExistsError):
            path.hardlink_to(own)
        own.unlink()
        return status
    except OSError as e:
        print(f"error: {error}", file=sys.stderr)  # the process's log may still have room
        return UNRECORDED + (e.errno or 0)


def failure(folder: Path, role: str, code: int, who: str = "") -> WindfallError:
    """The error that a process recorded before it ended with this status. Without a record: why nothing can be written
    to the folder, or else the end of the log of the process. `who`: which one ended, if there are several with this
    role."""
    log = folder / f"{who or role}.log"
    fields = read_json(folder / f".{role}.failure")
    if fields is not None and fields.get("what"):
        return WindfallError(str(fields["what"]), where=str(fields.get("where", "")), fix=str(fields.get("fix", "")))
    cause = OSError(code - UNRECORDED, os.strerror(code - UNRECORDED)) if code > UNRECORDED else _try_write(folder)
    if cause is not None:
        what = f"the {who or role} ended because nothing can be written here: {describe_write(cause, folder)}"
        fix = "Free disk space or make the folder writable; then continue with `windfall resume`."
        return WindfallError(what, where=str(folder), fix=fix)
    try:
        tail = "\n".join(log.read_text(errors="replace").splitlines()[-8:])
    except OSError:
        tail = ""
    return WindfallError(f"the {who or role} {describe_exit(code)}", where=str(log), fix=tail)


def _try_write(folder: Path) -> OSError | None:
    path = folder / ".room"
    try:
        with path.open("wb") as file:
            file.write(bytes(4096))
            os.fsync(file.fileno())
    except OSError as e:
        return e
    finally:
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)
    return None
