"""Brings adapters into the slots of the trainer: models come and go, slots stay (recipe: [policies.NAME] slot = ...).

    TrainSlots.hold(model)      a slot with the adapter of this model         one call of a model at a time
    SampleSlots.hold(weights)   a policy that workers hold these weights as   any number of calls at once

An adapter stays in its slot until another one needs the room: then the least recently used idle one leaves. A lost
trainer empties all slots. `Trainers` finds out, waits for the next one, and whoever was using a slot tries again.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from windfall.controller.remote_trainer import RemoteTrainer
from windfall.errors import WindfallError
from windfall.tinker.accounts.fairness import TrainerTurns
from windfall.tinker.models.slots import Slots
from windfall.training import TrainerLost

if TYPE_CHECKING:
    from windfall.tinker.models.model import TrainedModel

LOOK_S = 0.2
"""Seconds between looks whether the trainer was replaced."""


class Trainers:
    """The trainer's links to the policies of the run, all of one process. It is lost as a whole."""

    def __init__(
        self, trainers: Mapping[str, RemoteTrainer], connect: Callable[[], Awaitable[Mapping[str, object]]],
        log: Callable[[str], None],
    ) -> None:  # fmt: skip
        """`connect`: waits until all are connected, continues with them, and returns what each of them said first.
        `log`: is told why a trainer was lost."""
        self.trainers = dict(trainers)
        self.emptied: list[Callable[[], Awaitable[None]]] = []
        """Called in order when a new trainer has connected: all slots are empty."""
        self._connect, self._log = connect, log
        self._lock = asyncio.Lock()
        self._known: dict[str, object] = {}
        """What each trainer of the process that is in use said first."""

    @property
    def current(self) -> bool:
        """Whether the process that is in use is connected."""
        return bool(self._known) and all(t.hello is self._known.get(name) for name, t in self.trainers.items())

    async def ready(self) -> None:
        """Wait for a trainer, if the last one was lost."""
        async with self._lock:
            while not self.current:
                self._known = {}
                try:
                    connected = dict(await self._connect())
                    for emptied in self.emptied:
                        await emptied()
                except TrainerLost as e:
                    self._log(str(e))
                else:
                    self._known = connected  # last: who is canceled before leaves it to the next one

    async def lost(self, error: TrainerLost) -> None:
        """A verb raised this: wait for the next trainer."""
        self._log(str(error))
        await asyncio.sleep(LOOK_S)  # its link may not have ended yet
        await self.ready()

    async def watch(self) -> None:
        """Find out if the trainer is lost while no verb is performed: responses need its weights."""
        while True:
            await asyncio.sleep(LOOK_S)
            if not self.current and not self._lock.locked():
                self._log("it disconnected")
                await self.ready()


class TrainSlots:
    def __init__(self, trainers: Trainers, names: Iterable[str], turns: TrainerTurns) -> None:
        self._trainers, self._slots, self._turns = trainers, Slots(names), turns
        self._loaded: dict[str, tuple[TrainedModel, object]] = {}
        """The model whose adapter was loaded into each slot, and what the trainer that did so had said first."""

    def _holder(self, slot: str) -> TrainedModel | None:
        """The model whose adapter the trainer has in a slot: a new trainer has none."""
        model, hello = self._loaded.get(slot, (None, None))
        return model if self._trainers.trainers[slot].hello is hello else None

    @property
    def full(self) -> bool:
        """Whether another model would have to wait."""
        return all(slot.users for slot in self._slots)

    def slot_of(self, model: TrainedModel) -> str:
        """The slot that holds its adapter; "" if none does."""
        return next((slot.name for slot in self._slots if self._holder(slot.name) is model), "")

    @contextlib.asynccontextmanager
    async def hold(self, model: TrainedModel) -> AsyncIterator[RemoteTrainer]:
        """A slot with its adapter, for one call. Raises TrainerLost."""
        async with self._slots.using(model.id, model.account) as slot:
            try:
                trainer = self._trainers.trainers[slot.name]
                if (before := self._holder(slot.name)) is not model:
                    if before is not None:
                        with self._turns.paid_by(before.account):
                            await before.leave(trainer)
                        self._loaded.pop(slot.name, None)
                    hello = trainer.hello
                    await model.enter(trainer)
                    self._loaded[slot.name] = model, hello
                yield trainer
            except BaseException:  # raised again: a verb that was begun may still be performed
                self._loaded.pop(slot.name, None)
                raise

    def drop(self, model: TrainedModel, *, gone: bool = False) -> None:
        """Forget the adapter that the slot holds: it may have changed in a call that failed. `gone`: the model needs no
        slot any more."""
        slot = self._slots.holding(model.id)
        if slot is not None:
            self._loaded.pop(slot.name, None)
        if gone:
            self._slots.forget(model.id)

    async def save(self) -> None:
        """Save what is in the slots. Raises TrainerLost."""
        for model, _ in list(self._loaded.values()):
            async with self.hold(model) as trainer:
                await model.leave(trainer)


class SampleSlots:
    """`load(slot, folder)` loads an adapter and offers it to workers. The weights of one key may change (`changed`)."""

    def __init__(self, trainers: Trainers, names: Iterable[str], load: Callable[[str, Path], Awaitable[None]]) -> None:
        self._trainers, self._slots, self._load = trainers, Slots(names), load
        self._loaded: dict[str, Path] = {}
        """The weights that workers can have for each slot."""
        self._wanted: dict[str, Path] = {}
        """The weights of each key that is in use."""
        self._locks = {slot.name: asyncio.Lock() for slot in self._slots}
        trainers.emptied.append(self._emptied)

    async def _emptied(self) -> None:
        """Responses continue on workers, but a worker that joins now needs their weights."""
        self._loaded.clear()
        for slot in self._slots:
            if (folder := self._wanted.get(slot.key)) is not None:
                with contextlib.suppress(WindfallError):  # a damaged folder: the next response of it says so
                    await self._bring(slot.name, folder)

    @contextlib.asynccontextmanager
    async def hold(self, key: str, account: str, folder: Callable[[], Path]) -> AsyncIterator[str]:
        """The policy that these weights are, for a call of the account. `folder`: where they are, when they get a slot.
        Raises TrainerLost, and WindfallError if they cannot be loaded."""
        async with self._slots.using(key, account) as slot:
            try:
                self._wanted[key] = folder()
                await self._bring(slot.name, folder())
                yield slot.name
            finally:
                if slot.users == 1:
                    self._wanted.pop(key, None)

    def drop(self, key: str) -> None:
        """Load these weights again for the next response."""
        slot = self._slots.holding(key)
        if slot is not None:
            self._loaded.pop(slot.name, None)

    async def _bring(self, slot: str, folder: Path) -> None:
        async with self._locks[slot]:
            if self._loaded.get(slot) != folder:
                self._loaded.pop(slot, None)
                await self._load(slot, folder)
                self._loaded[slot] = folder

    async def changed(self, key: str, folder: Path) -> None:
        """These are the weights of the key from now on, also for responses that are being generated."""
        slot = self._slots.holding(key)
        if slot is not None and slot.users:
            self._wanted[key] = folder
            await self._bring(slot.name, folder)
