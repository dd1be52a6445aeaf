"""The matrix library of a CPU: measured at the start of a process, fixed in a deterministic run."""

from __future__ import annotations

import json
import platform
import time
from collections.abc import Iterator

import pytest
import torch

from windfall import devices
from windfall.link.messages import EngineSpec
from windfall.worker import engine_factory

needs_onednn = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this torch has no oneDNN")


class Model(torch.nn.Module):
    dtype = torch.float32

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(48, 64)


@pytest.fixture(autouse=True)
def restore_setting() -> Iterator[None]:
    before = torch.backends.mkldnn.enabled
    devices._onednn_is_faster.cache_clear()
    yield
    devices._onednn_is_faster.cache_clear()
    torch.backends.mkldnn.enabled = before  # pyright: ignore[reportAttributeAccessIssue]


def slow_when(monkeypatch: pytest.MonkeyPatch, onednn: bool, seconds: float = 0.004) -> list[tuple[int, ...]]:
    """Real products, with a delay for one of the two libraries. The list collects the shapes that were multiplied."""
    real, seen = torch.nn.functional.linear, []

    def linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        seen.append(tuple(weight.shape))
        if torch.backends.mkldnn.enabled == onednn:
            time.sleep(seconds)
        return real(x, weight)

    monkeypatch.setattr(torch.nn.functional, "linear", linear)
    return seen


@needs_onednn
@pytest.mark.parametrize("onednn_is_slow", [True, False])
def test_the_faster_library_is_used(monkeypatch: pytest.MonkeyPatch, onednn_is_slow: bool) -> None:
    seen = slow_when(monkeypatch, onednn_is_slow)
    assert devices.choose_matmul_library(Model(), deterministic=False) is not onednn_is_slow
    assert torch.backends.mkldnn.enabled is not onednn_is_slow
    assert set(seen) == {(64, 48)}
    count = len(seen)
    devices.choose_matmul_library(Model(), deterministic=False)
    assert len(seen) == count, "the measurement was not cached"


@needs_onednn
@pytest.mark.parametrize("onednn_is_slow", [True, False])
def test_deterministic_run_does_not_measure(monkeypatch: pytest.MonkeyPatch, onednn_is_slow: bool) -> None:
    seen = slow_when(monkeypatch, onednn_is_slow)
    torch.backends.mkldnn.enabled = onednn_is_slow  # pyright: ignore[reportAttributeAccessIssue]
    used = devices.choose_matmul_library(Model(), deterministic=True)
    assert used is torch.backends.mkldnn.enabled is (platform.machine() not in ("aarch64", "arm64"))
    assert seen == []


@needs_onednn
def test_building_an_engine_sets_the_library() -> None:
    fixed = platform.machine() not in ("aarch64", "arm64")
    torch.backends.mkldnn.enabled = not fixed  # pyright: ignore[reportAttributeAccessIssue]
    shape = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    spec = EngineSpec(
        model_config=json.dumps({"model_type": "llama", "vocab_size": 50, **shape}), dtype="float32", kv_tokens=64,
        page_size=16, max_running=2, max_rows=64, deterministic=True, longest=32, wanted=2,
    )  # fmt: skip
    engine_factory.build_engine(spec, "cpu")
    assert torch.backends.mkldnn.enabled is fixed
