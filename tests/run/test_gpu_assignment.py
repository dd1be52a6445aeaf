"""Workers spread evenly over the GPUs of a machine, whatever order they come and go in."""

from __future__ import annotations

import random

import pytest

from windfall.defaults import KV_SHARE
from windfall.run.gpu_assignment import MIN_SHARE, GpuAssignment


@pytest.mark.parametrize(("gpus", "trainer"), [(1, 1), (4, 1), (8, 8), (3, 5)])
def test_no_gpu_has_two_processes_more_than_another(gpus: int, trainer: int) -> None:
    """The trainer's processes count. Workers come and go at random."""
    it, rng, here = GpuAssignment(gpus, trainer=trainer), random.Random(gpus), dict[str, int]()
    count = [int(gpu < trainer) for gpu in range(gpus)]
    for n in range(200):
        if here and rng.random() < 0.4:
            gone = rng.choice(sorted(here))
            it.release(gone)
            count[here.pop(gone)] -= 1
        else:
            fewest = min(count)
            gpu = it.assign(f"w{n}")
            assert gpu is not None
            assert count[gpu] == fewest
            here[f"w{n}"] = gpu
            count[gpu] += 1


def test_workers_use_the_gpus_that_the_trainer_leaves_first() -> None:
    it = GpuAssignment(4, trainer=2)
    assert [it.assign(f"w{n}") for n in range(6)] == [2, 3, 0, 1, 2, 3]


def test_restarted_worker_gets_the_place_that_its_predecessor_left() -> None:
    it = GpuAssignment(3, trainer=0)
    assert [it.assign(name) for name in ("w1.1", "w2.1", "w3.1")] == [0, 1, 2]
    it.release("w2.1")
    it.release("never there")
    assert it.assign("w2.2") == 1


def test_memory_is_divided_before_all_workers_are_there() -> None:
    it = GpuAssignment(2, trainer=2, workers=5)
    shares = {}
    for n in range(5):
        gpu = it.assign(f"w{n}")
        shares.setdefault(gpu, []).append(it.memory_share(f"w{n}"))
    assert shares == {0: [KV_SHARE / 3] * 3, 1: [KV_SHARE / 2] * 2}
    more = it.assign("unexpected")
    assert (more, it.memory_share("unexpected")) == (1, KV_SHARE / 3)


def test_share_is_never_too_small_to_be_accepted() -> None:
    it = GpuAssignment(1, workers=500)
    it.assign("w1")
    assert it.memory_share("w1") == MIN_SHARE


def test_machine_without_gpus() -> None:
    it = GpuAssignment(0, workers=3)
    assert it.assign("w1") is None
    assert it.memory_share("w1") == KV_SHARE
