"""Whose turn it is on the trainer's devices: the trainer's, or that of its own engine. Never both.

    trainer's thread   acquire() ── waits for the end of a call ──▶ pause() ──▶ work ──▶ release()
    engine's thread    engines.acquire(timeout) ──▶ step or swap ──▶ engines.release()

Engines in other processes go on when `step` has returned and released the lock. So the trainer, once it has the lock,
pauses them. It also goes first: the engine's thread takes the lock again and again, and would win every race.
"""

from __future__ import annotations

import threading
from collections.abc import Callable


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
