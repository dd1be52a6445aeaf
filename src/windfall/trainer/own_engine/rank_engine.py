"""The engine of one rank of a sharded trainer. No rank has the whole model, so each engine has a copy of its own.

- The engine copies a version from the memory to which the ranks of its machine publish (PublishedWeights). If the ranks
  are on several machines, none of them has all rows there, so the engine pulls the version as workers do
  (PulledCopy).
- While the trainer trains, the engine has neither a KV cache nor weights (`make_room`). Its next step copies the same
  version again. If that is no longer available, the engine waits for the next `swap`.
- Its weights belong to their version whatever the trainer does, so an update does not make them stale.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

from windfall.engine.base import Engine
from windfall.engine.module_weights import WeightMemory
from windfall.errors import WindfallError
from windfall.link.messages import Load
from windfall.trainer.own_engine.trainer_engine import TrainerEngine, TrainerTurn, TrainerWeights
from windfall.weights.buffers import views
from windfall.weights.manifest import Manifest
from windfall.weights.merged import MergedWeights
from windfall.weights.publishing.publish import Publisher
from windfall.weights.pulling.pull import Ask, PulledWeights, Puller

Reading = Callable[[int], AbstractContextManager[Mapping[str, Any] | None]]
"""The weights of a version, which do not change inside the context; None if they are not available."""


class PublishedWeights(TrainerWeights):
    """The versions in the memory of this machine. No rank overwrites one while this rank's engine has the turn: each
    withdraws it first, in an order of its own, and all wait for that."""

    def __init__(self, publisher: Publisher) -> None:
        super().__init__(lambda: publisher.current)
        self._publisher = publisher

    @contextlib.contextmanager
    def reading(self, version: int) -> Iterator[Mapping[str, Any] | None]:
        found, base = self._publisher.find(version), self._publisher.base
        if found is None:
            yield None
            return
        adapted = views(base.buffer.data, base.manifest.entries) if base is not None and found.manifest.base else None
        yield merged(views(found.buffer.data, found.manifest.entries), adapted, found.manifest)


class PulledCopy(Puller):
    """A copy of the newest version that was pulled, from all machines of the trainer. The engine reads it itself."""

    def pull(self, load: Load, ask: Ask | None = None, *, stop: threading.Event | None = None) -> PulledWeights:
        return replace(super().pull(load, ask, stop=stop), tensors=None)

    @contextlib.contextmanager
    def reading(self, version: int) -> Iterator[Mapping[str, Any] | None]:
        if not self._base.lock.acquire(blocking=False):
            yield None
            return
        try:
            held = self.held
            if held is None or held.version != version:
                yield None
                return
            yield merged(self.tensors(), self.base_tensors() if held.base else None, held)
        finally:
            self._base.lock.release()


def merged(tensors: Mapping[str, Any], base: Mapping[str, Any] | None, manifest: Manifest) -> Mapping[str, Any]:
    """What an engine must copy: the tensors, or an adapter merged into its base."""
    return tensors if base is None else MergedWeights(base, tensors, manifest.scale)


class RankEngine(TrainerEngine):
    def __init__(self, engine: Engine, turn: TrainerTurn, model: Any, reading: Reading) -> None:
        """`model`: the module that the engine runs."""
        super().__init__(engine, turn, share_memory=True)
        self._memory = WeightMemory(model)
        self._reading = reading

    def _load(self, version: int) -> None:
        with self._reading(version) as weights:
            if weights is None:
                raise WindfallError(f"the trainer no longer publishes version {version}")
            self.waiting = False
            self._stale = True  # until the copy is complete
            self._memory.allocate()
            self._engine.swap(version, weights)
            self._stale = False

    def _wake(self) -> bool:
        if self._memory.freed:
            try:
                self._load(self.version)
            except WindfallError:
                self._stale = True
        return not self._stale

    def invalidate(self) -> None:
        """Its weights stay those of their version."""

    def make_room(self) -> None:
        super().make_room()
        if not self._memory.freed:
            self._memory.free()
