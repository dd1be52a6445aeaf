"""What a push sends: the files of a model or an adapter, and what was written about it.

    the files of the model                from the checkpoint, or of base and adapter merged
    adapter_config.json                   the checkpoint's, with the hub id of the base as its name
    README.md  reward.png                 the model card (model_card.py) and its picture (picture.py)
    windfall.json                         which run and step this is: a later push of the same run may replace it

Large files are sent from where they are. Only a merged model is written first, into a folder that is removed later.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from windfall import __version__
from windfall import run_folder as folders
from windfall.errors import WindfallError, unwritable
from windfall.events.log import Event, read
from windfall.hub import licenses, model_card, picture
from windfall.models import load
from windfall.recipe.file import load_recipe
from windfall.run.commands import export
from windfall.trainer import checkpoint
from windfall.weights import adapter_folder

CARD, PICTURE, ORIGIN = "README.md", "reward.png", "windfall.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class Origin:
    """Which run a pushed model comes from."""

    run: str
    began: float
    """Wall clock at the first event of the run, in seconds: two runs may have the same name."""
    policy: str
    step: int

    def is_same_run(self, other: dict[str, Any] | None) -> bool:
        """Whether another push, by its windfall.json, was of this run and policy."""
        mine = (self.run, self.began, self.policy)
        return other is not None and mine == (other.get("run"), other.get("began"), other.get("policy"))

    def text(self) -> str:
        fields = {"run": self.run, "began": self.began, "policy": self.policy, "step": self.step}
        return json.dumps({**fields, "windfall": __version__}, indent=2) + "\n"


@dataclass(frozen=True, kw_only=True, slots=True)
class Contents:
    files: dict[str, Path | bytes]
    """By their names in the repository."""
    origin: Origin
    run: Path

    def size(self) -> int:
        return sum(len(f) if isinstance(f, bytes) else f.stat().st_size for f in self.files.values())

    def write(self, out: Path | None) -> Path:
        """Write all files into a folder that does not exist yet."""
        name = f"push-{checkpoint.name(self.origin.step)}"
        folder = out or folders.policy_folder(self.run, self.origin.policy) / "exports" / name
        if folder.exists():
            raise WindfallError("this already exists", where=str(folder), fix="Remove it, or name another with --out.")
        work = folder.with_name(f".partial-{folder.name}")
        shutil.rmtree(work, ignore_errors=True)
        try:
            work.mkdir(parents=True)
            for file, data in self.files.items():
                if isinstance(data, bytes):
                    (work / file).write_bytes(data)
                else:
                    shutil.copyfile(data, work / file)
            work.rename(folder)
        except OSError as e:
            raise unwritable("what would be pushed", folder, e, "Name another folder with --out.") from e
        finally:
            shutil.rmtree(work, ignore_errors=True)
        return folder


@contextlib.contextmanager
def contents(run: Path, repo: str, *, step: int | None, policy: str, merged: bool, base: str) -> Iterator[Contents]:
    """The files to push. A merged model exists until the context ends."""
    policy = folders.choose_policy(run, policy)
    whole = load_recipe(run / "recipe.toml")
    if policy and whole.policies[policy].frozen:
        what = f"this policy is frozen: it is {whole.of(policy).model.path}, which was not changed"
        raise WindfallError(what, where=f"--policy {policy}", fix="Push another policy.")
    path = _checkpoint(run, policy, step)
    step, recipe = checkpoint.step_of(path), whole.of(policy)
    is_adapter = adapter_folder.is_adapter(path)
    if merged and not is_adapter:
        raise WindfallError("this run trains all weights", where="--merged", fix="Leave out --merged.")
    named = base or (recipe.model.path if isinstance(load.resolve(recipe.model.path), str) else "")
    if is_adapter and not merged and not named:
        what = f"the base of this adapter is {model_card.short(recipe.model.path)}, which is not on the hub"
        fix = "Add --merged to push the whole model, or name the base with --base OWNER/NAME if the hub has it."
        raise WindfallError(what, where=str(path), fix=fix)
    with contextlib.ExitStack() as stack:
        source = path
        if merged:
            work = stack.enter_context(tempfile.TemporaryDirectory(prefix=".push-", dir=run))
            source = export.export(path, Path(work) / "merged").folder
        files: dict[str, Path | bytes] = {f.name: f for f in sorted(source.iterdir()) if f.is_file()}
        if is_adapter and not merged:
            fields = json.loads((path / adapter_folder.CONFIG).read_text())
            fields["base_model_name_or_path"] = named
            files[adapter_folder.CONFIG] = json.dumps(fields, indent=2, sort_keys=True).encode()
        events = _until(read(run / "events.jsonl"), step, policy)
        began = events[0]["t"] if events else 0.0
        curve = model_card.curve(events, policy)
        drawn = picture.draw(curve, title=repo) if curve else None
        card = model_card.ModelCard(
            repo=repo, recipe=recipe, policy=policy, step=step, events=events, base=named, curve=curve,
            kind="adapter" if is_adapter and not merged else "model", merged=merged,
            license=licenses.license_of(named or recipe.model.path), picture=PICTURE if drawn else "",
        )  # fmt: skip
        files[CARD] = str(card).encode()
        if drawn:
            files[PICTURE] = drawn
        origin = Origin(run=recipe.run.name, began=began, policy=policy, step=step)
        files[ORIGIN] = origin.text().encode()
        yield Contents(files=files, origin=origin, run=run)


def _checkpoint(run: Path, policy: str, step: int | None) -> Path:
    if step is None:
        return checkpoint.latest(run, policy).path
    found = {checkpoint.step_of(p): p for p in checkpoint.list_checkpoints(_checkpoints(run, policy))}
    if step not in found:
        there = f"There are checkpoints of step {', '.join(map(str, found))}." if found else "The run has none."
        raise WindfallError(f"no checkpoint of step {step}", where=f"--step {step}", fix=there)
    checkpoint.check(found[step], optimizer=False)
    return found[step]


def _checkpoints(run: Path, policy: str) -> Path:
    return folders.policy_folder(run, policy) / "checkpoints"


def _until(events: list[Event], step: int, policy: str) -> list[Event]:
    """The events until this step of the policy was complete and evaluated."""
    ends = [
        n + 1
        for n, e in enumerate(events)
        if e["kind"] == "scalar" and e.get("step", step + 1) <= step and e.get("policy", "") == policy
    ]
    return events[: max(ends, default=len(events))]
