"""Whose turn it is: the trainer's, or that of its engines in other processes. Never both.

    trainer's thread   acquire() ── waits for the end of a call ──▶ pause() ──▶ work ──▶ release()
    engine's thread    engines.acquire(timeout) ──▶ step or swap ──▶ engines.release()

A lock alone is not enough: the engines go on when `step` has returned and released it. So the trainer, once it has the
lock, pauses them. It also goes first: the engine's thread takes the lock again and again, and would win every race.
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
        self._trainer = self._engines = False
        self._waiting = 0
        """Number of threads of the trainer that want the lock."""
        self.engines = EnginesTurn(self)

    def acquire(self) -> bool:
        with self._changed:
            self._waiting += 1
            try:
                self._changed.wait_for(lambda: not self._trainer and not self._engines)
                self._trainer = True
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
            self._trainer = False
            self._changed.notify_all()

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()

    def acquire_for_engines(self, timeout_s: float | None) -> bool:
        with self._changed:
            free = self._changed.wait_for(
                lambda: not self._trainer and not self._engines and not self._waiting, timeout_s
            )
            self._engines = self._engines or free
            return free

    def release_by_engines(self) -> None:
        with self._changed:
            self._engines = False
            self._changed.notify_all()


class EnginesTurn:
    """The same lock for the engine's thread."""

    def __init__(self, turn: TrainerTurn) -> None:
        self._turn = turn

    def acquire(self, timeout: float = -1) -> bool:
        return self._turn.acquire_for_engines(None if timeout < 0 else timeout)

    def release(self) -> None:
        self._turn.release_by_engines()

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()
