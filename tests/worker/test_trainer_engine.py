"""The trainer's own engine: it alternates with the trainer, and waiting for the trainer does not count as stuck."""

from __future__ import annotations

import threading
import time
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
from hashing import Hashing

from windfall.link.messages import Work
from windfall.types import Sampling
from windfall.worker.engine_thread import EngineThread
from windfall.worker.trainer_engine import TrainerEngine, TrainerWeights


def test_engine_and_trainer_never_work_at_the_same_time() -> None:
    lock, made = threading.Lock(), threading.Event()
    engine = TrainerEngine(Hashing(Counter()), lock)
    host = EngineThread(engine, slots=4)
    host.start()
    host.attach(lambda message: made.set())
    with lock:  # the trainer is at it
        work = Work(handle=1, prompt=b"\x05\0\0\0", position=0, seed=1, max_tokens=5, sampling=Sampling(), stop=(0,))
        host.add([work])
        deadline = time.monotonic() + 10
        while not engine.waiting:
            assert time.monotonic() < deadline
            time.sleep(0.001)
        time.sleep(0.1)
        assert not made.is_set()
        assert host.stats().running == 1
        assert host.stats().idle_s == 0.0, "it is not stuck: it waits for its turn"
    assert made.wait(10)
    host.close()


def test_published_weights_need_no_pull() -> None:
    published: Any = None
    them = TrainerWeights(lambda: published)
    with pytest.raises(ValueError, match="not at version 3"):
        them.pull("", 3, "abc")
    published = SimpleNamespace(version=3, digest="abc")
    assert them.pull("", 3, "abc") is published
    assert them.tensors() is None
    with pytest.raises(ValueError, match="not at version 3"):
        them.pull("", 3, "other")


def test_only_the_trainer_changes_the_weights() -> None:
    engine = TrainerEngine(Hashing(Counter()), threading.Lock())
    engine.swap(4)
    assert engine.version == 4
    with pytest.raises(AssertionError):
        engine.swap(5, {"w": 1})


class Sleeper(Hashing):
    slept = 0

    def sleep(self) -> None:
        self.slept += 1


@pytest.mark.parametrize("share_memory", [True, False])
def test_engine_frees_memory_for_training_if_memory_is_shared(share_memory: bool) -> None:
    lock, engine = threading.Lock(), Sleeper(Counter())
    shared = TrainerEngine(engine, lock, share_memory=share_memory)
    with lock:
        shared.make_room()
    assert engine.slept == share_memory
    TrainerEngine(Hashing(Counter()), lock, share_memory=True).make_room()  # one that has nothing to give up
