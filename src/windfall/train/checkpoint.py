"""Checkpoints: a Hugging Face folder that transformers and vLLM load as it is, plus what a run needs to go on.

    checkpoints/step-000040/
      config.json  model.safetensors  tokenizer files        the model
      windfall/optimizer.safetensors                         float32 masters, Adam's moments, random state
      windfall/state.json                                    step, data position, version

A checkpoint is written beside its place, flushed to disk and then renamed, so a folder named step-* is always whole.
What is half-written when a process is killed has another name and is swept away by the next save.
"""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from windfall.errors import WindfallError

_PARTIAL = ".partial-"


@dataclass(frozen=True, kw_only=True, slots=True)
class State:
    step: int
    """Steps completed."""
    next_task: int
    """The first task that no completed step has drawn."""


def name(step: int) -> str:
    return f"step-{step:06d}"


def all_in(folder: Path) -> list[Path]:
    """Whole checkpoints, oldest first."""
    return sorted(p for p in folder.glob("step-*") if p.is_dir())


def latest(run: Path) -> Path:
    found = all_in(run / "checkpoints")
    if not found:
        raise WindfallError("no checkpoint in this run", where=str(run), fix="Start it again with `windfall train`.")
    return found[-1]


def save(folder: Path, state: State, *, model: Any, tokenizer: Any, optimizer: Any, keep: int) -> Path:
    """Write, publish by renaming, then drop all but the newest `keep`."""
    import torch
    from safetensors.torch import save_file

    final = folder / name(state.step)
    if final.exists():
        return final  # a stop right after a scheduled save
    folder.mkdir(parents=True, exist_ok=True)
    for leftover in folder.glob(f"{_PARTIAL}*"):
        shutil.rmtree(leftover)
    work = folder / f"{_PARTIAL}{final.name}"
    (work / "windfall").mkdir(parents=True)
    model.save_pretrained(work)
    tokenizer.save_pretrained(work)
    tensors = optimizer.state() | {"random.cpu": torch.get_rng_state()}
    if model.device.type == "cuda":
        tensors["random.cuda"] = torch.cuda.get_rng_state(model.device)
    save_file(tensors, str(work / "windfall" / "optimizer.safetensors"))
    (work / "windfall" / "state.json").write_text(json.dumps(asdict(state)))
    for path in work.rglob("*"):
        _sync(path)
    _sync(work)
    work.rename(final)
    _sync(folder)
    for old in all_in(folder)[:-keep]:
        doomed = folder / f"{_PARTIAL}{old.name}"
        old.rename(doomed)
        shutil.rmtree(doomed)
    return final


def read_state(checkpoint: Path) -> State:
    path = checkpoint / "windfall" / "state.json"
    try:
        return State(**json.loads(path.read_text()))
    except (OSError, ValueError, TypeError) as e:
        raise WindfallError(f"not a windfall checkpoint: {e}", where=str(checkpoint)) from e


def restore(checkpoint: Path, *, optimizer: Any, device: str) -> State:
    """Put optimizer and random state back. The model is loaded from the folder like any other."""
    import torch
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    state = read_state(checkpoint)
    try:
        tensors = load_file(str(checkpoint / "windfall" / "optimizer.safetensors"))
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
