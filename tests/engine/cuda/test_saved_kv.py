"""Evicted responses keep their keys and values in host memory where that is cheaper, and go on with the same bits.

The decisions are tested alone, and the copies with the engine: on the CPU with the reference kernels, and on a GPU if
there is one. Random schedules are in test_schedule.py. Not covered: speed.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.engines.gpu_case import Case, cases
from tests.support.engines.small_models import drain, logprobs, requests, tokens
from windfall.engine.cuda.engine import GraphEngine
from windfall.engine.saved_kv import CHUNK_BYTES, MAX_SHARE, SavedKV
from windfall.engine.scheduler import Launch, ScheduledRows, Sequence
from windfall.types import Request

SIZE = 16
PAGE_BYTES = CHUNK_BYTES // 4


@pytest.fixture(scope="module", params=cases(["qwen3"]))
def case(request: pytest.FixtureRequest) -> Case:
    return Case(*request.param)


def sequence(length: int) -> Sequence:
    request = Request(id="a", prompt=(3,) * length, seed=1, max_tokens=9)
    return Sequence(request, list(request.prompt), pages=list(range(-(-length // SIZE))))


def saved_kv(free_chunks: float = 1e6) -> SavedKV:
    return SavedKV(
        page_size=SIZE, page_bytes=PAGE_BYTES, max_rows=256, free_bytes=lambda: int(free_chunks * CHUNK_BYTES)
    )


def prefill(rows: int, *, steps: int = 0) -> Launch:
    """A launch that prefills a prompt, and then decodes it."""
    s = sequence(rows)
    return Launch(
        prefill=[ScheduledRows(s, 0, rows, True)], rows=[s] if steps else [], slots=np.zeros(1, np.int64), steps=steps,
        width=1, longest=rows, prefix_groups=np.zeros((0, 3), np.int32), shape=(rows, rows, True),
    )  # fmt: skip


def decode(steps: int) -> Launch:
    return replace(prefill(1, steps=steps), prefill=[], shape=(1, 100, False))


def is_saved(saved: SavedKV, length: int, shared: int = 0) -> bool:
    saved.evict(sequence(length), length, shared)
    return bool(saved.take_copies())


def test_sequence_is_saved_if_copies_take_less_time_than_a_prefill() -> None:
    saved = saved_kv()
    assert not is_saved(saved, 160), "nothing is known of a prefill"
    for _ in range(8):
        saved.observe_launch(prefill(100), 0.1)
    assert is_saved(saved, 160), "the first copy is a try"
    fast = 0.5 * 0.16 / (20 * PAGE_BYTES)  # ten pages there and back in half of the time of their prefill
    saved.observe_copy(PAGE_BYTES, PAGE_BYTES * fast)
    assert is_saved(saved, 160)
    assert not is_saved(saved, 160, shared=8), "two pages would be prefilled, and twelve copied"
    for _ in range(20):
        saved.observe_copy(PAGE_BYTES, PAGE_BYTES * 3 * fast)
    tries = [is_saved(saved, 160) for _ in range(20)]
    assert tries.index(True) in range(5, 15), "another copy is tried, but not soon"


def test_prefill_time_is_that_of_the_launch_without_its_decode_steps() -> None:
    saved = saved_kv()
    for _ in range(8):
        saved.observe_launch(decode(8), 8 * 0.05)
        saved.observe_launch(prefill(100, steps=5), 0.1 + 5 * 0.05)
    assert saved._prefill_s(0, 100) == pytest.approx(0.1, rel=0.05)
    assert saved._prefill_s(0, 512) == pytest.approx(2 * saved._prefill_s(0, 256), rel=0.3), "in two launches"


def test_host_memory_is_bounded_and_used_again() -> None:
    saved = saved_kv(free_chunks=3 / MAX_SHARE)
    saved.is_cheaper = lambda *_: True
    first, second, third = (sequence(n) for n in (100, 64, 16))  # 7, 4 and 1 pages: 2, 1 and 1 chunks
    for s in (first, second, third):
        saved.evict(s, len(s.tokens), 0)
    saved.check([first, second])
    assert [(c.save, c.chunk, c.first, [*c.pages]) for c in saved.take_copies()] == [
        (True, 1, 0, [0, 1, 2, 3]), (True, 0, 0, [4, 5, 6]), (True, 2, 0, [0, 1, 2, 3]),
    ]  # fmt: skip
    first.pages = list(range(20, 27))
    assert (saved.restore(first, 2), saved.restore(third, 0)) == (100, 0)
    assert [(c.save, c.chunk, c.first, [*c.pages]) for c in saved.take_copies()] == [
        (False, 1, 2, [22, 23]), (False, 0, 0, [24, 25, 26]),
    ]  # fmt: skip
    saved.evict(third, 16, 0)
    saved.check([second, third])
    saved.drop(second)
    saved.check([third])
    saved.clear()
    saved.check([])
    assert saved.restore(third, 0) == 0


def keep_all(e: GraphEngine, *, chunk_pages: int = 3) -> GraphEngine:
    """Evicted responses are always saved, in small chunks."""
    assert e._scheduler.saved is not None
    e._scheduler.saved.is_cheaper = lambda *_: True
    e._scheduler.saved.chunk_pages = e._host_pages._chunk_pages = chunk_pages
    return e


def evict_all(e: GraphEngine) -> None:
    """Evict all responses. Others write to their pages before they go on."""
    e.finish_launches()
    for s in reversed(list(e._scheduler.running)):
        e._scheduler._evict(s)
    e._host_pages.run(e._scheduler.saved.take_copies())
    e._device.pool.data.view(torch.uint8).fill_(0x41)
    e._device.state.last.fill_(7)
    e._scheduler.pages.clear_cache()
    e.check()


@pytest.mark.parametrize("kv_dtype", [None, torch.float8_e4m3fn])
@pytest.mark.parametrize("steps", [2, 3, 7])
def test_response_goes_on_with_the_same_bits(case: Case, steps: int, kv_dtype: Any) -> None:
    request = replace(requests(1, seed=4)[0], max_tokens=50)
    whole = drain(case.engine(burst=3, kv_dtype=kv_dtype), [request])[request.id]
    e = keep_all(case.engine(burst=3, kv_dtype=kv_dtype))
    e.add(request)
    out = [c for _ in range(steps) for c in e.step()]
    evict_all(e)
    computed = len(request.prompt) + e._sequences[request.id].generated - 1
    out += drain(e)[request.id]
    assert (tokens(out), logprobs(out)) == (tokens(whole), logprobs(whole))
    assert (e.counters.kv_restored, e.counters.prefilled) == (computed, len(request.prompt))


def test_response_that_was_evicted_during_its_prefill_goes_on(case: Case) -> None:
    request = replace(requests(1, seed=4)[0], prompt=tuple(range(3, 90)), max_tokens=5)
    whole = drain(case.engine(max_rows=40), [request])[request.id]
    e = keep_all(case.engine(max_rows=40))
    e.add(request)
    out = e.step()
    evict_all(e)
    out += drain(e)[request.id]
    case.same(request, out, whole)
    assert (e.counters.kv_restored, e.counters.prefilled) == (40, 87)


@pytest.mark.parametrize("speculation", [False, True])
def test_crowded_responses_generate_the_same_tokens(case: Case, speculation: bool) -> None:
    asked = [replace(r, prompt=r.prompt[:6], max_tokens=60) for r in requests(10)]  # small at first, then they grow
    roomy = drain(case.engine(), asked)
    tight = keep_all(case.engine(kv_tokens=224, max_rows=40, speculation=speculation))
    crowded = drain(tight, asked)
    assert tight.counters.evictions > 0
    assert tight.counters.kv_restored > 0
    assert tight.counters.prefilled == sum(len(r.prompt) for r in asked), "only prompts were prefilled"
    for r in asked:
        case.same(r, crowded[r.id], roomy[r.id])


def test_siblings_share_restored_pages(case: Case) -> None:
    prompt = tuple(range(3, 53))  # three full pages and two tokens
    e = keep_all(case.engine(max_rows=256))
    for n in range(4):
        e.add(Request(id=str(n), prompt=prompt, seed=n, max_tokens=20))
    e.step()
    evict_all(e)
    before = e.counters.reused_tokens
    e.step()
    assert e.counters.reused_tokens - before == 3 * 48
    assert len({s.pages[2] for s in e._scheduler.running}) == 1


def test_copies_are_dropped_with_their_response_and_with_the_weights(case: Case) -> None:
    asked = [replace(r, max_tokens=30) for r in requests(4)]
    oracle = drain(case.engine(), asked)
    e = keep_all(case.engine(burst=2))
    for r in asked:
        e.add(r)
    out = [c for _ in range(4) for c in e.step()]
    evict_all(e)
    e.cancel(asked[0].id)
    e.check()
    e.swap(1)
    out += [c for _ in range(4) for c in e.step()]
    assert e.counters.kv_restored == 0, "old weights computed what was saved"
    evict_all(e)
    assert e._host_pages._chunks
    e.sleep()
    e.check()
    assert not e._host_pages._chunks
    rest = drain(e)
    assert e.counters.kv_restored == 0
    for r in asked[1:]:
        case.same(r, [c for c in out if c.id == r.id] + rest.get(r.id, []), oracle[r.id])


def test_speeds_are_learned_from_launches_and_copies(case: Case) -> None:
    e = case.engine(kv_tokens=224, max_rows=40)
    drain(e, [replace(r, prompt=r.prompt[:6], max_tokens=60) for r in requests(10)])
    saved = e._scheduler.saved
    assert saved is not None
    assert e.counters.kv_restored > 0, "at least the first copy is a try"
    assert saved._byte_s > 0
    assert saved._prefill_s(0, 100) > 0
