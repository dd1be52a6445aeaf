"""The trainer's own engine, used by the worker named `local`. It is in the trainer's process and on its device. At any
moment either the engine steps or the trainer works, never both.

    trainer's thread   acquire() ── waits for the end of a step or swap ──▶ work ──▶ release()
    engine's thread    acquire_for_engine(timeout) ──▶ step or swap ──▶ release()

The trainer goes first: the engine's thread takes the turn again and again, and would win every race. While the engine
waits for the trainer, other orders still take effect: `step` returns after at most WAIT_S.

A trainer with one process has a TrainerEngine, which shares the trainer's module, so new weights cost nothing:

    valid ── invalidate(): an update begins ──▶ stale: no steps ── swap(): the controller's Load ──▶ valid

- Weights that belong to no version, or to a version that the controller has not asked this engine to load, generate no
  token. The trainer calls `invalidate` before it changes the weights; the engine steps again after `swap`.
- `swap` refuses a version that the trainer does not hold: a Load may be overtaken by the next update.
- If the run trains adapters, the engine has merged copies of the adapted matrices and shares the rest (merged_model.py
  explains why). `swap` computes them anew.

A rank of a sharded trainer has a RankEngine (rank_engine.py).

Engine and trainer may also share the device's memory. Then the trainer calls `make_room` before it trains, while it has
the turn, and the engine frees its KV cache until its next step. Orders to the engine and `make_room` are called from
different threads, so a lock, held only for short moments, keeps them apart.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from windfall.engine.base import Counters, Engine
from windfall.errors import WindfallError
from windfall.free_memory import free_bytes
from windfall.link.messages import Load
from windfall.types import Capabilities, Chunk, Request
from windfall.weights.pulling.pull import PulledWeights, WeightPuller

WAIT_S = 0.005
"""Upper limit (seconds) for the time that a step waits for the trainer."""


class TrainerTurn:
    """The lock between trainer and engine. As a context manager it is the trainer's."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._taken = False
        self._waiting = 0
        """Number of threads of the trainer that want the turn."""

    def acquire(self) -> None:
        with self._changed:
            self._waiting += 1
            try:
                self._changed.wait_for(lambda: not self._taken)
                self._taken = True
            finally:
                self._waiting -= 1

    def acquire_for_engine(self, timeout_s: float | None = None) -> bool:
        with self._changed:
            free = self._changed.wait_for(lambda: not self._taken and not self._waiting, timeout_s)
            self._taken = self._taken or free
            return free

    def release(self) -> None:
        with self._changed:
            self._taken = False
            self._changed.notify_all()

    def __enter__(self) -> None:
        self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


class TrainerEngine(Engine):
    """An engine whose module is changed by the trainer while it has the turn."""

    def __init__(
        self,
        engine: Engine,
        turn: TrainerTurn,
        *,
        published: Callable[[], Any] | None = None,
        share_memory: bool = False,
        merged: Any = None,
    ) -> None:
        """`published` returns the manifest of the version that the trainer's weights are, or None while they belong to
        no version. Without it, every swap is accepted. `merged`: the MergedModel whose module the engine runs; None if
        it runs the trainer's own."""
        self._engine = engine
        self._turn = turn
        self._orders_lock = threading.Lock()
        self._published = published
        self._merged = merged
        self._stale = True
        self._share_memory = share_memory
        self.lent_bytes = 0
        """Device memory that `make_room` has freed, and the engine allocates again for its next step."""
        self.waiting = False
        """Whether the engine waits for the trainer or for a Load of its new weights. This is not a fault."""

    @property
    def version(self) -> int:
        return self._engine.version

    @property
    def counters(self) -> Counters:
        return self._engine.counters

    @property
    def capabilities(self) -> Capabilities:
        return self._engine.capabilities

    @property
    def limit(self) -> int:
        return self._engine.limit

    @property
    def kv_tokens(self) -> int:
        return self._engine.kv_tokens

    def __len__(self) -> int:
        return len(self._engine)

    def add(self, request: Request) -> None:
        with self._orders_lock:
            self._engine.add(request)

    def cancel(self, id: str) -> None:
        with self._orders_lock:
            self._engine.cancel(id)

    def remember(self, group: str, id: str, position: int, tokens: Sequence[int]) -> None:
        with self._orders_lock:
            self._engine.remember(group, id, position, tokens)

    def step(self) -> list[Chunk]:
        self.waiting = True
        if self._stale:
            time.sleep(WAIT_S)
            return []
        if not self._turn.acquire_for_engine(WAIT_S):
            return []
        try:
            if self._stale or not self._wake():  # the trainer had the turn, and has changed the weights
                return []
            self.waiting, self.lent_bytes = False, 0
            return self._engine.step()
        finally:
            self._turn.release()

    def collect(self) -> list[list[Chunk]]:
        if not self._turn.acquire_for_engine(WAIT_S):
            return []
        try:
            return self._engine.collect()
        finally:
            self._turn.release()

    def swap(self, version: int, weights: Mapping[str, Any] | None = None, *, policy: str = "") -> None:
        assert weights is None and not policy, "the engine uses the weights of the trainer"
        self.waiting = True
        self._turn.acquire_for_engine()
        try:
            self._load(version)
            self._stale = False
        finally:
            self._turn.release()

    def _load(self, version: int) -> None:
        """Use this version from now on. Raises WindfallError if the trainer does not have it."""
        if self._published is not None:
            manifest = self._published()
            if manifest is None or manifest.version != version:
                raise WindfallError(f"the trainer is no longer at version {version}")
        self.waiting = False
        if self._merged is not None:
            self._merged.merge()
        self._engine.swap(version)

    def _wake(self) -> bool:
        """Whether the engine has its weights."""
        return True

    def invalidate(self) -> None:
        """The weights are about to change: generate nothing until the next `swap`. The caller must have the turn."""
        self._stale = self.waiting = True

    def make_room(self) -> None:
        """Free the memory that the engine does not need during training. The caller must have the turn."""
        if self._share_memory:
            free = _free_device_bytes()
            with self._orders_lock:
                self._engine.sleep()
            self.lent_bytes += max(0, _free_device_bytes() - free)


def _free_device_bytes() -> int:
    return free_bytes("cuda") if torch.cuda.is_initialized() else 0


class TrainerWeights(WeightPuller):
    """The engine itself has or reads the weights of the published version. `published`
    returns its manifest, or None while the weights belong to no version."""

    def __init__(self, published: Callable[[], Any]) -> None:
        self.published = published

    def pull(self, load: Load, ask: Any = None, *, stop: threading.Event | None = None) -> PulledWeights:
        del ask, stop
        manifest = self.published()
        if manifest is None or (manifest.version, manifest.digest) != (load.version, load.digest):
            raise ValueError(f"the trainer is not at version {load.version}")
        return PulledWeights(digest=manifest.digest)
