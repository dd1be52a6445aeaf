"""The trainer and the engine's thread take turns, and the trainer goes first."""

from __future__ import annotations

import threading
import time

import pytest

from windfall.trainer.own_engine.trainer_engine import TrainerTurn

WAIT_S = 20.0


def test_trainer_goes_before_an_engine_that_never_waits() -> None:
    """A plain lock would be taken again by the engine's thread before the trainer's thread has woken up."""
    turn, stop = TrainerTurn(), threading.Event()
    turns = 0

    def step() -> None:
        nonlocal turns
        while not stop.is_set():
            if turn.engines.acquire(timeout=0.001):
                turns += 1
                turn.engines.release()

    engine = threading.Thread(target=step, daemon=True)
    engine.start()
    try:
        for _ in range(50):
            with turn:
                at = turns
                time.sleep(0.001)
                assert turns == at
    finally:
        stop.set()
        engine.join(WAIT_S)
    assert turns > 0


def test_trainer_waits_for_the_call_and_then_for_the_pause() -> None:
    seen: list[str] = []
    turn = TrainerTurn(lambda: seen.append("paused"))
    assert turn.engines.acquire()
    trainer = threading.Thread(target=lambda: (turn.acquire(), seen.append("trains")), daemon=True)
    trainer.start()
    while not turn._waiting:
        time.sleep(0.001)
    assert seen == []
    turn.engines.release()
    trainer.join(WAIT_S)
    assert seen == ["paused", "trains"]
    assert not turn.engines.acquire(timeout=0.01)
    turn.release()
    with turn.engines:
        pass


def test_lock_is_free_again_if_the_pause_fails() -> None:
    def fail() -> None:
        raise RuntimeError("device lost")

    turn = TrainerTurn(fail)
    with pytest.raises(RuntimeError, match="device lost"):
        turn.acquire()
    assert turn.engines.acquire(timeout=0.01)
