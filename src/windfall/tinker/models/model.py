"""A model that a client trains: performs its calls in their order, and can be brought back to any trainer.

    state = the last checkpoint (`saved_seq`, `folder`) + the calls after it that changed something (`since`)

A checkpoint covers all calls up to the last one that changed the weights. What came after it, which is gradients
without an update, is repeated like everything else. In deterministic mode the result is the same bit for bit.
"""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import NoReturn, Protocol

import numpy as np

from windfall.controller.remote_trainer import RemoteTrainer
from windfall.errors import WindfallError
from windfall.tinker import calls as c
from windfall.tinker.disk.call_log import Entry
from windfall.training import AdapterSpec, Gradient, Report

SAVE_S = 60.0
"""Seconds of the trainer's work after which a checkpoint is written with the next update."""

Changing = c.ForwardBackwardCall | c.OptimStepCall | c.LoadWeights
"""Calls that change what the trainer has of a model."""


class ModelRecords(Protocol):
    """What a model needs of the records of the service."""

    def checkpoint_folder(self, path: str) -> Path:
        """The folder of saved weights. Raises WindfallError if there are none."""
        ...

    async def saved(self, model: TrainedModel) -> None:
        """`saved_seq` and `checkpoint` have changed; write that down, and that the calls before need not be kept."""
        ...

    def unsaved(self, model: TrainedModel, error: WindfallError) -> NoReturn:
        """Its weights cannot be written."""
        ...


@dataclass(kw_only=True, eq=False)
class TrainedModel:
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
    records: ModelRecords
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
    busy: bool = False
    """It is in a slot, and verbs may be on their way."""
    _changed_seq: int = 0
    """The last call that changed the weights."""
    _updates: int = 0
    """Updates since the last checkpoint."""
    _work_s: float = 0.0
    """Seconds of the trainer's work since then."""

    # adapter_slots.SlotUser

    async def enter(self, trainer: RemoteTrainer) -> None:
        if self.checkpoint is None:
            await trainer.load_adapter(self.adapter, id=self.id)
        else:
            await trainer.load_adapter(path=str(self.checkpoint), optimizer=self.optimizer, id=self.id)
        self._changed_seq, self._updates, self._work_s = self.saved_seq, 0, 0.0
        for entry in self.since:
            assert isinstance(entry.call, Changing)
            await self._change(trainer, entry.call)

    async def leave(self, trainer: RemoteTrainer) -> None:
        if self._changed_seq > self.saved_seq:
            await self.save_state(trainer)

    # calls

    async def perform(self, trainer: RemoteTrainer, call: c.ModelCall) -> c.Result:
        """Perform a call in the slot that holds the model. Raises WindfallError if it cannot be performed."""
        match call:
            case c.ForwardCall():
                scored = await trainer.forward(call.samples, call.loss, id=self._id(call))
                logprobs = tuple(np.zeros(0) if s.old is None else s.old for s in scored)
                pairs = zip(call.samples, logprobs, strict=True)
                loss = sum(call.loss.value(s.tokens(logp)) for s, logp in pairs)
                return c.ForwardResult(logprobs=logprobs, metrics={"loss:sum": loss}, width=call.width)
            case c.ForwardBackwardCall():
                done = await self._change(trainer, call)
                assert isinstance(done, Gradient)
                return c.ForwardResult(logprobs=done.logprobs, metrics={"loss:sum": done.loss}, width=call.width)
            case c.OptimStepCall():
                report = await self._change(trainer, call)
                assert isinstance(report, Report)
                return c.Stepped(metrics=_metrics(report))
            case c.LoadWeights():
                if call.seq > self.saved_seq:  # otherwise, the server was killed before it was recorded as performed
                    await self._change(trainer, call)
                    await self.save_state(trainer)  # the weights that were loaded may be deleted before a restart
                return c.ModelReady(model=self.id, path=call.path)
            case c.SaveWeights() | c.SaveForSampler() | c.RefusedCall():
                raise AssertionError("the service does these")

    def is_due(self, updates: int) -> bool:
        """Whether a checkpoint is to be written: after this many `updates`, or after much work. The calls that it
        covers must be recorded as performed, because a restart repeats all others."""
        return self._changed_seq > self.saved_seq and (self._updates >= updates or self._work_s >= SAVE_S)

    async def save(
        self, trainer: RemoteTrainer, folder: Path, *, optimizer: bool, begun: Callable[[], None] = lambda: None
    ) -> None:
        """Write the present weights into a folder. What is in it was written by a server that was killed before it
        could record that. `begun`: called when the trainer is asked, which writes beside other work without an
        optimizer."""
        await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)
        begun()
        try:
            await trainer.save_adapter(str(folder), optimizer=optimizer, id=f"{self.id}/{folder.name}")
        except WindfallError as e:
            self.records.unsaved(self, e)

    async def _change(self, trainer: RemoteTrainer, call: Changing) -> Gradient | Report | None:
        began = time.monotonic()
        done: Gradient | Report | None = None
        match call:
            case c.ForwardBackwardCall():
                done = await trainer.forward_backward(call.samples, call.loss, id=self._id(call))
            case c.OptimStepCall():
                done = await trainer.optim_step(adam=call.adam, id=self._id(call))
                self._changed_seq, self._updates = call.seq, self._updates + 1
            case c.LoadWeights():
                folder = self.records.checkpoint_folder(call.path)
                await trainer.load_adapter(self.adapter, str(folder), optimizer=call.optimizer, id=self._id(call))
                self._changed_seq = call.seq
        self._work_s += time.monotonic() - began
        return done

    async def save_state(self, trainer: RemoteTrainer) -> None:
        """Write a checkpoint, and remove the one before it."""
        before, folder = self.checkpoint, self.folder / f"state-{self._changed_seq}"
        await self.save(trainer, folder, optimizer=True)
        self.checkpoint, self.optimizer, self.saved_seq = folder, True, self._changed_seq
        self._updates, self._work_s = 0, 0.0
        for entry in self.since:
            if entry.seq <= self.saved_seq:
                entry.call = None
        self.since = [entry for entry in self.since if entry.call is not None]
        await self.records.saved(self)
        if before is not None and before.parent == self.folder and before != folder:
            await asyncio.to_thread(shutil.rmtree, before, ignore_errors=True)

    def _id(self, call: c.ModelCall) -> str:
        return f"{self.id}/{call.seq}"


def _metrics(report: Report) -> dict[str, float]:
    """What an update reports, for the client.

    >>> _metrics(Report(tokens=5, responses=1, grad_norm=0.5, lr=1e-4))["grad_norm"]
    0.5
    """
    numbers = {name: value for name, value in asdict(report).items() if name in ("tokens", "grad_norm", "lr")}
    return {name: float(value) for name, value in numbers.items()} | {"skipped": float(bool(report.skipped))}
