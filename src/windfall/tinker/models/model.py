"""A model that a client trains: what the trainer does for it, and how it is brought back to any trainer.

    state = the last checkpoint (`saved_seq`, `checkpoint`) + the calls after it that changed something (`since`)

A checkpoint covers all calls up to the last one that changed the weights. What came after it, which is gradients
without an update, is repeated like everything else. In deterministic mode the result is the same bit for bit.
"""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from windfall.controller.remote_trainer import RemoteTrainer
from windfall.errors import WindfallError
from windfall.tinker import calls as c
from windfall.tinker.disk.call_log import Entry
from windfall.tinker.disk.saved_weights import SavedWeights
from windfall.tinker.disk.store import Statement, TinkerStore
from windfall.tinker.shared import SharedParts
from windfall.training import AdapterSpec

SAVE_S = 60.0
"""Seconds of the trainer's work after which a checkpoint is written with the next update."""
SAVE_BYTES = 64 << 20
"""Bytes of calls to repeat after which a checkpoint is written with the next update."""


@dataclass(kw_only=True, eq=False)
class TrainedModel:
    id: str
    account: str
    session: str
    spec: c.LoraSpec
    created: float
    shared: SharedParts
    weights: SavedWeights
    saved_seq: int = 0
    """Its last checkpoint covers the calls up to this one."""
    checkpoint: Path | None = None
    """None: it has new weights, from its seed."""
    optimizer: bool = False
    """The checkpoint has the state of the optimizer, to be loaded."""
    next_seq: int = 1
    """The first call that was not performed."""
    metadata: c.Metadata = field(default_factory=dict)
    unloaded: bool = False
    seen: float = 0.0
    """When a client made a call last."""
    ready: asyncio.Event = field(default_factory=asyncio.Event)
    """Set once the weights that it starts with are there."""
    waiting: dict[int, Entry] = field(default_factory=dict)
    """Calls that were not performed, by number."""
    since: list[Entry] = field(default_factory=list)
    """Calls that changed something since the last checkpoint, in order."""
    task: asyncio.Task[None] | None = None
    """Performs calls."""
    busy: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held while something is written into its folder, or a call of it is performed. Its end waits for that."""
    _changed_seq: int = 0
    """The last call that changed the weights."""
    _updates: int = 0
    """Updates since the last checkpoint."""
    _work_s: float = 0.0
    """Seconds of the trainer's work since then."""

    @property
    def adapter(self) -> AdapterSpec:
        """The spec, for this base. Raises WindfallError if its layers cannot be trained here."""
        return self.shared.terms.adapter(self.spec)

    @property
    def folder(self) -> Path:
        """Where everything of the model is saved."""
        return self.weights.folder_of(self.id)

    @property
    def kept_bytes(self) -> int:
        """Bytes of the calls to repeat, which are on disk."""
        return sum(entry.kept_bytes for entry in self.since)

    def row(self) -> Statement:
        spec = {"lora": msgspec.to_builtins(self.spec), "metadata": self.metadata, "optimizer": self.optimizer}
        return TinkerStore.put(
            "model", id=self.id, account=self.account, session=self.session, created=self.created,
            spec=spec, saved_seq=self.saved_seq, folder=str(self.checkpoint or ""),
            next_seq=self.next_seq, unloaded=int(self.unloaded),
        )  # fmt: skip

    @classmethod
    def read(cls, row: Mapping[str, Any], shared: SharedParts, weights: SavedWeights) -> TrainedModel:
        fields = {**row, **row["spec"]}
        lora, folder = fields.pop("lora"), fields.pop("folder")
        fields.pop("base", "")  # earlier versions wrote it
        fields |= {"spec": c.LoraSpec(**lora), "checkpoint": Path(folder) if folder else None}
        found = cls(**fields, shared=shared, weights=weights, seen=row["created"])
        found.ready.set()
        return found

    # slots

    async def enter(self, trainer: RemoteTrainer) -> None:
        """Load its adapter into a slot, and repeat what is not in the last checkpoint."""
        if self.checkpoint is None:
            await trainer.load_adapter(self.adapter, id=self.id)
        else:
            await trainer.load_adapter(path=str(self.checkpoint), optimizer=self.optimizer, id=self.id)
        self._changed_seq, self._updates, self._work_s = self.saved_seq, 0, 0.0
        for entry in self.since:
            await self.perform(trainer, await self.shared.calls.call(entry))

    async def leave(self, trainer: RemoteTrainer) -> None:
        """Save what is not in the last checkpoint, before another model gets the slot."""
        async with self.busy:
            if self._changed_seq > self.saved_seq and not self.unloaded:
                await self.save_state(trainer)

    # calls

    async def perform(self, trainer: RemoteTrainer, call: c.TrainerCall) -> c.Result:
        """Perform a call in the slot that holds the model. Raises WindfallError if it cannot be performed."""
        began, id = time.monotonic(), f"{self.id}/{call.seq}"
        match call:
            case c.ForwardCall():
                scored = await trainer.forward(call.samples, call.loss, id=id)
                logprobs = tuple(np.zeros(0) if s.old is None else s.old for s in scored)
                loss = sum(call.loss.value(s.tokens(old)) for s, old in zip(call.samples, logprobs, strict=True))
                result = c.ForwardResult(logprobs=logprobs, metrics={"loss:sum": loss}, width=call.width)
            case c.ForwardBackwardCall():
                done = await trainer.forward_backward(call.samples, call.loss, id=id)
                result = c.ForwardResult(logprobs=done.logprobs, metrics={"loss:sum": done.loss}, width=call.width)
            case c.OptimStepCall():
                report = await trainer.optim_step(adam=call.adam, id=id)
                self._changed_seq, self._updates = call.seq, self._updates + 1
                metrics = {"tokens": float(report.tokens), "grad_norm": report.grad_norm, "lr": report.lr}
                result = c.Stepped(metrics=metrics | {"skipped": float(bool(report.skipped))})
            case c.LoadWeights():
                if call.seq > self.saved_seq:  # otherwise, the server was killed before it was recorded as performed
                    folder = str(self.weights.folder(call.path))
                    await trainer.load_adapter(self.adapter, folder, optimizer=call.optimizer, id=id)
                    self._changed_seq = call.seq
                    await self.save_state(trainer)  # the weights that were loaded may be deleted before a restart
                return c.ModelReady(model=self.id, path=call.path)
        if call.repeated:
            self._work_s += time.monotonic() - began
        return result

    # saves

    def is_due(self, updates: int) -> bool:
        """Whether a checkpoint is to be written: after this many `updates`, or after much work or many bytes. The calls
        that it covers must be recorded as performed, because a restart repeats all others."""
        much = self._updates >= updates or self._work_s >= SAVE_S or self.kept_bytes >= SAVE_BYTES
        return self._changed_seq > self.saved_seq and much

    async def save(
        self, trainer: RemoteTrainer, folder: Path, *, optimizer: bool, begun: Callable[[], None] = lambda: None
    ) -> None:
        """Write the present weights into a folder. What is in it was written by a server that was killed before it
        could record that. `begun`: called when the trainer is asked, which writes beside other work without an
        optimizer. If they cannot be written, the server ends."""
        await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)
        begun()
        try:
            await trainer.save_adapter(str(folder), optimizer=optimizer, id=f"{self.id}/{folder.name}")
        except WindfallError as e:
            fix = "Free disk space, then `windfall resume`: no call that was accepted is lost."
            what = f"model {self.id} cannot be saved: {e.what}"
            self.shared.tasks.end(WindfallError(what, where=e.where, fix=fix))

    async def save_state(self, trainer: RemoteTrainer) -> None:
        """Write a checkpoint, and remove the one before it."""
        before, folder = self.checkpoint, self.folder / f"state-{self._changed_seq}"
        await self.save(trainer, folder, optimizer=True)
        self.checkpoint, self.optimizer, self.saved_seq = folder, True, self._changed_seq
        self._updates, self._work_s = 0, 0.0
        await self.shared.store.write(self.row(), self.forget(self.saved_seq))
        if before is not None and before.parent == self.folder and before != folder:
            await asyncio.to_thread(shutil.rmtree, before, ignore_errors=True)

    def forget(self, seq: int) -> Statement:
        """Repeat no call up to this one."""
        for entry in self.since:
            entry.kept_bytes *= entry.seq > seq
        self.since = [entry for entry in self.since if entry.seq > seq]
        return ("update call set body = null where model = ? and seq <= ? and done is not null", (self.id, seq))
