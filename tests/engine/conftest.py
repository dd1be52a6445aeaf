"""The models of the engine's tests: as an oracle, and with windfall's attention."""

from __future__ import annotations

import copy
import random
from typing import Any

import pytest
import torch

from tests.support.engines import reference_kernels  # noqa: F401  # GraphEngine also runs on a CPU
from tests.support.engines.small_models import MODELS, build
from windfall import devices
from windfall.engine.draft_length import WIDTHS, DraftLength
from windfall.models import attention


@pytest.fixture(scope="session", params=list(MODELS))
def plain(request: pytest.FixtureRequest) -> Any:
    """The model as transformers runs it: the oracle."""
    torch.set_num_threads(1)
    devices.choose_matmul_library()  # like a worker of a deterministic run
    return build(request.param)


@pytest.fixture(scope="session")
def model(plain: Any) -> Any:
    """The same weights with windfall's attention."""
    twin = type(plain)(copy.deepcopy(plain.config)).eval()  # the attention is named in the config
    twin.load_state_dict(plain.state_dict())
    twin.set_attn_implementation(attention.NAME)
    return twin


@pytest.fixture
def any_width(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines that speculate choose the width of every launch at random, whatever is faster."""
    rng = random.Random(3)

    def choose(self: DraftLength, batch: int, widest: int, *, measured: bool = True) -> int:
        return rng.choice([width for width in WIDTHS if width <= widest])

    monkeypatch.setattr(DraftLength, "choose", choose)
