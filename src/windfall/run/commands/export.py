"""`windfall export`: the model of a run as a folder of its own, in Hugging Face format.

    a run that trains all weights    the model files of its newest checkpoint, copied
    a run that trains adapters       the base model with the newest adapter merged into it, in the run's dtype
    with `--gguf DTYPE`              the same as one file, model.gguf, for llama.cpp (models/gguf_file.py)

A checkpoint, or any adapter in PEFT format, can be exported in the same way. The folder is written under another name
and renamed when it is complete: an existing folder is never changed, and a failed export leaves nothing behind.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

from windfall import run_folder as folders
from windfall.errors import WindfallError, unwritable
from windfall.models import gguf_file, load
from windfall.recipe.file import load_recipe
from windfall.trainer import checkpoint
from windfall.weights import adapter_folder


@dataclass(frozen=True, kw_only=True, slots=True)
class Exported:
    folder: Path
    source: Path
    base: str = ""
    """The model that an adapter was merged into."""

    gguf: str = ""
    """The dtype of a GGUF."""

    def __str__(self) -> str:
        merged = f"{self.base} with the adapter {self.source} merged into it"
        what = merged if self.base else f"{self.source}" if self.gguf else f"a copy of {self.source}"
        return f"wrote {self.folder}: {what}" + (f", as GGUF ({self.gguf})" if self.gguf else "")


def export(source: Path, out: Path | None, policy: str = "", gguf: str = "") -> Exported:
    """Write the model of a run, a checkpoint or an adapter. `out`: a folder that does not exist yet; by default
    `exports/STEP` in the run's folder, or in that of the policy; or `SOURCE-merged` beside an adapter that belongs to
    no run. `policy`: which one, if the run has several. `gguf`: the dtype of a GGUF that is written instead."""
    if gguf and gguf not in gguf_file.DTYPES:
        fix = f"Give one of: {', '.join(gguf_file.DTYPES)}."
        raise WindfallError(f"unknown dtype {gguf!r}", where="--gguf", fix=fix)
    path = _find(source, policy)
    run, own = folders.run_of(path)
    name = f"{path.name}-{gguf}" if gguf else path.name
    beside = path.with_name(name if gguf else f"{name}-merged")
    folder = out or (folders.policy_folder(run, own) / "exports" / name if _is_run(run) else beside)
    if folder.exists():
        raise WindfallError("this already exists", where=str(folder), fix="Name another folder as OUT.")
    work = folder.with_name(f".partial-{folder.name}")
    shutil.rmtree(work, ignore_errors=True)  # of an export that was killed
    try:
        work.mkdir(parents=True)
        base = adapter_folder.read_config(path).base if adapter_folder.is_adapter(path) else ""
        if gguf:
            gguf_file.write(str(path), work / "model.gguf", gguf)
        elif base:
            _write_merged(path, work)
        else:
            for file in sorted(path.iterdir()):
                if file.is_file():  # the state of the run is in a folder
                    shutil.copyfile(file, work / file.name)
        work.rename(folder)
    except OSError as e:
        raise unwritable("the model", folder, e) from e
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return Exported(folder=folder, source=path, base=base, gguf=gguf)


def _find(source: Path, policy: str) -> Path:
    """The checkpoint or adapter to export."""
    policy = folders.choose_policy(source, policy)
    if _is_run(source):
        if policy and (recipe := load_recipe(source / "recipe.toml")).policies[policy].frozen:
            what = f"this policy is frozen: it is {recipe.of(policy).model.path}, which was not changed"
            raise WindfallError(what, where=f"--policy {policy}", fix="Use that model, or export another policy.")
        return checkpoint.latest(source, policy).path
    if (source / checkpoint.STATE).is_file():
        checkpoint.check(source, optimizer=False)
    elif not adapter_folder.is_adapter(source):
        folders.check_exists(source)
        fix = "Give the folder of a run, of a checkpoint, or of an adapter in PEFT format."
        raise WindfallError("nothing to export here", where=str(source), fix=fix)
    return source


def _is_run(folder: Path) -> bool:
    return (folder / "recipe.toml").is_file()


def _write_merged(path: Path, work: Path) -> None:
    base = adapter_folder.read_base(path)
    dtype = _dtype_of(load.adapter_base(path)) if base is None else base.dtype
    load.load(str(path), dtype=dtype, device="cpu").save_pretrained(work)
    load.load_tokenizer(str(path)).save_pretrained(work)


def _dtype_of(model: str) -> str:
    """The dtype of a model's files, as far as its configuration says."""
    from transformers import AutoConfig

    return str(AutoConfig.from_pretrained(load.fetch(model)).dtype or "float32").removeprefix("torch.")
