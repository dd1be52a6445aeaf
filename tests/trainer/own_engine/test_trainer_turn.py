"""The trainer and the engine's thread take turns, and the trainer goes first."""

from __future__ import annotations

import threading
import time

from windfall.trainer.own_engine.trainer_engine import TrainerTurn

WAIT_S = 20.0


def test_trainer_goes_before_an_engine_that_never_waits() -> None:
    """A plain lock would be taken again by the engine's thread before the trainer's thread has woken up."""
    turn, stop = TrainerTurn(), threading.Event()
    turns = 0

    def step() -> None:
        nonlocal turns
        while not stop.is_set():
            if turn.acquire_for_engine(0.001):
                turns += 1
                turn.release()

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


def test_trainer_waits_for_the_end_of_a_step() -> None:
    turn = TrainerTurn()
    assert turn.acquire_for_engine()
    trainer = threading.Thread(target=turn.acquire, daemon=True)
    trainer.start()
    while not turn._waiting:
        time.sleep(0.001)
    turn.release()
    trainer.join(WAIT_S)
    assert not trainer.is_alive()
    assert not turn.acquire_for_engine(0.01)
    turn.release()
    assert turn.acquire_for_engine()
