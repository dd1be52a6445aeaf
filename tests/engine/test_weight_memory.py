"""Engines whose KV cache and weights are given back and loaded again. Not covered: a GPU."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from tests.support.engines.continuation import versions, weights
from tests.support.engines.gpu_case import graph_engine
from tests.support.engines.small_models import drain, engine, requests, tokens
from windfall.engine.module_weights import WeightMemory


@pytest.fixture(scope="module", params=["llama", "qwen3"])
def model(request: pytest.FixtureRequest) -> Any:
    return versions(request.param, 1)[0]


@pytest.mark.parametrize("make", [engine, graph_engine], ids=["torch", "graph"])
def test_engine_goes_on_with_weights_that_were_given_back(model: Any, make: Any) -> None:
    """Some weights are tied, and some are joined by the engine."""
    module, asked = copy.deepcopy(model), requests(6, temperature=0.0)
    oracle = drain(make(copy.deepcopy(model)), asked)
    e, made = make(module), {}
    memory = WeightMemory(module)
    for r in asked:
        e.add(r)
    for _ in range(3):
        for _ in range(3):
            for c in e.step():
                made.setdefault(c.id, []).append(c)
        e.sleep()
        memory.free()
        assert all(p.untyped_storage().nbytes() == 0 for p in module.parameters())
        memory.allocate()
        e.swap(0, weights(model))
        e.check()
    for id, chunks in drain(e).items():
        made.setdefault(id, []).extend(chunks)
    assert [tokens(made[r.id]) for r in asked] == [tokens(oracle[r.id]) for r in asked]


def test_every_byte_is_counted_once(model: Any) -> None:
    unique = {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in model.parameters()}
    memory = WeightMemory(copy.deepcopy(model))
    assert memory.nbytes == sum(unique.values())
    memory.allocate()
    assert not memory.freed


@pytest.mark.parametrize("deterministic", [False, True])
def test_sleep_of_the_torch_engine(model: Any, deterministic: bool) -> None:
    asked = requests(5)
    oracle = drain(engine(model, deterministic=deterministic), asked)
    e, made = engine(model, deterministic=deterministic), {}
    for r in asked:
        e.add(r)
    for _ in range(4):
        for c in e.step():
            made.setdefault(c.id, []).append(c)
        e.sleep()
        assert e.asleep
        e.check()
    for id, chunks in drain(e).items():
        made.setdefault(id, []).extend(chunks)
    e.sleep()
    assert e.step() == []
    assert e.asleep, "there is no work to wake up for"
    assert [tokens(made[r.id]) for r in asked] == [tokens(oracle[r.id]) for r in asked]
