"""Two engines with different models whose KV caches share one memory: they generate what they would alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.support.engines.small_models import build as build_model
from tests.support.engines.small_models import drain, engine, requests, tokens
from windfall.engine.blocks import layout
from windfall.engine.torch.arena import Arena
from windfall.engine.torch.engine import TorchEngine
from windfall.errors import WindfallError
from windfall.models.attention import NAME, cache_shapes

PAGE = 8


def build(name: str) -> Any:
    model = build_model(name)
    model.set_attn_implementation(NAME)
    return model


def token_bytes(model: Any) -> int:
    return sum(s.elements for s in cache_shapes(model)) * model.dtype.itemsize


def shared(serving: Any, rollout: Any, *, pages: int, per_block: int = 4) -> tuple[Arena, TorchEngine, TorchEngine]:
    """Two engines in an arena with room for this many pages of the serving model."""
    page = PAGE * token_bytes(serving)
    arena = Arena(layout(pages * page, page, block_bytes=per_block * page, least_blocks=1))
    options = {"kv_tokens": 0, "max_running": 16, "max_rows": 64}
    first = TorchEngine(
        serving, **options, kv=arena.join("serving", token_bytes=token_bytes(serving), page_size=PAGE, priority=True)
    )
    second = TorchEngine(rollout, **options, kv=arena.join("rollout", token_bytes=token_bytes(rollout), page_size=PAGE))
    return arena, first, second


@pytest.mark.parametrize("deterministic", [False, True])
def test_interleaved_engines_generate_what_they_would_alone(deterministic: bool) -> None:
    serving, rollout = build("llama"), build("qwen3")
    alone = [
        drain(engine(m, deterministic=deterministic), requests(6, seed=n)) for n, m in enumerate((serving, rollout))
    ]
    page = PAGE * token_bytes(serving)
    arena = Arena(layout(160 * page, page, block_bytes=4 * page, least_blocks=1))
    pair = [
        TorchEngine(m, kv_tokens=0, max_running=16, max_rows=64, deterministic=deterministic,
                    kv=arena.join(str(n), token_bytes=token_bytes(m), page_size=PAGE, priority=not n))
        for n, m in enumerate((serving, rollout))
    ]  # fmt: skip
    found: list[dict[str, list[Any]]] = [{}, {}]
    for n, e in enumerate(pair):
        for r in requests(6, seed=n):
            e.add(r)
    while any(map(len, pair)):
        for n, e in enumerate(pair):
            for chunk in e.step():
                found[n].setdefault(chunk.id, []).append(chunk)
            e.check()
            arena.blocks.check()
    for n in range(2):
        assert {id: tokens(c) for id, c in found[n].items()} == {id: tokens(c) for id, c in alone[n].items()}


def test_serving_takes_memory_in_the_middle_of_a_rollout() -> None:
    serving, rollout = build("llama"), build("qwen3")
    arena, first, second = shared(serving, rollout, pages=48)
    lost: list[str] = []

    def evict(pages: frozenset[int]) -> None:
        for s in [s for s in second.sequences if pages & set(s.pages)]:
            lost.append(s.request.id)
            second.cancel(s.request.id)

    assert second.kv is not None
    second.kv.pages.evict = evict
    for r in requests(12, seed=3):
        second.add(r)
    for _ in range(8):
        second.step()
    assert arena.blocks.free < 4
    want = requests(8, seed=4)
    found = drain(first, want)
    assert {id: tokens(c) for id, c in found.items()} == {
        id: tokens(c) for id, c in drain(engine(serving), want).items()
    }
    assert lost
    assert arena.blocks.moves > 0
    second.check()
    arena.blocks.check()
    drain(second)


def test_no_tenant_reads_what_another_wrote() -> None:
    model = build("llama")
    arena, first, second = shared(model, build("llama"), pages=16)
    drain(second, requests(3, seed=1))
    memory = arena.memory
    assert memory.any()
    assert second.kv is not None
    second.kv.pages.trim(99)
    first.add(requests(1, seed=2)[0])
    ours = arena.blocks.of("serving")
    assert not ours
    assert first._scheduler.next() is not None
    assert arena.blocks.dirty
    first._runner.allocate()
    size = arena.blocks.layout.block_bytes
    for block in arena.blocks.of("serving"):
        assert not memory[block * size : (block + 1) * size].any()
    second.kv.leave()
    assert arena.blocks.held("rollout") == 0


def test_different_dtypes_share_memory() -> None:
    serving, rollout = build("llama"), build("qwen3").to(torch.float64)
    _, first, second = shared(serving, rollout, pages=64)
    assert all(len(tokens(c)) for c in drain(second, requests(4, seed=1)).values())
    want = requests(4, seed=2)
    assert {id: tokens(c) for id, c in drain(first, want).items()} == {
        id: tokens(c) for id, c in drain(engine(serving), want).items()
    }


def test_a_model_whose_pages_do_not_fit_is_refused() -> None:
    serving = build("llama")
    arena = Arena(layout(4096, PAGE * token_bytes(serving), block_bytes=1, least_blocks=1))
    with pytest.raises(WindfallError, match="a page of this model takes"):
        arena.join("rollout", token_bytes=1 << 20, page_size=PAGE)


def test_a_step_has_at_most_the_rows_it_may_have() -> None:
    e = engine(build("llama"))
    for r in requests(6, seed=5):
        e.add(r)
    for most in (1, 5, 17, 64, 3):
        e.step(most)
        assert 1 <= e.last_step[0] <= most
        e.check()
    assert e.step(0) == []
    drain(e)
