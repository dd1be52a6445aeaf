"""A trainer's state out of the device's memory and back: training goes on as if nothing had happened."""

from __future__ import annotations

import copy
import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from windfall import free_memory
from windfall.recipe.sections import Train
from windfall.trainer import sleep
from windfall.trainer.model.gradients import trained
from windfall.trainer.optimizer import Optimizer
from windfall.trainer.sleep import SleepingState

DEVICES = [
    "cpu",
    pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")),
]


def optimizer_of(model: nn.Module) -> Optimizer:
    return Optimizer(trained(model), Train(lr=0.1), total_updates=10)


def train(model: nn.Module, optimizer: Optimizer, x: Tensor) -> None:
    """Add a gradient, as a part of a step does."""
    model(x).float().square().sum().backward()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_training_continues_bit_for_bit_after_a_sleep_in_the_middle_of_a_step(device: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16)).to(device, dtype)
    other = copy.deepcopy(model)
    steady, sleeper = optimizer_of(model), optimizer_of(other)
    state = SleepingState(sleeper.tensors)
    xs = [torch.randn(4, 16, device=device, dtype=dtype) for _ in range(6)]
    for n, x in enumerate(xs):
        train(model, steady, x)
        train(other, sleeper, x)
        state.sleep()
        assert state.asleep
        state.wake()
        if n % 2:
            steady.update(1.0)
            sleeper.update(1.0)
    for a, b in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b)
    for a, b in zip(steady.tensors(), sleeper.tensors(), strict=True):
        assert torch.equal(a, b)


def test_a_sleeping_state_has_no_memory_on_the_device_and_says_how_much_it_needs() -> None:
    model = nn.Linear(64, 64).to(torch.bfloat16)
    optimizer = optimizer_of(model)
    train(model, optimizer, torch.ones(1, 64, dtype=torch.bfloat16))
    optimizer.update(1.0)
    state = SleepingState(optimizer.tensors)
    awake = state.nbytes
    assert awake >= 4 * 4 * sum(p.numel() for p in model.parameters())  # master, gradient and two moments in float32
    tensors = list(optimizer.tensors())
    state.sleep()
    assert all(t.untyped_storage().nbytes() == 0 for t in tensors)
    assert state.nbytes == awake
    assert all(p.untyped_storage().nbytes() for p in model.parameters())  # the engine generates with them
    state.sleep()  # a second order changes nothing
    state.wake()
    state.wake()
    assert not state.asleep
    assert state.nbytes == awake


def test_the_copies_of_an_earlier_sleep_are_used_again() -> None:
    tensors = [torch.arange(1000.0), torch.zeros(10)]
    state = SleepingState(lambda: tensors)
    state.sleep()
    first = {copy.data_ptr() for copy in state._memory._saved}
    state.wake()
    tensors.append(torch.ones(50))  # as Adam's moments appear after the first update
    state.sleep()
    assert first < {copy.data_ptr() for copy in state._memory._saved}
    state.wake()
    assert torch.equal(tensors[0], torch.arange(1000.0))


@pytest.fixture
def little_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(free_memory, "free_bytes", lambda device="cpu": 100)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.usefixtures("little_memory")
def test_without_memory_of_the_machine_the_state_sleeps_on_disk(
    device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sleep, "CHUNK_BYTES", 100)  # parts end within tensors
    tensors = [torch.arange(1000.0, device=device), torch.randn(7, 5, device=device).bfloat16(), torch.zeros(0)]
    before = [tensor.clone() for tensor in tensors]
    state = SleepingState(lambda: tensors, tmp_path)
    for _ in range(2):
        state.sleep()
        assert state.asleep
        assert not state.awake
        assert [copy.nbytes for copy in state._memory._saved + state._memory._kept] == []
        assert state._file._open is not None
        assert os.fstat(state._file._open.fileno()).st_size == 4000 + 70
        assert list(tmp_path.iterdir()) == [], "the file has no name: a kill leaves nothing of it"
        state.wake()
        assert state._file._open is None
        assert all(map(torch.equal, tensors, before))


@pytest.mark.usefixtures("little_memory")
@pytest.mark.parametrize("full", ["known", "found"])
def test_on_a_full_disk_the_state_stays_where_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, full: str) -> None:
    if full == "known":
        monkeypatch.setattr(sleep.shutil, "disk_usage", lambda folder: SimpleNamespace(free=5000))
    else:

        def refuse(fd: int, offset: int, length: int) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(os, "posix_fallocate", refuse)
    tensors = [torch.arange(1000.0)]
    state = SleepingState(lambda: tensors, tmp_path)
    with pytest.raises(RuntimeError, match=r"no room for 0\.0 GB: .* memory are free, and .* GB in /"):
        state.sleep()
    assert state.awake
    assert torch.equal(tensors[0], torch.arange(1000.0))
    assert state._file._open is None


def test_a_state_that_is_not_built_yet_says_what_it_will_need() -> None:
    tensors: list[Tensor] = []
    state = SleepingState(lambda: tensors)
    state.expected_bytes = 1000
    assert (state.nbytes, state.awake, state.asleep) == (1000, False, False)
    tensors.append(torch.zeros(500))
    assert (state.nbytes, state.awake) == (2000, True)
    assert state.room() == (0, 0), "not known on a CPU"


def test_without_room_on_the_device_the_state_stays_asleep_and_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = [torch.arange(100.0), torch.arange(50.0)]
    state = SleepingState(lambda: tensors)
    state.sleep()
    resize, calls = torch.UntypedStorage.resize_, []

    def refuse(storage: torch.UntypedStorage, size: int) -> torch.UntypedStorage:
        calls.append(size)
        if len(calls) == 2:
            raise torch.OutOfMemoryError("no room")
        return resize(storage, size)

    monkeypatch.setattr(torch.UntypedStorage, "resize_", refuse)
    with pytest.raises(torch.OutOfMemoryError):
        state.wake()
    assert state.asleep
    assert all(t.untyped_storage().nbytes() == 0 for t in tensors)
    state.wake()
    assert torch.equal(tensors[1], torch.arange(50.0))
