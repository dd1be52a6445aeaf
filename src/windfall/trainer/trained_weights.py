"""What a policy trains, saves and publishes: all weights of a model, or adapters of a base that stays as it is.

    without [train.lora]   checkpoint: model            published: all weights
    with [train.lora]      checkpoint: adapter (PEFT)   published: the base once, and the adapter with every version
    frozen                 checkpoint: -                published: the base

A run never changes from one to the other, and its base never changes. Both are checked here, too, because the recipe
and the base are files that people edit.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from windfall.errors import WindfallError
from windfall.models import load
from windfall.recipe.sections import Recipe
from windfall.trainer import checkpoint
from windfall.trainer.checkpoint import VerifiedCheckpoint
from windfall.training import CheckpointState
from windfall.weights import adapter_folder
from windfall.weights.adapter_folder import AdapterBase

NO_ADAPTER = "the last checkpoint is a whole model, but the recipe has [train.lora]"
NO_MODEL = "the last checkpoint is an adapter, but the recipe has no [train.lora]"


@dataclass(kw_only=True)
class TrainedWeights:
    model: Any
    """The module, with adapters attached if there are any."""
    adapters: Any = None
    """The trainer.model.lora.Adapters of the policy; None if all weights are trained, or none."""
    base: AdapterBase | None = None
    """The base of the adapters."""
    frozen: bool = False
    """Whether the policy is not trained, or is a slot. Without adapters it is the base itself, which others may have
    adapters of."""

    def __post_init__(self) -> None:
        if self.frozen and self.adapters is not None:
            self.adapters.freeze()

    @property
    def saved(self) -> Any:
        """What a checkpoint holds."""
        return self.model if self.adapters is None else self.adapters

    def facts(self) -> dict[str, int | float | str | bool]:
        """For the event log."""
        from windfall.trainer.model.lora import is_adapter

        total = sum(p.numel() for name, p in self.model.named_parameters() if not is_adapter(name))
        if self.adapters is None:
            return {"parameters": total}
        trained = sum(t.numel() for t in self.adapters.tensors().values())
        return {"parameters": total, "adapter_parameters": trained, "adapter_rank": self.adapters.config.rank}

    def publish(
        self, publisher: Any, version: int, *, copied: Callable[[], None] | None = None, pack: bool = False
    ) -> Any:
        """Publish the present weights as this version. Returns their manifest. `copied` is called once they may change
        again. `pack`: compress the delta."""
        from windfall.trainer.model.lora import base_tensors
        from windfall.trainer.ranks.sharding import to_publish

        if self.adapters is None and not self.frozen:
            mine = to_publish(self.model.state_dict(), publisher.ranks)
            return publisher.publish(version, mine, copied=copied, pack=pack)

        if (published := publisher.base) is not None:
            base = published.manifest
        else:
            base = publisher.publish_base(to_publish(base_tensors(self.model), publisher.ranks))
        if self.adapters is None:
            return msgspec.structs.replace(base, version=version)
        tensors, scale = to_publish(self.adapters.tensors(), publisher.ranks), self.adapters.scale
        return publisher.publish(version, tensors, copied=copied, base=base.digest, scale=scale, pack=pack)

    def follow(self, original: TrainedWeights) -> None:
        """Let the adapters be those of another policy, as they are now."""
        from windfall.trainer.ranks.sharding import rows

        theirs = original.adapters.weights()
        for name, own in self.adapters.weights().items():
            rows(own).copy_(rows(theirs[name]))

    def write_published(self, module: Any, publisher: Any, collect: Callable[[], Any], folder: Path) -> None:
        """Write what a checkpoint holds if the weights are split over ranks: no rank has all of them, but the version
        that was published last is complete. `module` gives the configuration and the names of a whole model; its
        tensors need no memory. `collect` lets all ranks call the function of this name below."""
        from windfall.weights.buffers import views

        buffer, version = collect(), publisher.readable[0]
        tensors = views(buffer.mapped, version.manifest.entries)
        try:
            if self.adapters is not None:
                adapter_folder.write(folder, self.adapters.config, tensors)
                return
            module.load_state_dict(tensors, assign=True)
            module.save_pretrained(folder)
        finally:
            module.to("meta")
            if buffer is not version.buffer:
                buffer.close()

    def merged(self) -> Any:
        """The module for the trainer's own engine (own_engine/merged_model.py); None if the engine shares this one."""
        if self.adapters is None:
            return None
        from windfall.trainer.own_engine.merged_model import MergedModel

        return MergedModel(self.model)


def collect(publisher: Any, ranks: Any) -> Any:
    """A buffer with all bytes of the version that was published last, on rank 0. Every rank calls this. On one machine
    it is the buffer that all ranks wrote; otherwise a copy, in memory or else in a file, which gets the rows of the
    other machines."""
    import numpy as np
    import torch

    from windfall.trainer.ranks.sharded_file import pieces, send_to_first
    from windfall.weights.buffers import Buffer

    version = publisher.readable[0]
    plan, mine = version.plan, version.buffer.data
    if len(plan.file.parts) == 1:
        return version.buffer
    parts = plan.file.parts.get(ranks.rank, ())
    if not ranks.first:
        rows = [piece for a, b in parts for piece in pieces(a, torch.from_numpy(mine[a:b]))]
        send_to_first(ranks, rows, lambda at, data: None)
        return None
    whole = Buffer(plan.file.nbytes, publisher.folder)
    for start, stop in parts:
        whole.data[start:stop] = mine[start:stop]

    def write(at: int, data: memoryview) -> None:
        whole.data[at : at + len(data)] = np.frombuffer(data, np.uint8)

    send_to_first(ranks, (), write)
    return whole


def model_to_load(recipe: Recipe, found: VerifiedCheckpoint | None) -> str:
    """Which model the trainer loads: the last checkpoint, or the base of the adapters. Refuses a checkpoint that is an
    adapter if the recipe trains all weights, and the reverse."""
    if found is None:
        return recipe.model.path
    is_adapter = checkpoint.read_base(found.path) is not None
    if is_adapter != (recipe.train.lora is not None):
        fix = "Restore the recipe with which the run began, or start a new run."
        raise WindfallError(NO_MODEL if is_adapter else NO_ADAPTER, where=str(found.path), fix=fix)
    return recipe.model.path if is_adapter else str(found.path)


def prepare(
    model: Any,
    recipe: Recipe,
    found: VerifiedCheckpoint | None,
    *,
    dtype: str,
    policy: str = "",
    trained: bool = True,
    slot: bool = False,
    digest: str = "",
) -> TrainedWeights:
    """Attach the adapters that the recipe asks for. `model`: the one that `model_to_load` names. `recipe`: as this
    policy sees it. `trained`: whether it is trained; otherwise its adapters, if any, are a copy. `slot`: it is a slot,
    which has no adapters yet. `digest`: that of the base, if it is known."""
    from windfall.trainer.model import lora

    section, path = recipe.train.lora, recipe.model.path
    if section is None:
        return TrainedWeights(model=model, frozen=not trained)
    digest = digest or adapter_folder.base_digest(lora.base_tensors(model))
    base, folder = AdapterBase(path=path, dtype=dtype, digest=digest), found and found.path
    if slot:
        return TrainedWeights(model=model, base=base, frozen=True)
    if folder is not None:
        adapter_folder.check_base(folder, base)
    options: dict[str, Any] = {"seed": recipe.run.seed, "checkpoint": folder, "policy": policy}
    adapters = lora.attach(model, section, base=str(load.fetch(path)), **options)
    return TrainedWeights(model=model, adapters=adapters, base=base, frozen=not trained)


def attach_empty(model: Any, adapter: Any, policy: str = "") -> Any:
    """Attach adapters of the same shapes as those with this AdapterConfig. Their values are placeholders."""
    from windfall.recipe.lora import Lora
    from windfall.trainer.model import lora

    section = Lora(rank=adapter.rank, alpha=adapter.alpha, targets=list(adapter.targets))
    return lora.attach(model, section, base=adapter.base, seed=0, policy=policy)


def load_into(model: Any, trainer: Any, path: str) -> CheckpointState:
    """Load a checkpoint of all weights, with the state of the optimizer, into a model that is being trained. Returns
    the state of its run."""
    folder = Path(path)
    checkpoint.check(folder)
    if checkpoint.read_base(folder) is not None:
        fix = "Start a run from its base, with [train.lora] and this adapter."
        raise WindfallError("an adapter cannot be loaded while a model is trained", where=path, fix=fix)
    weights = load.load(path, dtype=str(model.dtype).removeprefix("torch."), device="cpu").state_dict()
    model.load_state_dict(weights)
    trainer.restore_optimizer(folder / checkpoint.OPTIMIZER)
    return checkpoint.read_state(folder)
