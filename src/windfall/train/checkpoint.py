"""Checkpoints: a Hugging Face folder that transformers and vLLM load as it is, plus what a run needs to go on.

    checkpoints/step-000040/
      config.json  model.safetensors  tokenizer files        the model
      windfall/optimizer.safetensors                         float32 masters, Adam's moments, random state
      windfall/state.json                                    step, data position, version
      windfall/checksums.json                                size and xxh3_128 of every other file

A checkpoint is written beside its place, flushed to disk and then renamed, so a folder named step-* was whole when it
was written. What is half-written when a process is killed has another name and is swept away by the next save.

Disks and people change files later, so a checkpoint is verified before a run goes on from it (train/checksums.py).
"""

from __future__ import annotations

import json
import os
import re
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from windfall.errors import WindfallError
from windfall.train import checksums

_PARTIAL = ".partial-"
DAMAGED = "damaged-"
STATE, OPTIMIZER = "windfall/state.json", "windfall/optimizer.safetensors"
_NAME = re.compile(r"step-(\d{6,})")


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointState:
    step: int
    """Steps completed."""
    next_task: int
    """The first task that no completed step has drawn."""


def name(step: int) -> str:
    return f"step-{step:06d}"


def all_in(folder: Path) -> list[Path]:
    """The checkpoints in the folder, oldest first. Whether their files are whole is not checked."""
    found = [(int(m[1]), p) for p in folder.glob("step-*") if (m := _NAME.fullmatch(p.name)) and p.is_dir()]
    return [path for _, path in sorted(found)]


@dataclass(frozen=True, kw_only=True, slots=True)
class Chosen:
    """The newest checkpoint that is whole."""

    path: Path
    state: CheckpointState
    checked: checksums.Checked
    damaged: tuple[checksums.Damaged, ...] = ()
    """Newer checkpoints that are not, newest first."""


def choose(folder: Path, *, optimizer: bool = True) -> Chosen | None:
    """Verify checkpoints from the newest to the oldest; return the first that is whole, or None if there are none.

    `optimizer`: whether the optimizer's state is needed, too. Changes nothing on disk.
    """
    damaged: list[checksums.Damaged] = []
    for path in reversed(all_in(folder)):
        try:
            checked = check(path, optimizer=optimizer)
        except checksums.Damaged as e:
            damaged.append(e)
            continue
        return Chosen(path=path, state=read_state(path), checked=checked, damaged=tuple(damaged))
    left = [p.name for p in folder.glob(f"{DAMAGED}*")]
    if not damaged and not left:
        return None
    raise WindfallError(
        "no checkpoint of this run is whole: "
        + "; ".join([*(d.short for d in damaged), *(f"{name} was set aside before" for name in sorted(left))]),
        where=str(folder),
        fix="Restore one from a copy, or begin again with `windfall train`. checkpoint.keep says how many are kept.",
    )


def check(checkpoint: Path, *, optimizer: bool = True) -> checksums.Checked:
    """Verify the files of one checkpoint and what they say about it. Raises `verify.Damaged`."""
    checked = checksums.check(checkpoint, skip=frozenset() if optimizer else frozenset({OPTIMIZER}))
    name, said = _NAME.fullmatch(checkpoint.name), _read(checkpoint)
    if not checked.hashed and said.get("checksums"):  # not of windfall 0.2: it had some
        raise checksums.Damaged(checkpoint, checksums.CHECKSUMS, "the file is missing")
    if name is not None and said["step"] != int(name[1]):
        raise checksums.Damaged(checkpoint, STATE, f"it says step {said['step']} in the folder of step {int(name[1])}")
    return checked


def set_aside(damaged: checksums.Damaged) -> Path:
    """Rename a damaged checkpoint, so that its step can be saved again. Returns where it is now."""
    path = damaged.checkpoint
    target = path.with_name(f"{DAMAGED}{path.name}")
    for n in range(2, 1000):
        if not target.exists():
            break
        target = path.with_name(f"{DAMAGED}{path.name}-{n}")
    path.rename(target)
    return target


def latest(run: Path, *, optimizer: bool = False) -> Chosen:
    """The newest whole checkpoint of a run, for reading only."""
    chosen = choose(run / "checkpoints", optimizer=optimizer)
    if chosen is None:
        raise WindfallError("no checkpoint in this run", where=str(run), fix="Start it again with `windfall train`.")
    return chosen


def save(folder: Path, state: CheckpointState, *, model: Any, tokenizer: Any, optimizer: Any, keep: int) -> Path:
    """Write, publish by renaming, then drop all but the newest `keep`.

    Raises WindfallError if the disk is full or the folder cannot be written. The checkpoints before stay as they are.
    """
    import torch
    from safetensors import SafetensorError

    final = folder / name(state.step)
    if final.exists():
        return final  # a stop right after a scheduled save
    tensors = optimizer.state() | {"random.cpu": torch.get_rng_state()}
    if model.device.type == "cuda":
        tensors["random.cuda"] = torch.cuda.get_rng_state(model.device)
    work = folder / f"{_PARTIAL}{final.name}"
    try:
        for leftover in folder.glob(f"{_PARTIAL}*"):
            shutil.rmtree(leftover)
        _write(work, state, model, tokenizer, tensors)
        work.rename(final)
        _sync(folder)
    except Exception as e:  # tokenizers raises a bare Exception when the disk is full; other types go on up
        if not isinstance(e, OSError | SafetensorError) and type(e) is not Exception:
            raise
        shutil.rmtree(work, ignore_errors=True)  # half a checkpoint is of no use, and the disk may be full
        raise _unwritten(final, e) from e
    for old in all_in(folder)[:-keep]:
        doomed = folder / f"{_PARTIAL}{old.name}"
        old.rename(doomed)
        shutil.rmtree(doomed)
    return final


def _write(work: Path, state: CheckpointState, model: Any, tokenizer: Any, tensors: dict[str, Any]) -> None:
    """Write all files of a checkpoint and flush them to disk."""
    from safetensors.torch import save_file

    (work / "windfall").mkdir(parents=True)
    model.save_pretrained(work)
    tokenizer.save_pretrained(work)
    save_file(tensors, str(work / OPTIMIZER))
    (work / STATE).write_text(json.dumps(asdict(state) | {"checksums": True}))
    checksums.write_checksums(work)
    for path in work.rglob("*"):
        _sync(path)
    _sync(work)


def _unwritten(final: Path, error: Exception) -> WindfallError:
    """The error for a checkpoint that the disk did not take."""
    before = all_in(final.parent)
    kept = f"which goes on from {before[-1].name}" if before else "which begins again, as there is no checkpoint yet"
    try:
        free = f" ({shutil.disk_usage(final.parent).free / 1e6:,.0f} MB are free there)"
    except OSError:
        free = ""
    fix = (
        f"Free space on that disk{free}, or make the folder writable. Then use `windfall resume`, {kept}. "
        "checkpoint.keep says how many checkpoints are kept."
    )
    said = f"{type(error).__name__}: {error}"
    return WindfallError(f"the checkpoint cannot be written: {said}", where=str(final), fix=fix)


def read_state(checkpoint: Path) -> CheckpointState:
    said = _read(checkpoint)
    return CheckpointState(step=said["step"], next_task=said["next_task"])


def _read(checkpoint: Path) -> dict[str, Any]:
    try:
        said = json.loads((checkpoint / STATE).read_text())
        if not all(type(said[key]) is int and said[key] >= 0 for key in ("step", "next_task")):
            raise ValueError(f"not a state: {said}")
    except (OSError, ValueError, TypeError, KeyError, RecursionError) as e:
        raise checksums.Damaged(checkpoint, STATE, f"it cannot be read: {type(e).__name__}: {e}") from e
    return said


def restore(checkpoint: Path, *, optimizer: Any, device: str) -> CheckpointState:
    """Put optimizer and random state back. The model is loaded from the folder like any other."""
    import torch
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    state = read_state(checkpoint)
    try:
        tensors = load_file(str(checkpoint / OPTIMIZER))
    except (OSError, SafetensorError) as e:
        raise WindfallError(f"the optimizer's state cannot be read: {e}", where=str(checkpoint)) from e
    torch.set_rng_state(tensors.pop("random.cpu"))
    random_cuda = tensors.pop("random.cuda", None)
    if random_cuda is not None and device == "cuda":
        torch.cuda.set_rng_state(random_cuda)
    optimizer.restore(tensors)
    return state


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
