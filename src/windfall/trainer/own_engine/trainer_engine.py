"""The trainer's own engine, used by the worker named `local`. It shares the trainer's module and device, so new weights
cost nothing. At any moment either the engine steps or the trainer works, never both.

    valid ── invalidate(): an update begins ──▶ stale: no steps ── swap(): the controller's Load ──▶ valid

Rules:
- Weights that belong to no version, or to a version that the controller has not asked this engine to load, generate no
  token. The trainer calls `invalidate` before it changes the weights; the engine steps again after `swap`.
- `swap` refuses a version that the trainer does not hold: a Load may be overtaken by the next update.
- While the engine waits for the trainer, other orders still take effect: `step` returns after at most WAIT_S.

If the run trains adapters, the engine has merged copies of the adapted matrices and shares the rest (merged_model.py
explains why). `swap` computes them anew.

Engine and trainer may also share the device's memory. Then the trainer calls `make_room` before it trains, while it
holds the lock, and the engine frees its KV cache until its next step. Orders to the engine and `make_room` are called
from different threads, so a second lock, held only for short moments, keeps them apart.

With an EngineGroup, which has its own copies of the weights in other processes, everything above holds as well. Its
engines go on when `step` has returned, so the trainer pauses them once it has the lock, and `make_room` frees the
group's weights, too. The group merges adapters by itself.

    trainer's thread   acquire() ── waits for the end of a call ──▶ pause() ──▶ work ──▶ release()
    engine's thread    engines.acquire(timeout) ──▶ step or swap ──▶ engines.release()

The trainer goes first: the engine's thread takes the lock again and again, and would win every race.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from windfall.engine.base import Counters, Engine
from windfall.errors import WindfallError
from windfall.types import Capabilities, Chunk, Request

WAIT_S = 0.005
"""Upper limit (seconds) for the time that a step waits for the trainer."""


class TrainerTurn:
    """The trainer's side, a lock. `engines` is the other side, the lock of a TrainerEngine."""

    def __init__(self, pause: Callable[[], None] = lambda: None) -> None:
        """`pause` returns when the engines do not compute any more. They go on at their next step or swap."""
        self.pause = pause
        self._changed = threading.Condition()
        self._taken = False
        self._waiting = 0
        """Number of threads of the trainer that want the lock."""
        self.engines = EnginesTurn(self)

    def acquire(self) -> bool:
        with self._changed:
            self._waiting += 1
            try:
                self._changed.wait_for(lambda: not self._taken)
                self._taken = True
            finally:
                self._waiting -= 1
        try:
            self.pause()
        except BaseException:  # raised again, without the lock
            self.release()
            raise
        return True

    def release(self) -> None:
        with self._changed:
            self._taken = False
            self._changed.notify_all()

    def acquire_for_engines(self, timeout_s: float | None) -> bool:
        with self._changed:
            free = self._changed.wait_for(lambda: not self._taken and not self._waiting, timeout_s)
            self._taken = self._taken or free
            return free

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


class EnginesTurn:
    """The same lock for the engine's thread."""

    def __init__(self, turn: TrainerTurn) -> None:
        self._turn = turn

    def acquire(self, timeout: float = -1) -> bool:
        return self._turn.acquire_for_engines(None if timeout < 0 else timeout)

    def release(self) -> None:
        self._turn.release()

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


class TrainerEngine(Engine):
    """An engine whose module is changed by the trainer, which holds `lock` while it does so."""

    def __init__(
        self,
        engine: Engine,
        lock: threading.Lock | EnginesTurn,
        *,
        published: Callable[[], Any] | None = None,
        share_memory: bool = False,
        merged: Any = None,
    ) -> None:
        """`published` returns the manifest of the version that the trainer's weights are, or None while they belong to
        no version. Without it, every swap is accepted. `merged`: the MergedModel whose module the engine runs; None if
        it runs the trainer's own."""
        self._engine = engine
        self._lock = lock
        self._orders_lock = threading.Lock()
        self._published = published
        self._merged = merged
        self._stale = True
        self._share_memory = share_memory
        self.waiting = False
        """Whether the engine waits for the trainer or for a Load of its new weights. This is not a fault."""

    @property
    def version(self) -> int:
        return self._engine.version

    @version.setter
    def version(self, version: int) -> None:
        self._engine.version = version

    @property
    def counters(self) -> Counters:
        return self._engine.counters

    @property
    def capabilities(self) -> Capabilities:
        return self._engine.capabilities

    @property
    def limit(self) -> int:
        return self._engine.limit

    def __len__(self) -> int:
        return len(self._engine)

    def add(self, request: Request) -> None:
        with self._orders_lock:
            self._engine.add(request)

    def cancel(self, id: str) -> None:
        with self._orders_lock:
            self._engine.cancel(id)

    def step(self) -> list[Chunk]:
        self.waiting = True
        if self._stale:
            time.sleep(WAIT_S)
            return []
        if not self._lock.acquire(timeout=WAIT_S):
            return []
        try:
            if self._stale:  # the trainer had the lock, and has changed the weights
                return []
            self.waiting = False
            return self._engine.step()
        finally:
            self._lock.release()

    def invalidate(self) -> None:
        """The weights are about to change: generate nothing until the next `swap`. The caller must hold `lock`."""
        self._stale = self.waiting = True

    def swap(self, version: int, weights: Mapping[str, Any] | None = None) -> None:
        assert weights is None, "the engine uses the weights of the trainer"
        self.waiting = True
        with self._lock:
            self._check_published(version)
            self.waiting = False
            if self._merged is not None:
                self._merged.merge()
            self._engine.swap(version)
            self._stale = False

    def _check_published(self, version: int) -> None:
        if self._published is None:
            return
        manifest = self._published()
        if manifest is None or manifest.version != version:
            raise WindfallError(f"the trainer is no longer at version {version}")

    def make_room(self) -> None:
        """Free the memory that the engine does not need during training. The caller must hold `lock`."""
        if self._share_memory:
            with self._orders_lock:
                self._engine.sleep()


class TrainerWeights:
    """Takes the place of a Puller: the weights are already here if they are the published version. `published` returns
    its manifest, or None while the weights belong to no version."""

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

    def base_tensors(self) -> Mapping[str, Any]:
        raise NotImplementedError("the engine merges the trainer's adapter by itself")
