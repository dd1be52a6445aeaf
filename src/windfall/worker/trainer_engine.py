"""The worker called `local`: the trainer's own engine. It shares the trainer's module and its device, so new weights
cost nothing, and at any moment either the engine steps or the trainer works, never both.

They may share the device's memory, too: then whoever is about to train calls `make_room`, while holding the lock, and
the engine gives up its KV cache until its next step. Orders to the engine come from one thread and `make_room` from
another, so a second lock, held for moments only, keeps those apart.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any

from windfall.engine.base import Counters, Engine
from windfall.types import Chunk, Request


class Shared:
    """An engine on a module that somebody else changes, while holding `lock`."""

    def __init__(self, engine: Engine, lock: threading.Lock, *, share_memory: bool = False) -> None:
        self._engine, self._lock, self._door = engine, lock, threading.Lock()
        self._sleep: Callable[[], None] | None = getattr(engine, "sleep", None) if share_memory else None
        self.waiting = False
        """For the trainer to be done: that is no fault of the engine's."""

    @property
    def version(self) -> int:
        return self._engine.version

    @version.setter
    def version(self, version: int) -> None:
        self._engine.version = version

    @property
    def counters(self) -> Counters:
        return getattr(self._engine, "counters", Counters())

    @property
    def limit(self) -> int:
        return getattr(self._engine, "limit", 0)

    def __len__(self) -> int:
        return len(self._engine)

    def add(self, request: Request) -> None:
        with self._door:
            self._engine.add(request)

    def cancel(self, id: str) -> None:
        with self._door:
            self._engine.cancel(id)

    def step(self) -> list[Chunk]:
        self.waiting = True
        with self._lock:
            self.waiting = False
            return self._engine.step()

    def swap(self, version: int, weights: Mapping[str, Any] | None = None) -> None:
        assert weights is None, "the weights are the trainer's"
        self.waiting = True
        with self._lock:
            self.waiting = False
            self._engine.swap(version)

    def make_room(self) -> None:
        """For training: what the engine can do without is free. Only for whoever holds `lock`."""
        if self._sleep is not None:
            with self._door:
                self._sleep()


class HasThem:
    """Stands where other workers have a Puller: the weights are here, if they are the version that was published."""

    bytes_received = 0

    def __init__(self, published: Callable[[], Any]) -> None:
        self._published = published

    def pull(self, url: str, version: int, digest: str, *, stop: threading.Event | None = None) -> Any:
        del url, stop
        manifest = self._published()
        if manifest is None or (manifest.version, manifest.digest) != (version, digest):
            raise ValueError(f"the trainer is not at version {version}")
        return manifest

    def tensors(self) -> None:
        return None
