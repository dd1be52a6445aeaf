"""Random schedules keep the rules: no page leaks, none is allocated twice, every token is computed."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from windfall.engine.draft_length import WIDTHS
from windfall.engine.pages import ROOT, Pages, key_of
from windfall.engine.scheduler import Launch, ScheduledRows, Scheduler, Sequence
from windfall.types import Request

PROMPTS = [tuple(range(3, 3 + n)) for n in (1, 4, 9, 17)] + [(9,) * 12]


@settings(max_examples=150, deadline=None)
@given(data=st.data(), pages=st.integers(8, 20), running=st.integers(1, 6), rows=st.integers(1, 30))
def test_random_schedules_keep_the_rules(data: st.DataObject, pages: int, running: int, rows: int) -> None:
    size = 4
    s = one_batch(Pages(pages, size), running, rows)
    live: list[Sequence] = []
    finished = added = 0
    for _ in range(data.draw(st.integers(1, 60))):
        if data.draw(st.booleans()):
            prompt = data.draw(st.sampled_from(PROMPTS))
            room = pages * size - 1 - len(prompt)
            request = Request(
                id=str(added), prompt=prompt, seed=added, max_tokens=data.draw(st.integers(1, min(20, room)))
            )
            live.append(Sequence(request, list(prompt)))
            s.add(live[-1])
            added += 1
        elif live and data.draw(st.integers(0, 9)) == 0:
            s.remove(live.pop(data.draw(st.integers(0, len(live) - 1))))
        elif data.draw(st.integers(0, 19)) == 0:
            s.restart_all()
        finished += one_step(s, live, data.draw(st.sampled_from(WIDTHS)))
        s.check()
    for _ in range(10_000):  # all remaining sequences must finish
        if not live:
            break
        finished += one_step(s, live)
        s.check()
    assert not live
    assert len(s) == 0
    assert s.pages.free == pages


def one_batch(pages: Pages, running: int, rows: int) -> Scheduler:
    """A scheduler whose launches are one forward pass, as that of TorchEngine."""
    return Scheduler(pages, slots=min(running, rows), max_rows=rows, one_batch=True)


def plan(s: Scheduler, **limits: Any) -> list[ScheduledRows]:
    """All rows of the next launch."""
    work = s.next(**limits)
    return [] if work is None else [*decode_rows(work), *work.prefill]


def decode_rows(work: Launch) -> list[ScheduledRows]:
    assert work.steps <= 1
    left = {x: x.request.max_tokens - x.generated for x in work.rows}
    drafts = {x: (1,) * (min(work.width, left[x]) - 1) for x in work.rows}
    return [ScheduledRows(x, len(x.tokens) - 1, len(x.tokens) + len(d), True, d) for x, d in drafts.items()]


def one_step(s: Scheduler, live: list[Sequence], width: int = 1) -> int:
    """A step in which the first sequence gets one token of its row, the next one two, and so on, as far as drafted."""
    before, evictions = {x: x.prefilled for x in s.running}, s.counters.evictions
    work = s.next(width=min(width, s.widest))
    if work is None:
        assert not len(s), "there is work but nothing was planned"
        return 0
    decode = decode_rows(work)
    planned = [*decode, *work.prefill]
    assert sum(r.stop - r.start for r in planned) <= s.max_rows
    assert len({id(r.sequence) for r in planned}) == len(planned)
    assert len(s.running) <= s.slots
    for r in planned:
        assert len(r.sequence.pages) * s.pages.size >= r.stop
    for r in work.prefill:
        assert r.stop == r.sequence.prefilled
        if r.sequence in before and s.counters.evictions == evictions:
            assert r.start == before[r.sequence], "a token is computed twice, or not at all"
        assert r.samples == (r.stop == len(r.sequence.tokens))
    ended = 0
    counts = np.array([min(n % 3 + 1, len(r.drafts) + 1) for n, r in enumerate(decode)], np.int64)
    for r, count in zip(
        [*decode, *(p for p in work.prefill if p.samples)], [*counts, *[1] * len(planned)], strict=False
    ):
        for _ in range(count):
            r.sequence.tokens.append(len(r.sequence.tokens) % 50)
        r.sequence.generated += int(count)
        if r.sequence.generated == r.sequence.request.max_tokens:
            s.remove(r.sequence)
            live.remove(r.sequence)
            ended += 1
    s.collected(work, counts)
    return ended


def test_drafts_evict_nothing() -> None:
    s = one_batch(Pages(5, 4), 2, 16)
    live = [Sequence(Request(id=str(n), prompt=(n,) * 6, seed=n, max_tokens=9), [n] * 6) for n in (3, 4)]
    for x in live:
        s.add(x)
    one_step(s, live)
    work = s.next(width=4)
    assert work is not None
    assert (work.width, work.shape[0], s.counters.evictions) == (1, 2, 0), "one page is free, and drafts need two"


def test_drafts_leave_rows_to_prompts() -> None:
    s = one_batch(Pages(20, 4), 4, 16)
    live = [Sequence(Request(id=str(n), prompt=(n,) * n, seed=n, max_tokens=9), [n] * n) for n in (6, 20)]
    s.add(live[0])
    one_step(s, live)
    s.add(live[1])
    assert s.widest == 8
    work = s.next(width=8)
    assert work is not None
    assert (work.width, [p.stop - p.start for p in work.prefill], work.shape[0]) == (8, [8], 16)
    s.collected(work, np.array([3]))
    live[0].tokens += [7] * 3
    live[0].generated += 3
    s.check()
    one_step(s, live)
    one_step(s, live)
    assert (s.decoding, s.widest) == (2, 4)


def test_scheduler_knows_whether_it_can_prefill() -> None:
    """Widths are tried only in launches that do not."""
    s = one_batch(Pages(9, 4), 2, 8)
    live = [Sequence(Request(id=str(n), prompt=(n,) * n, seed=n, max_tokens=9), [n] * n) for n in (12, 20, 3)]
    assert not s.can_prefill
    s.add(live[0])
    assert s.can_prefill
    one_step(s, live)
    assert s.can_prefill, "four tokens of its prompt are left"
    one_step(s, live)
    assert not s.can_prefill
    s.add(live[1])
    assert not s.can_prefill, "five pages are free: it needs six, and the first one another"
    work = s.next()
    assert work is not None
    assert not work.prefill
    s = one_batch(Pages(9, 4), 1, 8)
    s.add(live[2])
    one_step(s, live)
    s.add(Sequence(Request(id="0", prompt=(5,), seed=1, max_tokens=9), [5]))
    assert not s.can_prefill, "there is no slot"


def test_freed_page_stays_cached_until_it_is_allocated() -> None:
    pages = Pages(2, 4)
    key = key_of(ROOT, [1, 2, 3, 4])
    page = pages.allocate()
    assert page is not None
    pages.register(page, key)
    pages.release([page])
    assert pages.find(key) == page
    pages.release([page])
    assert [pages.allocate(), pages.allocate()] != [None, None]
    assert pages.find(key) is None
    assert pages.allocate() is None


def test_keys_depend_on_all_previous_tokens() -> None:
    assert key_of(key_of(ROOT, [1]), [2]) != key_of(key_of(ROOT, [3]), [2])
    assert key_of(ROOT, [1, 2]) != key_of(ROOT, [2, 1])


def test_plan_without_a_prefill_has_only_sequences_that_decode() -> None:
    s = one_batch(Pages(20, 4), 4, 8)
    short, long, late = (
        Sequence(Request(id=str(n), prompt=tuple(range(3, 3 + n)), seed=n, max_tokens=9), list(range(3, 3 + n)))
        for n in (4, 12, 2)
    )
    s.add(short)
    assert [(r.sequence, r.stop - r.start) for r in plan(s)] == [(short, 4)]
    short.tokens.append(7)
    short.generated += 1
    s.add(long)
    s.add(late)
    assert [(r.sequence, r.stop - r.start) for r in plan(s, most_rows=3)] == [(short, 1), (long, 2)]
    short.tokens.append(8)
    short.generated += 1
    assert [(r.sequence, r.stop - r.start) for r in plan(s, may_prefill=False)] == [(short, 1)]
    short.tokens.append(9)
    short.generated += 1
    assert [(r.sequence, r.stop - r.start) for r in plan(s)] == [(short, 1), (long, 6), (late, 1)]
