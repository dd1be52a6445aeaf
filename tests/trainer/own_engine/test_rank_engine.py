"""The engine of a rank: it copies what the ranks publish, gives its memory back while its rank trains, and then goes on
exactly where it was."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.support.engines.continuation import Token, check_continuation, of_chunks, versions
from tests.support.engines.small_models import engine
from windfall.errors import WindfallError
from windfall.link.messages import Load
from windfall.trainer.own_engine.rank_engine import PublishedWeights, PulledCopy, RankEngine
from windfall.trainer.own_engine.trainer_engine import TrainerTurn
from windfall.types import Request
from windfall.weights.publishing.publish import Publisher
from windfall.weights.pulling.pull import PulledWeights

REQUEST = Request(id="1", prompt=(5, 9, 13), seed=7, max_tokens=400)


@pytest.fixture(scope="module")
def models() -> list[Any]:
    return versions("llama", 4)


class Case:
    def __init__(self, model: Any) -> None:
        self.publisher = Publisher()
        self.weights = PublishedWeights(self.publisher)
        self.turn = TrainerTurn()
        own = copy.deepcopy(model)
        with torch.no_grad():
            for p in own.parameters():
                p.zero_()
        self.memory = own.state_dict()
        self.engine = RankEngine(engine(own, deterministic=True), self.turn, own, self.weights.reading)
        self.engine.add(REQUEST)
        self.made: list[Token] = []

    def load(self, version: int) -> None:
        found = self.publisher.find(version)
        assert found is not None
        load = Load(version=version, digest=found.manifest.digest)
        assert self.weights.pull(load) == PulledWeights(digest=found.manifest.digest)
        self.engine.swap(version)

    def steps(self, count: int) -> int:
        """Number of tokens that these steps generate."""
        before = len(self.made)
        for _ in range(count):
            self.made += of_chunks(self.engine.step())
        return len(self.made) - before

    def train(self) -> None:
        with self.turn:
            self.engine.make_room()
            self.engine.invalidate()
            assert all(t.untyped_storage().nbytes() == 0 for t in self.memory.values()), "the weights are freed"

    def check(self, model_of: Callable[[int], Any]) -> None:
        check_continuation(REQUEST, self.made, lambda v: engine(copy.deepcopy(model_of(v)), deterministic=True))


def test_engine_continues_after_its_memory_was_freed(models: list[Any]) -> None:
    case = Case(models[0])
    assert case.steps(2) == 0, "nothing is loaded yet"
    case.train()
    for version in (0, 1):
        case.publisher.publish(version, models[version].state_dict())
        case.load(version)
        assert case.steps(5) == 5
        case.train()
        assert not case.engine.waiting
        case.train()  # a second order in a row
        assert case.steps(5) == 5
    case.publisher.publish(2, models[2].state_dict())
    case.train()
    assert case.steps(3) == 3, "the last version is still readable"
    case.check(models.__getitem__)


def test_engine_waits_for_the_next_version_if_its_own_was_overwritten(models: list[Any]) -> None:
    case = Case(models[0])
    case.publisher.publish(0, models[0].state_dict())
    case.load(0)
    case.publisher.publish(1, models[1].state_dict())
    case.publisher.publish(2, models[2].state_dict())
    assert case.steps(3) == 3, "it has a copy"
    with pytest.raises(WindfallError, match="no longer publishes version 0"):
        case.engine.swap(0)
    assert case.steps(3) == 3, "nothing has changed"
    case.train()
    assert case.steps(3) == 0
    assert case.engine.waiting
    case.load(2)
    assert case.steps(3) == 3
    case.check(models.__getitem__)


def test_no_step_while_the_rank_follows_an_order(models: list[Any]) -> None:
    case = Case(models[0])
    case.publisher.publish(0, models[0].state_dict())
    case.load(0)
    with case.turn:
        assert case.steps(2) == 0
        assert case.engine.waiting
    assert case.steps(2) == 2


def test_adapter_is_merged_into_the_base_each_time(models: list[Any]) -> None:
    case, name = Case(models[0]), "model.layers.0.self_attn.q_proj"
    base = models[0].state_dict()
    rows, columns = base[f"{name}.weight"].shape
    noise = torch.Generator().manual_seed(1)
    a, b = torch.randn((2, columns), generator=noise), torch.randn((rows, 2), generator=noise)
    digest = case.publisher.publish_base(base).digest
    merged = copy.deepcopy(models[0])
    merged.get_submodule(name).weight.data += 0.5 * b @ a
    adapter = {f"{name}.lora_A.weight": a, f"{name}.lora_B.weight": b}
    case.publisher.publish(0, adapter, base=digest, scale=0.5)
    case.load(0)
    assert case.steps(4) == 4
    case.train()
    assert case.steps(4) == 4
    own = case.memory[f"{name}.weight"]
    torch.testing.assert_close(own, merged.state_dict()[f"{name}.weight"])


def test_ranks_on_several_machines_copy_what_they_have_pulled(models: list[Any]) -> None:
    """Not while the next version is pulled into the same memory."""
    pulling, go_on = threading.Event(), threading.Event()
    copies: Any = PulledCopy(key="key")

    def read(load: Load) -> Any:
        pulling.set()
        assert go_on.wait(60)
        copies._weights.held = SimpleNamespace(version=load.version, digest=load.digest, base="", scale=1.0)
        return copies.held, 0.0

    copies._read, copies.tensors = read, models[0].state_dict
    copies._weights.held = SimpleNamespace(version=3, base="", scale=1.0)
    with copies.reading(3) as weights:
        assert weights is not None
        assert set(weights) == set(models[0].state_dict())
    with copies.reading(2) as weights:
        assert weights is None
    got: list[PulledWeights] = []
    load = Load(version=4, digest="d")
    thread = threading.Thread(target=lambda: got.append(copies.pull(load, stop=threading.Event())))
    thread.start()
    assert pulling.wait(60)
    with copies.reading(3) as weights:
        assert weights is None
    go_on.set()
    thread.join(60)
    with copies.reading(4) as weights:
        assert weights is not None
    assert got == [PulledWeights(digest="d")]
