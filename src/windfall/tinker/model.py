"""A model that a client trains: performs its calls in their order, and can be brought back to any trainer.

    state = the last checkpoint (`saved_seq`, `folder`) + the calls after it that changed something (`since`)

A checkpoint covers all calls up to the last one that changed the weights. What came after it, which is gradients
without an update, is repeated like everything else. In deterministic mode the result is the same bit for bit.
"""

from __future__ import annotations

import asyncio
import shutil
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Protocol

import numpy as np

from windfall.controller.remote_trainer import RemoteTrainer
from windfall.tinker import calls as c
from windfall.training import AdapterSpec, Gradient, Report

SAVE_S = 60.0
"""Seconds of the trainer's work after which a checkpoint is written with the next update."""

Changing = c.ForwardBackward | c.OptimStep | c.LoadWeights
"""Calls that change what the trainer has of a model."""


class Journal(Protocol):
    """What a model needs of the service."""

    def checkpoint_folder(self, path: str) -> Path:
        """The folder of saved weights. Raises WindfallError if there are none."""
        ...

    def since(self, model: Model) -> list[Changing]:
        """The calls that changed something since the last checkpoint and did not fail, in order."""
        ...

    async def saved(self, model: Model) -> None:
        """`saved_seq` and `folder` have changed; write that down."""
        ...


@dataclass(kw_only=True, eq=False)
class Model:
    id: str
    account: str
    session: str
    base: str
    spec: c.LoraSpec
    adapter: AdapterSpec
    """The spec, for this base."""
    created: float
    folder: Path
    """Where everything of the model is saved."""
    journal: Journal
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
    waiting: dict[int, str] = field(default_factory=dict)
    """Ids of calls that were not performed, by number."""
    task: asyncio.Task[None] | None = None
    """Performs them."""
    _changed_seq: int = 0
    """The last call that changed the weights."""
    _updates: int = 0
    """Updates since the last checkpoint."""
    _work_s: float = 0.0
    """Seconds of the trainer's work since then."""
    _entered: int = 0
    """How often it was loaded: ids of verbs differ, because a slot does not know what it did for a model before."""
    _lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    # room.Tenant

    async def enter(self, trainer: RemoteTrainer) -> None:
        async with self._lock:
            self._entered += 1
            id = f"{self.id}/{self._entered}/enter"
            if self.checkpoint is None:
                await trainer.load_adapter(self.adapter, id=id)
            else:
                await trainer.load_adapter(path=str(self.checkpoint), optimizer=self.optimizer, id=id)
            self._changed_seq, self._updates, self._work_s = self.saved_seq, 0, 0.0
            for call in self.journal.since(self):
                await self._change(trainer, call)

    async def leave(self, trainer: RemoteTrainer) -> None:
        async with self._lock:
            if self._changed_seq > self.saved_seq:
                await self._save_state(trainer)

    # calls

    async def perform(self, trainer: RemoteTrainer, call: c.ModelCall) -> c.Result:
        """Perform a call in the slot that holds the model. Raises WindfallError if it cannot be performed."""
        match call:
            case c.Forward():
                scored = await trainer.forward(call.samples, call.loss, id=self._id(call))
                logprobs = tuple(np.zeros(0) if s.old is None else s.old for s in scored)
                pairs = zip(call.samples, logprobs, strict=True)
                loss = sum(call.loss.value(s.tokens(logp)) for s, logp in pairs)
                return c.Scored(logprobs=logprobs, metrics={"loss:sum": loss})
            case c.ForwardBackward():
                done = await self._change(trainer, call)
                assert isinstance(done, Gradient)
                return c.Scored(logprobs=done.logprobs, metrics={"loss:sum": done.loss})
            case c.OptimStep():
                report = await self._change(trainer, call)
                assert isinstance(report, Report)
                return c.Stepped(metrics=_metrics(report))
            case c.LoadWeights():
                await self._change(trainer, call)
                await self._save_state(trainer)  # the weights that were loaded may be deleted before a restart
                return c.ModelReady(model=self.id, path=call.path)
            case c.SaveWeights() | c.SaveForSampler() | c.Refused():
                raise AssertionError("the service does these")

    async def settle(self, trainer: RemoteTrainer, updates: int) -> None:
        """Write a checkpoint if one is due: after so many `updates`, or after much work. The calls that it covers must
        be recorded as performed: a restart would repeat the others."""
        if self._changed_seq > self.saved_seq and (self._updates >= updates or self._work_s >= SAVE_S):
            await self._save_state(trainer)

    async def save(self, trainer: RemoteTrainer, folder: Path, *, optimizer: bool, id: str) -> None:
        """Write the present weights into a folder, for a client."""
        await trainer.save_adapter(str(folder), optimizer=optimizer, id=f"{id}/{self._entered}/save")

    async def _change(self, trainer: RemoteTrainer, call: Changing) -> Gradient | Report | None:
        began = time.monotonic()
        done: Gradient | Report | None = None
        match call:
            case c.ForwardBackward():
                done = await trainer.forward_backward(call.samples, call.loss, id=self._id(call))
            case c.OptimStep():
                done = await trainer.optim_step(adam=call.adam, id=self._id(call))
                self._changed_seq, self._updates = call.seq, self._updates + 1
            case c.LoadWeights():
                folder = self.journal.checkpoint_folder(call.path)
                await trainer.load_adapter(self.adapter, str(folder), optimizer=call.optimizer, id=self._id(call))
                self._changed_seq = call.seq
        self._work_s += time.monotonic() - began
        return done

    async def _save_state(self, trainer: RemoteTrainer) -> None:
        """Write a checkpoint, and remove the one before it."""
        before, folder = self.checkpoint, self.folder / f"state-{self._changed_seq}"
        await trainer.save_adapter(str(folder), optimizer=True, id=f"{self.id}/{self._entered}/{self._changed_seq}")
        self.checkpoint, self.optimizer, self.saved_seq = folder, True, self._changed_seq
        self._updates, self._work_s = 0, 0.0
        await self.journal.saved(self)
        if before is not None and before.parent == self.folder and before != folder:
            await asyncio.to_thread(shutil.rmtree, before, ignore_errors=True)

    def _id(self, call: c.ModelCall) -> str:
        return f"{self.id}/{self._entered}/{call.seq}"


def _metrics(report: Report) -> dict[str, float]:
    """What an update reports, for the client.

    >>> _metrics(Report(tokens=5, responses=1, grad_norm=0.5, lr=1e-4))["grad_norm"]
    0.5
    """
    numbers = {name: value for name, value in asdict(report).items() if name in ("tokens", "grad_norm", "lr")}
    return {name: float(value) for name, value in numbers.items()} | {"skipped": float(bool(report.skipped))}
