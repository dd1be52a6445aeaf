"""Checkpoints: a Hugging Face folder that transformers and vLLM can load, plus the state to resume a run.

    checkpoints/step-000040/
      config.json  model.safetensors  tokenizer files        the model
      windfall/optimizer.safetensors                         float32 masters, Adam's moments
      windfall/state.json                                    format, step, data position, version
      windfall/checksums.json                                size and xxh3_128 of every other file

If the run trains adapters, adapter_config.json and adapter_model.safetensors (PEFT) take the place of the model.
state.json then names the base model and has a digest of its weights, because the adapter is useless with any other.

A checkpoint is written under another name, flushed to disk and then renamed, so a folder named step-* was complete when
it was written. A partial checkpoint of a killed process has another name and is deleted by the next save.

Disks and people change files later, so a checkpoint is verified before a run resumes from it; damage is an error:

    windfall/checksums.json    {"algorithm": "xxh3_128", "files": {"config.json": {"bytes": 698, "hash": "..."}, ...}}
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shlex
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from windfall import run_folder as folders
from windfall.errors import WindfallError, newer_format
from windfall.recipe.file import load_recipe
from windfall.training import CheckpointState
from windfall.weights import adapter_folder
from windfall.weights.adapter_folder import STATE, AdapterBase

FORMAT = 1
"""Version of the format of checkpoints. Change it when an older windfall could not resume from what this one writes.
Checkpoints of 0.3 have no number: they have format 1."""
_PARTIAL = ".partial-"
OPTIMIZER = "windfall/optimizer.safetensors"
_NAME = re.compile(r"step-(\d{6,})")
_BASE_KEYS = {"path", "dtype", "digest"}
_LISTS = ("open_tasks", "replay", "selection")
CHECKSUMS = "windfall/checksums.json"
_ALGORITHM = "xxh3_128"
FROM_JOURNAL = "starts again from step 1, with the responses that the journal still has"
"""What a resumed run without a checkpoint does."""
_MODEL, _ADAPTER = "config.json", "adapter_config.json"


class DamagedCheckpoint(WindfallError):
    """A file of a checkpoint is missing or was changed. It is for a person to decide whether to lose its steps."""

    def __init__(self, checkpoint: Path, file: str, why: str) -> None:
        found = list_checkpoints(checkpoint.parent)
        older = found[: found.index(checkpoint)] if checkpoint in found else []
        goes_on = f"continues from {older[-1].name}" if older else FROM_JOURNAL
        fix = f"Restore the file from a copy, or remove {checkpoint}: `windfall resume` then {goes_on}."
        super().__init__(f"damaged: {why}", where=str(checkpoint / file), fix=fix)


def name(step: int) -> str:
    return f"step-{step:06d}"


def step_of(checkpoint: Path) -> int:
    """
    >>> step_of(Path("checkpoints") / name(40))
    40
    """
    return int(checkpoint.name.removeprefix("step-"))


def list_checkpoints(folder: Path) -> list[Path]:
    """The checkpoints in the folder, oldest first. Their files are not verified."""
    return sorted((p for p in folder.glob("step-*") if _NAME.fullmatch(p.name) and p.is_dir()), key=step_of)


@dataclass(frozen=True, kw_only=True, slots=True)
class VerifiedCheckpoint:
    path: Path
    state: CheckpointState


def newest(folder: Path, *, optimizer: bool = True) -> VerifiedCheckpoint | None:
    """The newest checkpoint, after its files were verified; None if there is none. `optimizer`: verify the optimizer's
    state, too."""
    found = list_checkpoints(folder)
    if not found:
        return None
    check(found[-1], optimizer=optimizer)
    return VerifiedCheckpoint(path=found[-1], state=read_state(found[-1]))


def check(checkpoint: Path, *, optimizer: bool = True) -> None:
    """Verify the files of one checkpoint and its state. Raises `DamagedCheckpoint`."""
    listed = {n: e for n, e in _listed(checkpoint, optimizer).items() if optimizer or n != OPTIMIZER}
    for file, (size, _) in listed.items():  # sizes first: they are cheap to check
        if not (checkpoint / file).is_file():
            raise DamagedCheckpoint(checkpoint, file, "the file is missing")
        if (found := (checkpoint / file).stat().st_size) != size:
            raise DamagedCheckpoint(checkpoint, file, f"it has {found:,} bytes, but was written with {size:,}")
    try:
        hashes = _hashes([checkpoint / file for file in listed])
    except OSError as e:
        file = Path(e.filename).relative_to(checkpoint).as_posix() if e.filename else ""
        raise DamagedCheckpoint(checkpoint, file, f"it cannot be read: {e.strerror or e}") from e
    for (file, (_, digest)), found in zip(listed.items(), hashes, strict=True):
        if found != digest:
            raise DamagedCheckpoint(checkpoint, file, f"its checksum is {found}, but was {digest} when it was written")
    name, state = _NAME.fullmatch(checkpoint.name), _read(checkpoint)
    if name is not None and state["step"] != int(name[1]):
        why = f"it says step {state['step']} in the folder of step {int(name[1])}"
        raise DamagedCheckpoint(checkpoint, STATE, why)


def latest(run: Path, policy: str = "") -> VerifiedCheckpoint:
    """The newest checkpoint of a run, or of one of its policies if it has several, for reading only."""
    folder = folders.policy_folder(run, policy)
    found = newest(folder / "checkpoints", optimizer=False)
    if found is None:
        fix = f"Continue the run: windfall resume {shlex.quote(str(run))}"
        if folders.held(run):
            recipe = load_recipe(folders.recipe_file(run))
            first = min(recipe.checkpoint.every, recipe.run.steps)
            fix = f"The run goes on, and saves the first one after step {first} (checkpoint.every)."
        raise WindfallError(f"no checkpoint in this {'policy' if policy else 'run'}", where=str(folder), fix=fix)
    return found


def save(
    folder: Path,
    state: CheckpointState,
    *,
    write_model: Callable[[Path], Any],
    tokenizer: Any,
    write_optimizer: Callable[[Path], None],
    keep: int,
    base: AdapterBase | None = None,
) -> Path:
    """Write a checkpoint, rename it into place, then delete all but the newest `keep`. Raises WindfallError and changes
    no earlier checkpoint if the disk is full or the folder is not writable. `write_model` writes a model or the adapter
    of `base`, into a folder; `write_optimizer` writes the state of the optimizer into a file."""
    from safetensors import SafetensorError

    final = folder / name(state.step)
    if final.exists():
        return final  # the run stops right after a scheduled save
    work = folder / f"{_PARTIAL}{final.name}"
    try:
        for leftover in folder.glob(f"{_PARTIAL}*"):
            shutil.rmtree(leftover)
        fields = {"format": FORMAT, **asdict(state), **({"base": asdict(base)} if base else {})}
        _write(work, fields, write_model, tokenizer, write_optimizer)
        work.rename(final)
        _sync(folder)
    except Exception as e:  # tokenizers raises a bare Exception when the disk is full; other types propagate
        if not isinstance(e, OSError | SafetensorError) and type(e) is not Exception:
            raise
        shutil.rmtree(work, ignore_errors=True)  # a partial checkpoint is useless, and the disk may be full
        raise _unwritten(final, e) from e
    for old in list_checkpoints(folder)[:-keep]:
        _remove(old)
    return final


def save_adapter(
    path: Path,
    *,
    write_model: Callable[[Path], Any],
    write_optimizer: Callable[[Path], None] | None,
    base: AdapterBase,
) -> Path:
    """Write an adapter of this base into a folder of its own, with the state of its optimizer if `write_optimizer` is
    given. If the folder is there already, it must have the same contents. The folder is complete, or is not there."""
    from safetensors import SafetensorError

    work, step = path.with_name(f"{_PARTIAL}{path.name}"), step_of(path) if _NAME.fullmatch(path.name) else 0
    fields = {"format": FORMAT, "step": step, "next_task": 0, "base": asdict(base)}
    try:
        if work.exists():
            shutil.rmtree(work)
        _write(work, fields, write_model, None, write_optimizer)
        if path.exists():
            if not (path / CHECKSUMS).is_file() or (path / CHECKSUMS).read_bytes() != (work / CHECKSUMS).read_bytes():
                what = "the folder is there already, with other contents"
                raise WindfallError(what, where=str(path), fix="Save into another folder.")
            shutil.rmtree(work)
            return path
        work.rename(path)
        _sync(path.parent)
    except (OSError, SafetensorError) as e:
        shutil.rmtree(work, ignore_errors=True)
        fix = "Free space on that disk, or make the folder writable, and save again."
        raise WindfallError(f"the adapter cannot be written: {type(e).__name__}: {e}", where=str(path), fix=fix) from e
    except WindfallError:  # raised again
        shutil.rmtree(work, ignore_errors=True)
        raise
    return path


def remove_after(folder: Path, step: int) -> None:
    """Delete the checkpoints of later steps."""
    for path in list_checkpoints(folder):
        if step_of(path) > step:
            _remove(path)


def _remove(checkpoint: Path) -> None:
    removed = checkpoint.parent / f"{_PARTIAL}{checkpoint.name}"
    checkpoint.rename(removed)
    shutil.rmtree(removed)


def no_optimizer(path: Path) -> None:
    """Writes the state of the optimizer of a policy that is not trained."""
    from safetensors.numpy import save_file

    save_file({"updates": np.zeros((), np.int64)}, path)


def _write(
    work: Path,
    state: dict[str, Any],
    write_model: Callable[[Path], Any],
    tokenizer: Any,
    write_optimizer: Callable[[Path], None] | None,
) -> None:
    """Write all files of a checkpoint and flush them to disk. An adapter of a slot has no tokenizer, and may have no
    optimizer."""
    (work / "windfall").mkdir(parents=True)
    write_model(work)
    if tokenizer is not None:
        tokenizer.save_pretrained(work)
    if write_optimizer is not None:
        write_optimizer(work / OPTIMIZER)
    (work / STATE).write_text(json.dumps(state))
    write_checksums(work)
    for path in work.rglob("*"):
        _sync(path)
    _sync(work)


def _unwritten(final: Path, error: Exception) -> WindfallError:
    """The error for a checkpoint that could not be written."""
    before = list_checkpoints(final.parent)
    goes_on = f"continues from {before[-1].name}" if before else FROM_JOURNAL
    try:
        free = f" ({shutil.disk_usage(final.parent).free / 1e6:,.0f} MB are free there)"
    except OSError:
        free = ""
    fix = (
        f"Free space on that disk{free}, or make the folder writable. Then use `windfall resume`, which {goes_on}. "
        "checkpoint.keep sets how many checkpoints are kept."
    )
    why = f"{type(error).__name__}: {error}"
    return WindfallError(f"the checkpoint cannot be written: {why}", where=str(final), fix=fix)


def read_state(checkpoint: Path) -> CheckpointState:
    s = _read(checkpoint)
    lists = {key: tuple(s.get(key, ())) for key in _LISTS}
    return CheckpointState(step=s["step"], next_task=s["next_task"], **lists)


def read_base(checkpoint: Path) -> AdapterBase | None:
    """The base model of the adapter in this checkpoint; None if the checkpoint holds a whole model."""
    _read(checkpoint)  # raises if the state cannot be read, so that None has one meaning
    return adapter_folder.read_base(checkpoint)


def _read(checkpoint: Path) -> dict[str, Any]:
    try:
        state = json.loads((checkpoint / STATE).read_text())
        if type(number := state.get("format", 1)) is not int or number < 1:
            raise ValueError(f"not a format: {number!r}")
        if number > FORMAT:
            raise newer_format("the checkpoint", number, FORMAT, checkpoint / STATE)
        if not all(type(state[key]) is int and state[key] >= 0 for key in ("step", "next_task")):
            raise ValueError(f"not a state: {state}")
        for key in _LISTS:
            limit = 1 << 56 if key == "selection" else state["next_task"]
            if not all(type(number) is int and 0 <= number < limit for number in state.get(key, ())):
                raise ValueError(f"not numbers of {key}: {state[key]}")
        base = state.get("base", dict.fromkeys(_BASE_KEYS, ""))
        if base.keys() != _BASE_KEYS or not all(type(value) is str for value in base.values()):
            raise ValueError(f"not a base model: {base}")
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as e:
        raise DamagedCheckpoint(checkpoint, STATE, f"it cannot be read: {type(e).__name__}: {e}") from e
    return state


def write_checksums(checkpoint: Path) -> None:
    """Write the checksums of all files. This must be the last file to be written."""
    files = sorted(p for p in checkpoint.rglob("*") if p.is_file())
    listed = {
        path.relative_to(checkpoint).as_posix(): {"bytes": path.stat().st_size, "hash": digest}
        for path, digest in zip(files, _hashes(files), strict=True)
    }
    (checkpoint / CHECKSUMS).write_text(json.dumps({"algorithm": _ALGORITHM, "files": listed}, indent=1))


def _listed(checkpoint: Path, optimizer: bool) -> dict[str, tuple[int, str]]:
    if not (checkpoint / CHECKSUMS).exists():
        raise DamagedCheckpoint(checkpoint, CHECKSUMS, "the file is missing")
    try:
        content = json.loads((checkpoint / CHECKSUMS).read_text())
        if content["algorithm"] != _ALGORITHM:
            raise ValueError(f"unknown algorithm {content['algorithm']!r}")
        listed = {str(name): (int(e["bytes"]), str(e["hash"])) for name, e in content["files"].items()}
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as e:
        raise DamagedCheckpoint(checkpoint, CHECKSUMS, f"it cannot be read: {type(e).__name__}: {e}") from e
    needed = (_ADAPTER if _ADAPTER in listed else _MODEL, *((OPTIMIZER,) if optimizer else ()), STATE)
    missing = [name for name in needed if name not in listed]
    if missing:
        raise DamagedCheckpoint(checkpoint, CHECKSUMS, f"it does not list {missing[0]}")
    return listed


def _hashes(files: list[Path]) -> list[str]:
    """The hash of each file. xxhash releases the GIL, so files are hashed in parallel."""

    def hashed(path: Path) -> str:
        with path.open("rb") as file:
            return hashlib.file_digest(file, xxhash.xxh3_128).hexdigest()  # pyright: ignore[reportArgumentType]

    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as threads:
        return list(threads.map(hashed, files))


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
