"""What every engine must do when its weights are swapped while responses run. Not covered: a GPU."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch

from tests.support.engines.continuation import change, check_continuation, of_chunks, versions, weights
from tests.support.engines.gpu_case import graph_engine
from tests.support.engines.small_models import engine, requests
from tests.support.quick_cases import quick_cases
from windfall.errors import WindfallError
from windfall.trainer.own_engine.trainer_engine import TrainerEngine, TrainerTurn
from windfall.types import Chunk, Request

SIZES: dict[str, Any] = {"max_running": 4, "max_rows": 24}  # some responses wait, and prompts are prefilled in chunks
CLOSE = 1e-4
"""Largest difference of log-probs between two engines that compute in different batches."""

ENGINES: dict[str, tuple[Callable[[Any], Any], float]] = {
    "torch": (lambda model: engine(model, **SIZES), CLOSE),
    "torch-deterministic": (lambda model: engine(model, deterministic=True, **SIZES), 0.0),
    "graph": (lambda model: graph_engine(model, burst=3, **SIZES), CLOSE),
}
"""How to make each engine, and how far its log-probs may be from those of another batch."""

Made = dict[str, list[Chunk]]


@pytest.fixture(scope="module")
def models() -> list[Any]:
    return versions("llama", 3)


def asked(count: int = 6) -> list[Request]:
    return [replace(r, max_tokens=16 + n) for n, r in enumerate(requests(count, seed=3))]


def step(e: Any, made: Made, count: int = 1) -> None:
    for _ in range(count):
        chunks = e.step()
        assert len({c.version for c in chunks}) <= 1, "one step returns tokens of one version"
        for c in chunks:
            made.setdefault(c.id, []).append(c)


def finish(e: Any, made: Made) -> None:
    for _ in range(10_000):
        if not len(e):
            return
        step(e, made)
    raise AssertionError("the engine does not finish")


def check(wanted: list[Request], made: Made, engine_of: Callable[[int], Any], tolerance: float) -> None:
    for r in wanted:
        said = of_chunks(made[r.id])
        assert len(said) == r.max_tokens
        assert made[r.id][-1].finish == "length"
        check_continuation(r, said, engine_of, tolerance=tolerance)


@pytest.mark.parametrize(
    ("kind", "when"),
    quick_cases(product(ENGINES, [2, 5]), quick=[("torch", 5), ("torch-deterministic", 2), ("graph", 2), ("graph", 5)]),
)
def test_running_responses_continue_with_the_new_weights(models: list[Any], kind: str, when: int) -> None:
    """Some responses decode, some are in the middle of their prefill, some wait. Then the older version returns."""
    make, tolerance = ENGINES[kind]
    e, made, wanted = make(copy.deepcopy(models[0])), Made(), asked()
    for r in wanted:
        e.add(r)
    for version in (1, 2, 1):
        step(e, made, when)
        e.swap(version, weights(models[version]))
        e.check()
    finish(e, made)
    seen = {c.version for chunks in made.values() for c in chunks}
    assert seen >= {0, 1}
    assert any(len({c.version for c in chunks}) >= 3 for chunks in made.values())
    check(wanted, made, lambda version: make(copy.deepcopy(models[version])), tolerance)


@pytest.mark.parametrize("kind", ENGINES)
def test_refused_weights_do_not_touch_running_responses(models: list[Any], kind: str) -> None:
    make, tolerance = ENGINES[kind]
    e, made, wanted = make(copy.deepcopy(models[0])), Made(), asked(4)
    for r in wanted:
        e.add(r)
    step(e, made, 4)
    with pytest.raises(WindfallError, match="wrong shape"):
        e.swap(1, {**weights(models[1]), "model.norm.weight": torch.zeros(1)})
    with pytest.raises(WindfallError, match="does not fit"):
        e.swap(1, {"no.such.weight": torch.zeros(1)})
    assert e.version == 0
    finish(e, made)
    assert {c.version for chunks in made.values() for c in chunks} == {0}
    check(wanted, made, lambda version: make(copy.deepcopy(models[version])), tolerance)


@pytest.mark.parametrize("kind", ENGINES)
def test_responses_added_around_a_swap_run(models: list[Any], kind: str) -> None:
    make, tolerance = ENGINES[kind]
    e, made, wanted = make(copy.deepcopy(models[0])), Made(), asked(3)
    e.add(wanted[0])
    step(e, made, 5)
    e.add(wanted[1])
    e.swap(1, weights(models[1]))
    e.add(wanted[2])
    finish(e, made)
    assert {c.version for c in [*made[wanted[1].id], *made[wanted[2].id]]} == {1}
    check(wanted, made, lambda version: make(copy.deepcopy(models[version])), tolerance)


@pytest.mark.parametrize("kind", ENGINES)
def test_response_cancelled_at_a_swap_is_gone(models: list[Any], kind: str) -> None:
    """Also if the engine still has tokens of it that it has not returned."""
    make, tolerance = ENGINES[kind]
    e, made, wanted = make(copy.deepcopy(models[0])), Made(), asked(4)
    for r in wanted:
        e.add(r)
    step(e, made, 5)
    e.swap(1, weights(models[1]))
    e.cancel(wanted[0].id)
    before = len(made[wanted[0].id])
    finish(e, made)
    assert len(made[wanted[0].id]) == before
    check(wanted[1:], made, lambda version: make(copy.deepcopy(models[version])), tolerance)


@pytest.mark.parametrize("kind", ENGINES)
def test_trainers_engine_generates_nothing_between_an_update_and_its_load(models: list[Any], kind: str) -> None:
    """The module is changed in place, by two updates that belong to one version."""
    make, tolerance = ENGINES[kind]
    module, lock = copy.deepcopy(models[0]), TrainerTurn()
    inner = make(module)
    e, made, wanted = TrainerEngine(inner, lock), Made(), asked()
    e.swap(0)
    for r in wanted[:-1]:
        e.add(r)
    step(e, made, 6)
    rows = inner.counters.rows
    for seed in (100, 101):
        with lock:
            e.invalidate()
            change(module, seed)
        for _ in range(3):
            assert e.step() == []
            assert e.waiting
    assert inner.counters.rows == rows, "nothing was computed either"
    e.add(wanted[-1])
    e.swap(1)
    finish(e, made)
    assert not e.waiting
    assert any({c.version for c in chunks} == {0, 1} for chunks in made.values())
    updated = [models[0], module]
    check(wanted, made, lambda version: make(copy.deepcopy(updated[version])), tolerance)
