"""Weights held in host memory and activated on the device. On a GPU if there is one, else on the CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.support.engines.small_models import build, drain, requests, tokens
from windfall.engine.cuda.engine import GraphEngine
from windfall.engine.cuda.ready_weights import ALIGN, ReadyWeights
from windfall.errors import WindfallError
from windfall.weights.merged import MergedWeights

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def ready(model: Any) -> ReadyWeights:
    return ReadyWeights(model.config.to_dict(), dtype=torch.float32, device=DEVICE)


@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_active_weights_are_those_that_were_loaded(name: str) -> None:
    model = build(name)
    weights = ready(model)
    weights.load(1, model.state_dict())
    weights.activate()
    for key, tensor in model.state_dict().items():
        assert torch.equal(weights.model.state_dict()[key].cpu(), tensor), key
    asked = requests(5, temperature=0.0)
    made, expected = (
        drain(GraphEngine(m, kv_tokens=1024, max_running=8, max_rows=64), asked)
        for m in (weights.model, model.to(DEVICE))
    )
    for r in asked:
        assert tokens(made[r.id]) == tokens(expected[r.id])


def test_inactive_weights_do_not_matter() -> None:
    """The device's memory is overwritten while the model is inactive; the engine and its graphs stay."""
    model = build("llama")
    weights = ready(model)
    weights.load(1, model.state_dict())
    weights.activate()
    engine = GraphEngine(weights.model, kv_tokens=1024, max_running=8, max_rows=64)
    asked = requests(4, temperature=0.0)
    before = drain(engine, asked)
    weights._device.zero_()
    weights.activate()
    engine.swap(1)
    after = drain(engine, asked)
    assert all(tokens(before[r.id]) == tokens(after[r.id]) for r in asked)


def test_weights_that_do_not_fit_change_nothing() -> None:
    model = build("llama")
    weights = ready(model)
    weights.load(1, model.state_dict())
    wrong = dict(model.state_dict())
    wrong["model.norm.weight"] = torch.zeros(3)
    with pytest.raises(WindfallError, match="wrong shape"):
        weights.load(2, wrong)
    weights.activate()
    assert torch.equal(weights.model.state_dict()["model.norm.weight"].cpu(), model.state_dict()["model.norm.weight"])


def test_there_is_nothing_to_activate_while_weights_are_loaded_or_after_an_error() -> None:
    model = build("llama")
    weights = ready(model)
    weights.load(1, model.state_dict())
    seen: list[bool] = []

    class Computed(MergedWeights):
        def copy_into(self, name: str, target: Any) -> None:
            seen.append(weights.loaded)
            if len(seen) == 3:
                raise RuntimeError("out of memory in the middle of the copy")

    with pytest.raises(RuntimeError):
        weights.load(2, Computed(model.state_dict(), {}, 1.0))
    assert seen == [False] * 3
    assert not weights.loaded, "host memory has a mix of two versions"
    weights.load(3, model.state_dict())
    assert weights.loaded


def test_tensors_are_aligned() -> None:
    model = build("qwen3")
    weights = ready(model)
    linears = [p for n, p in weights.model.named_parameters() if n.endswith("o_proj.weight")]
    assert all(p.data_ptr() % 16 == weights._device.data_ptr() % 16 for p in linears)
    assert weights.nbytes % ALIGN == 0
