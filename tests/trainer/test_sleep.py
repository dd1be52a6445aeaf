"""A trainer's state out of the device's memory and back: training goes on as if nothing had happened."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from windfall.recipe.sections import Train
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
    first = {copy.data_ptr() for _, copy in state._asleep}
    state.wake()
    tensors.append(torch.ones(50))  # as Adam's moments appear after the first update
    state.sleep()
    assert first < {copy.data_ptr() for _, copy in state._asleep}
    state.wake()
    assert torch.equal(tensors[0], torch.arange(1000.0))


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
