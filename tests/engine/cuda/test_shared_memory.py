"""Two GPU engines whose KV caches share one memory: each computes what it computes alone, while blocks move between
them and graphs stay. On the CPU with the reference kernels, and on a GPU if there is one. Not covered: speed
(`benchmarks/serve/coserve.py`), pools above 2 GiB."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.support.engines.gpu_case import EAGER, Case, cases
from tests.support.engines.small_models import drain, requests, tokens
from windfall.engine.blocks import layout
from windfall.engine.cuda.engine import GraphEngine
from windfall.engine.torch.arena import Arena
from windfall.engine.torch.engine import TorchEngine
from windfall.types import Chunk, Request

PAGE = 8


@pytest.fixture(scope="module", params=cases(["llama"]))
def serving(request: pytest.FixtureRequest) -> Case:
    return Case(*request.param)


@pytest.fixture
def rollout(serving: Case) -> Case:
    return Case("qwen3", str(serving.model.device.type), serving.model.dtype)


def token_bytes(model: Any) -> int:
    config = model.config
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return 2 * config.num_hidden_layers * config.num_key_value_heads * head * model.dtype.itemsize


def new_arena(model: Any, kv_tokens: int, block_pages: int = 4) -> Arena:
    page = PAGE * token_bytes(model)
    found = layout(kv_tokens * token_bytes(model), page, block_bytes=block_pages * page, least_blocks=8)
    return Arena(found, str(model.device))


def join(arena: Arena, tenant: str, model: Any, **options: Any) -> GraphEngine:
    kv = arena.join(tenant, token_bytes=token_bytes(model), page_size=PAGE, priority=tenant == "serving")
    return GraphEngine(model, kv_tokens=0, kv=kv, **{"max_running": 16, "max_rows": 64, "sharing": EAGER, **options})


def evicting(engine: GraphEngine) -> list[str]:
    """Responses that lose their pages are canceled, and listed here."""
    lost: list[str] = []
    assert engine.kv is not None

    def evict(pages: frozenset[int]) -> None:
        for s in [s for s in engine.sequences if not pages.isdisjoint(s.pages)]:
            engine.cancel(s.request.id)
            lost.append(s.request.id)

    engine.kv.pages.evict = evict
    return lost


def run(engine: GraphEngine, made: dict[str, list[Chunk]], *limits: int) -> None:
    rows, steps = limits or (None, None)
    for chunk in engine.step(rows, steps):
        made.setdefault(chunk.id, []).append(chunk)
    engine.check()


@pytest.mark.parametrize("depth", [1, 2])
def test_two_models_in_turn(serving: Case, rollout: Case, depth: int) -> None:
    asked = {"serving": requests(9, seed=1), "rollout": requests(12, seed=2)}
    arena = new_arena(serving.model, 4096)
    engines = {"serving": join(arena, "serving", serving.model), "rollout": join(arena, "rollout", rollout.model)}
    made: dict[str, dict[str, list[Chunk]]] = {"serving": {}, "rollout": {}}
    for name, engine in engines.items():
        engine.depth = depth
        for r in asked[name]:
            engine.add(r)
    turns = 0
    while any(len(e) for e in engines.values()):
        turns += 1
        assert turns < 1000
        run(engines["serving"], made["serving"])
        run(engines["rollout"], made["rollout"], 3 + turns % 40, 1 + turns % 5)
        arena.blocks.check()
    for name, case in (("serving", serving), ("rollout", rollout)):
        alone = drain(case.engine(), asked[name])
        for r in asked[name]:
            assert len(tokens(made[name][r.id])) == r.max_tokens
            case.same(r, made[name][r.id], alone[r.id])


def test_serving_takes_blocks_with_launches_in_flight(serving: Case, rollout: Case) -> None:
    """The rollout fills the memory; then serving needs all of it at once. The host does not wait for the device."""
    arena = new_arena(serving.model, 512, block_pages=2)
    first, second = join(arena, "serving", serving.model), join(arena, "rollout", rollout.model)
    lost = evicting(second)
    for r in requests(16, seed=3, longest=80):
        second.add(replace(r, max_tokens=60))
    returned: dict[str, list[Chunk]] = {}
    while arena.blocks.free:
        run(second, returned)
    assert second.launched
    asked = [replace(r, max_tokens=40) for r in requests(8, seed=4)]
    made = {}
    for r in asked:
        first.add(r)
    while len(first):
        run(first, made)
        run(second, returned)
        arena.blocks.check()
    alone = drain(serving.engine(page_size=PAGE), asked)
    for r in asked:
        serving.same(r, made[r.id], alone[r.id])
    assert lost, "serving needed blocks that the rollout held"
    assert arena.blocks.moves
    alone = drain(rollout.engine(page_size=PAGE), [replace(r, max_tokens=60) for r in requests(16, seed=3, longest=80)])
    for id, chunks in returned.items():
        said = tokens(chunks)
        if rollout.exact:
            assert said == tokens(alone[id])[: len(said)], "a response that is continued elsewhere has the right tokens"


def test_blocks_are_cleared_between_tenants(serving: Case, rollout: Case) -> None:
    arena = new_arena(serving.model, 256, block_pages=2)
    first, second = join(arena, "serving", serving.model), join(arena, "rollout", rollout.model)
    evicting(second)
    drain(first, requests(6, seed=5))
    assert first.kv is not None
    first.kv.pages.clear_cache()
    second.add(Request(id="0", prompt=(3, 4, 5), seed=1, max_tokens=20))
    second.step(64, 1)
    second.finish_launches()
    page = second.sequences[0].pages[0]
    block = arena.blocks.layout.granules
    used = arena.memory[page // block * arena.blocks.layout.block_bytes :][: arena.blocks.layout.block_bytes]
    written = 5 * token_bytes(rollout.model)
    assert int((used != 0).sum()) <= written, "the block holds nothing but the keys and values of this response"


def test_rows_and_steps_are_limited(serving: Case) -> None:
    engine = join(new_arena(serving.model, 2048), "serving", serving.model)
    engine.depth = 1
    for n in range(6):
        engine.add(Request(id=str(n), prompt=tuple(range(3 + n, 13 + n)), seed=n, max_tokens=30))
    assert {c.id for c in engine.step(20, 8)} <= {"0", "1"}, "two prompts of ten tokens fit into 20 rows"
    rows, context, prefill = engine.last_step
    assert prefill
    assert rows <= 22
    assert context >= rows
    while any(not s.pages for s in engine.sequences):
        engine.step(64)
    chunks = engine.step(4, 3)
    assert [len(c.tokens) for c in chunks] == [3] * 4, "four rows, three steps"
    assert {c.id for c in chunks} == {"0", "1", "2", "3"}, "the oldest come first"
    assert engine.last_steps == 3
    assert not engine.last_step[2]
    drain(engine)


def test_a_step_without_a_prefill_only_decodes(serving: Case) -> None:
    """Also when a response that is planned to its end needs none of the rows, and for as many steps as are asked."""
    engine = join(new_arena(serving.model, 2048), "serving", serving.model)
    for n, most in enumerate((6, 60, 60)):
        engine.add(Request(id=str(n), prompt=tuple(range(3 + n, 13 + n)), seed=n, max_tokens=most))
    engine.step(64, 1)
    engine.step(64, 8)
    engine.add(Request(id="3", prompt=tuple(range(9, 39)), seed=3, max_tokens=5))
    engine.step(3, 4, False)
    assert [(shape[0], shape[2], steps) for shape, steps in engine.launched] == [(2, False, 4)]
    engine.step(64, 4)
    assert [shape[2] for shape, _ in engine.launched] == [True]
    engine.check()
    drain(engine)


def test_the_time_of_a_launch_is_that_of_its_own_rows(serving: Case) -> None:
    """A step returns the tokens of the launch before, and says how long that one took."""
    engine = join(new_arena(serving.model, 2048), "serving", serving.model)
    decoder: Any = engine._device.decoder
    if serving.model.device.type == "cpu":  # a GPU measures itself
        prefill = decoder.prefill
        decoder.prefill = lambda *args: (time.sleep(0.2), prefill(*args))[1]
    engine.add(Request(id="0", prompt=tuple(range(3, 43)), seed=0, max_tokens=9))
    took_s = dict[bool, float]()
    while len(engine):
        engine.step(64, 1)
        if engine.device_s is not None:
            took_s[engine.last_step[2]] = min(engine.device_s, took_s.get(engine.last_step[2], 9.0))
    assert took_s[True] > 0.2 > took_s[False] > 0 or serving.model.device.type != "cpu"
    assert min(took_s.values()) > 0


def test_pages_of_a_gpu_engine_lie_beside_those_of_the_other_engine(serving: Case) -> None:
    """Both kinds of engine can share a memory: a page has the same granules for both."""
    if not serving.exact:
        pytest.skip("the other engine of this test runs on the CPU")
    arena = new_arena(serving.model, 2048)
    kv = arena.join("serving", token_bytes=token_bytes(serving.model), page_size=PAGE, priority=True)
    graph = join(arena, "rollout", serving.model)
    plain = TorchEngine(serving.plain, kv_tokens=0, kv=kv) if _windfall_attention(serving.plain) else None
    assert plain is not None
    asked = requests(4, seed=6)
    made: dict[str, list[Chunk]] = {}
    for r in asked:
        graph.add(r)
        plain.add(r)
    both: dict[str, list[Chunk]] = {}
    while len(graph) or len(plain):
        run(graph, made)
        for chunk in plain.step():
            both.setdefault(chunk.id, []).append(chunk)
    for r in asked:
        assert tokens(made[r.id]) == tokens(both[r.id])


def _windfall_attention(model: Any) -> bool:
    from windfall.models import attention

    model.set_attn_implementation(attention.NAME)
    return True


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
def test_graphs_are_not_captured_again_when_blocks_move(serving: Case, rollout: Case) -> None:
    arena = new_arena(serving.model, 1024, block_pages=2)
    first, second = join(arena, "serving", serving.model), join(arena, "rollout", rollout.model)
    evicting(second)
    for engine in (first, second):
        engine.warm(*range(1, 17), shorter=True)
    graphs = [dict(e._device._graphs._captured) for e in (first, second)]
    for turn in range(6):
        for engine in (first, second):
            drain(engine, [replace(r, id=f"{turn}-{r.id}") for r in requests(12, seed=turn)])
    assert arena.blocks.moves
    for before, engine in zip(graphs, (first, second), strict=True):
        now = engine._device._graphs._captured
        assert all(now[key] is graph for key, graph in before.items())
