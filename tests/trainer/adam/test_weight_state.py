"""The state of weights in host memory and on the device: the same numbers, bit for bit. Moments in 8 bits."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn

from windfall.recipe.lora import Lora
from windfall.recipe.sections import Train
from windfall.trainer.adam import weight_state
from windfall.trainer.model import lora
from windfall.trainer.model.gradients import trained
from windfall.trainer.optimizer import Optimizer
from windfall.trainer.ranks import sharded_file
from windfall.trainer.ranks.ranks import TrainerRanks
from windfall.trainer.sleep import SleepingState

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"))]
SHARES = (0.0, 0.4, 1.0)
Kind = Literal["adamw", "adamw_8bit"]


class Tied(nn.Module):
    """Tied embeddings, a weight that gets no gradient, and rows of one block, of two, and of none."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm = nn.Embedding(37, 32), nn.Parameter(torch.ones(32))
        self.up, self.down, self.unused = nn.Linear(32, 512), nn.Linear(512, 32), nn.Parameter(torch.ones(5))
        self.head = nn.Linear(32, 37, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids) * self.norm
        return self.head(x + self.down(torch.relu(self.up(x))))


def model_of(dtype: torch.dtype, device: str = "cpu", *, adapters: bool = False) -> nn.Module:
    torch.manual_seed(0)
    if not adapters:
        return Tied().to(device, dtype)
    from windfall.models import load

    model: Any = load.load("tiny", dtype=str(dtype).removeprefix("torch."), device=device)
    lora.attach(model, Lora(rank=3), base="", seed=0)
    return model


def optimizer_of(model: nn.Module, share: float = 0.0, kind: Kind = "adamw", **more: Any) -> Optimizer:
    options = Train(**{"lr": 0.01, "weight_decay": 0.1, "clip_norm": 0.5, "optimizer": kind} | more)
    return Optimizer(trained(model), options, total_updates=10, host_share=share)


def train(model: Any, optimizer: Optimizer, updates: range) -> None:
    for n in updates:
        drawn = torch.Generator().manual_seed(n)
        if isinstance(model, Tied):
            ids = torch.randint(0, 37, (6, 9), generator=drawn)
            model(ids.to(model.norm.device)).float().square().sum().backward()
        else:
            for p in trained(model).values():
                total = optimizer.gradients.of(p)
                assert total is not None
                total.add_(torch.randn(p.shape, generator=drawn).to(p.device))
        norm, skipped = optimizer.update(9.0)
        assert norm > 0.5, "it is clipped"
        assert not skipped


def state_of(optimizer: Optimizer, path: Path) -> dict[str, Tensor]:
    from safetensors.torch import load_file

    sharded_file.write(path, optimizer.state(), TrainerRanks.alone())
    return load_file(path)


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks end within weights, and hold several."""
    monkeypatch.setattr(weight_state, "CHUNK", 2500)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("dtype", "adapters", "kind"),
    [
        (torch.float32, False, "adamw"),
        (torch.bfloat16, False, "adamw"),
        (torch.bfloat16, True, "adamw"),
        (torch.float32, False, "adamw_8bit"),
        (torch.bfloat16, False, "adamw_8bit"),
    ],
)
def test_updates_are_the_same_bit_for_bit_wherever_the_state_is(
    device: str, dtype: torch.dtype, adapters: bool, kind: Kind, tmp_path: Path
) -> None:
    """It is written by one, and continued by the next."""
    models = [model_of(dtype, device, adapters=adapters) for _ in SHARES]
    optimizers = [optimizer_of(model, share, kind) for model, share in zip(models, SHARES, strict=True)]
    files = []
    for n, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
        train(model, optimizer, range(4))
        assert (optimizer.moved_bytes > 0) == (n > 0)
        files.append(state_of(optimizer, tmp_path / f"{n}"))
    for file in files[1:]:
        assert file.keys() == files[0].keys()
        assert all(torch.equal(t, files[0][name]) for name, t in file.items())
    for n, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
        optimizer.restore(tmp_path / f"{n - 1 if n else 2}")
        train(model, optimizer, range(4, 6))
    for model in models[1:]:
        assert all(map(torch.equal, model.parameters(), models[0].parameters()))


@pytest.mark.parametrize("kind", ["adamw", "adamw_8bit"])
def test_the_state_in_host_memory_is_not_on_the_device_and_does_not_sleep(kind: Kind) -> None:
    nbytes = {}
    for share in SHARES:
        model = model_of(torch.bfloat16)
        optimizer = optimizer_of(model, share, kind)
        train(model, optimizer, range(1))
        gradients = {g.data_ptr() for g in optimizer.gradients.all()}
        nbytes[share] = sum(t.nbytes for t in optimizer.tensors() if t.data_ptr() not in gradients)
        sleeping = SleepingState(optimizer.tensors)
        sleeping.sleep()
        sleeping.wake()
        train(model, optimizer, range(1, 2))
        moved = optimizer.moved_bytes
        assert moved == 2 * (nbytes[0.0] - nbytes[share]), "to the device and back"
    assert nbytes[1.0] == 0 < nbytes[0.4] < nbytes[0.0]


def test_a_weight_without_a_gradient_keeps_its_state() -> None:
    model = model_of(torch.float32)
    optimizer = optimizer_of(model, 1.0)
    train(model, optimizer, range(2))
    state = optimizer.state()
    assert "step.up.weight" in state
    assert "step.unused" not in state
    assert torch.equal(model.get_parameter("unused"), torch.ones(5))


def test_host_memory_that_cannot_be_pinned_is_an_error_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    class Full:
        def cudaHostRegister(self, *_: int) -> int:
            return 2

    monkeypatch.setattr(torch.cuda, "cudart", Full)
    with pytest.raises(weight_state.WindfallError, match=r"train\.offload: 0\.4 GB of host memory cannot be pinned"):
        weight_state.HostMemory(400_000_000, pinned=True)
