"""Pages that are kept between the turns of a session: the same tokens with and without, within the budget, and dropped
in order of the predicted return."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.engine.test_pages_and_schedule import one_batch, one_step
from tests.support.gpu_case import Case, graph_engine
from tests.support.small_models import VOCABULARY, build, drain, logprobs, tokens
from windfall.engine.pages import Pages
from windfall.engine.retention import Retention
from windfall.engine.scheduler import Sequence
from windfall.engine.torch.engine import TorchEngine
from windfall.models import attention
from windfall.types import Request, Sampling

PAGE = 16
Make = Callable[..., Any]


def torch_engine(**how: Any) -> Any:
    model = build("qwen3")
    model.set_attn_implementation(attention.NAME)
    return TorchEngine(model, **{"kv_tokens": 1024, "page_size": PAGE, "max_rows": 64, "deterministic": True} | how)


def cuda_engine(**how: Any) -> Any:
    import torch

    return graph_engine(Case("qwen3", "cpu", torch.float32).model, **{"kv_tokens": 1024, "page_size": PAGE} | how)


ENGINES = pytest.mark.parametrize("make", [torch_engine, cuda_engine], ids=["torch", "cuda"])


def first_turn(session: str, length: int = 100, *, keep_s: float = 1.0) -> Request:
    prompt = tuple(3 + (7 * n + 13 * ord(session)) % (VOCABULARY - 3) for n in range(length))
    return Request(id=f"{session}1", prompt=prompt, seed=ord(session), max_tokens=12, sampling=Sampling(),
                   session=session, keep_s=keep_s)  # fmt: skip


def next_turn(before: Request, chunks: Any, observation: int = 20) -> Request:
    said = (*before.prompt, *tokens(chunks), *range(5, 5 + observation))
    position = before.position + len(tokens(chunks)) + observation
    return replace(before, id=f"{before.id}+", prompt=said, position=position)


@ENGINES
def test_next_turn_prefills_only_what_is_new_and_gets_the_same_tokens(make: Make) -> None:
    first = first_turn("a")
    kept, bare = make(keep_share=0.5), make(keep_share=0.0)
    second = next_turn(first, drain(kept, [first])[first.id])
    assert (kept.counters.kept_sessions, kept.counters.kept_tokens) == (1, 96)
    strangers = [replace(first_turn(c, 200, keep_s=0.0), session="") for c in "qrstuvw"]  # they overwrite what is free
    for e in (kept, bare):
        drain(e, strangers)
    reused = kept.counters.reused_tokens
    prefilled = kept.counters.prefilled
    with_pages = drain(kept, [second])[second.id]
    assert kept.counters.reused_tokens - reused == 96
    assert kept.counters.prefilled - prefilled == len(second.prompt) - 96
    assert bare.counters.kept_sessions == 0
    without = drain(bare, [second])[second.id]
    assert bare.counters.reused_tokens < 96
    assert tokens(with_pages) == tokens(without)
    assert logprobs(with_pages) == pytest.approx(logprobs(without), abs=1e-5)


@ENGINES
def test_swap_and_sleep_drop_kept_pages(make: Make) -> None:
    for drop in (lambda e: e.swap(1), lambda e: e.sleep()):
        e = make()
        first = first_turn("a")
        second = next_turn(first, drain(e, [first])[first.id])
        assert e.counters.kept_sessions == 1
        drop(e)
        e.check()
        assert e.counters.kept_sessions == 0
        drain(e, [second])
        assert e.counters.reused_tokens == 0
        assert e.take_dropped() == ()  # whoever swaps the weights knows it


@ENGINES
def test_response_that_needs_the_whole_cache_gets_it(make: Make) -> None:
    e = make(kv_tokens=256, keep_share=1.0)
    drain(e, [first_turn("a", 100), first_turn("b", 90)])
    assert e.counters.kept_sessions == 2
    long = replace(first_turn("c", 240, keep_s=0.0), session="", max_tokens=8)
    assert len(tokens(drain(e, [long])["c1"])) == 8
    assert e.counters.evictions == 0
    assert set(e.take_dropped()) == {"a", "b"}


@ENGINES
def test_forgotten_and_canceled_sessions_keep_nothing(make: Make) -> None:
    e = make()
    drain(e, [first_turn("a")])
    e.forget("a")
    e.check()
    e.add(replace(first_turn("b"), max_tokens=80))
    for _ in range(4):
        e.step()
    e.cancel("b1")
    e.check()
    assert e.counters.kept_sessions == 0


def kept_sessions(r: Retention, *sessions: str) -> set[str]:
    return {s for s in sessions if s in r._kept}


def hold(pages: Pages, count: int) -> list[int]:
    held = [pages.allocate() for _ in range(count)]
    assert None not in held
    return [p for p in held if p is not None]


def test_session_that_returns_last_is_dropped_first() -> None:
    now, pages = [0.0], Pages(20, 4)
    r = Retention(pages, share=0.5, clock=lambda: now[0])
    for session, keep_s in (("soon", 2.0), ("late", 30.0), ("later", 60.0)):
        r.keep(session, hold(pages, 3), keep_s)
    r.keep("next", hold(pages, 3), 1.0)  # 12 pages, and the budget is 10
    assert kept_sessions(r, "soon", "late", "later", "next") == {"soon", "late", "next"}
    assert r.take_dropped() == ()  # it only exceeds the budget, and nothing has overwritten its pages yet
    assert r.make_room(13)
    assert r.take_dropped() == ("late",)
    assert kept_sessions(r, "soon", "late", "next") == {"soon", "next"}
    now[0] = 100.0  # all are overdue: the longest overdue are least likely to return soon
    assert r.make_room(16)
    assert "next" not in r._kept
    pages.check(r.held())


def test_shared_pages_count_once_and_stay_while_one_session_has_them() -> None:
    pages = Pages(12, 4)
    r = Retention(pages, share=0.5)
    prompt = hold(pages, 4)
    r.keep("a", [*prompt, *hold(pages, 1)], 1.0)
    for page in prompt:  # a sibling has found the pages of the prompt
        pages._references[page] += 1
    r.keep("b", [*prompt, *hold(pages, 1)], 1.0)
    assert r.page_count == 6
    r.forget("a")
    assert r.page_count == 5
    pages.check(r.held())
    r.clear()
    assert pages.free == 12


@settings(max_examples=100, deadline=None)
@given(data=st.data(), pages=st.integers(8, 20), rows=st.integers(1, 30), share=st.sampled_from([0.0, 0.3, 1.0]))
def test_random_sessions_keep_the_rules(data: st.DataObject, pages: int, rows: int, share: float) -> None:
    pool, now = Pages(pages, 4), [0.0]
    retention = Retention(pool, share=share, clock=lambda: now[0])
    s = one_batch(pool, 4, rows, retention)
    live: list[Sequence] = []
    sessions: dict[str, tuple[int, ...]] = {}
    for n in range(data.draw(st.integers(1, 40))):
        now[0] += data.draw(st.integers(0, 3))
        session = data.draw(st.sampled_from("abcd"))
        if session not in {x.request.session for x in live}:
            prompt = (*sessions.get(session, ()), *range(3, 3 + data.draw(st.integers(1, 6))))
            most = pages * 4 - 1 - len(prompt)
            if most >= 1:
                request = Request(id=str(n), prompt=prompt, seed=n, max_tokens=data.draw(st.integers(1, min(9, most))),
                                  session=session, keep_s=data.draw(st.sampled_from([0.0, 1.0, 50.0])))  # fmt: skip
                live.append(Sequence(request, list(prompt)))
                s.add(live[-1])
            else:
                sessions.pop(session)
                retention.forget(session)
        if data.draw(st.integers(0, 19)) == 0:
            s.restart_all()
            assert len(retention) == 0
        before = list(live)
        one_step(s, live)
        for x in before:
            if x not in live:
                sessions[x.request.session] = tuple(x.tokens)
        s.check()
        assert retention.page_count <= int(share * pages)
    for _ in range(10_000):
        if not live:
            break
        one_step(s, live)
        s.check()
    assert not live
    retention.clear()
    assert pool.free == pages
