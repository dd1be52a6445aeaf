"""`windfall export`: the model of a run as a folder of its own, in Hugging Face format.

    a run that trains all weights    the model files of its newest intact checkpoint, copied
    a run that trains adapters       the base model with the newest intact adapter merged into it, in the run's dtype

A checkpoint, or any adapter in PEFT format, can be exported in the same way. The folder is written under another name
and renamed when it is complete and was read back: an existing folder is never changed, and a failed export leaves
nothing behind.
"""

from __future__ import annotations

import math
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from windfall import run_folder as folders
from windfall.errors import WindfallError
from windfall.models import load
from windfall.trainer import checkpoint
from windfall.weights import adapter_folder


@dataclass(frozen=True, kw_only=True, slots=True)
class Exported:
    folder: Path
    source: Path
    adapter: adapter_folder.AdapterConfig | None
    parameters: int
    dtype: str
    nbytes: int
    damaged: tuple[str, ...] = ()
    """Newer checkpoints that were skipped because they are damaged."""

    def __str__(self) -> str:
        made = f"a copy of {self.source}"
        if self.adapter is not None:
            made = f"{self.adapter.base} with the adapter {self.source} (rank {self.adapter.rank}) merged into it"
        size = f"{self.parameters / 1e6:,.1f} M parameters, {self.dtype}, {self.nbytes / 1e6:,.1f} MB"
        return f"wrote {self.folder}: {made}; {size}; read back and found equal"


def export(source: Path, out: Path | None) -> Exported:
    """Write the model of a run, a checkpoint or an adapter. `out`: a folder that does not exist yet; by default
    `exports/STEP` in the run's folder, or `SOURCE-merged` beside an adapter that belongs to no run."""
    path, damaged = _find(source)
    run = path.absolute().parent.parent
    folder = out or (run / "exports" / path.name if _is_run(run) else path.with_name(f"{path.name}-merged"))
    if folder.exists():
        raise WindfallError("this already exists", where=str(folder), fix="Name another folder as OUT.")
    work = folder.with_name(f".partial-{folder.name}")
    shutil.rmtree(work, ignore_errors=True)  # of an export that was killed
    try:
        work.mkdir(parents=True)
        adapter = _write_merged(path, work) if adapter_folder.is_adapter(path) else _copy(path, work)
        parameters, dtype = _read_sizes(work)
        work.rename(folder)
    except OSError as e:
        fix = "Free disk space, or name another folder as OUT."
        raise WindfallError(f"cannot write the model: {e}", where=str(folder), fix=fix) from e
    finally:
        shutil.rmtree(work, ignore_errors=True)
    nbytes = sum(p.stat().st_size for p in folder.rglob("*") if p.is_file())
    return Exported(
        folder=folder, source=path, adapter=adapter, parameters=parameters, dtype=dtype, nbytes=nbytes, damaged=damaged
    )


def _find(source: Path) -> tuple[Path, tuple[str, ...]]:
    """The checkpoint or adapter to export, and the damaged checkpoints that are newer."""
    if _is_run(source):
        found = checkpoint.latest(source)
        return found.path, tuple(d.short for d in found.damaged)
    if (source / checkpoint.STATE).is_file():
        checkpoint.check(source, optimizer=False)
    elif not adapter_folder.is_adapter(source):
        folders.check_exists(source)
        fix = "Give the folder of a run, of a checkpoint, or of an adapter in PEFT format."
        raise WindfallError("nothing to export here", where=str(source), fix=fix)
    return source, ()


def _is_run(folder: Path) -> bool:
    return (folder / "recipe.toml").is_file()


def _copy(path: Path, work: Path) -> None:
    """Copy the model files of a checkpoint, and compare the copies with the originals. The state of the run, which is
    in a folder, is left out."""
    for file in sorted(path.iterdir()):
        if file.is_file():
            shutil.copyfile(file, work / file.name)
            if _digest(work / file.name) != _digest(file):
                raise WindfallError("the copy differs from the original", where=str(file), fix="Check the disk.")


def _digest(file: Path) -> str:
    with file.open("rb") as data:
        state = xxhash.xxh3_128()
        while block := data.read(8 << 20):
            state.update(block)
    return state.hexdigest()


def _write_merged(path: Path, work: Path) -> adapter_folder.AdapterConfig:
    """Write the base with the adapter merged into it, and compare what was written with what was computed."""
    base = adapter_folder.read_base(path)
    dtype = _dtype_of(load.adapter_base(path)) if base is None else base.dtype
    model = load.load(str(path), dtype=dtype, device="cpu")
    model.save_pretrained(work)
    load.load_tokenizer(str(path)).save_pretrained(work)
    back = load.load(str(work), dtype=dtype, device="cpu").state_dict()
    for name, t in model.state_dict().items():
        if not _same(t, back.get(name)):
            what = f"{name!r} was written, but reads back differently"
            raise WindfallError(what, where=str(work), fix="Check the disk, and export again.")
    return adapter_folder.read_config(path)


def _dtype_of(model: str) -> str:
    """The dtype of a model's files, as far as its configuration says."""
    from transformers import AutoConfig

    return str(AutoConfig.from_pretrained(load.fetch(model)).dtype or "float32").removeprefix("torch.")


def _same(t: Any, other: Any) -> bool:
    import torch

    return other is not None and t.shape == other.shape and torch.equal(t, other)


def _read_sizes(work: Path) -> tuple[int, str]:
    """Number of parameters and dtype of a written model, from the headers of its files."""
    from safetensors import safe_open

    count, dtypes = 0, set[str]()
    for path in work.glob("*.safetensors"):
        with safe_open(str(path), framework="np") as file:
            for name in file.keys():  # noqa: SIM118 (not a dict)
                part = file.get_slice(name)
                count += math.prod(part.get_shape())
                dtypes.add(part.get_dtype())
    return count, "/".join(sorted(dtypes))
