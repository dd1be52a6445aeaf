"""The arithmetic of a simulated engine compared with a plain step-by-step version; and shared bandwidth."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from windfall.link.messages import columns
from windfall.sim.core.draws import MeasuredLengths
from windfall.sim.machines.decode import FILLER, STOP, Decode, DecodeRow, simulated
from windfall.step_time import StepTime

SERVICE = StepTime(fixed_s=0.01, each_s=0.001, context_s=1e-5, prefill_s=0.0002, over_batch=3, over_s=0.002)
LENGTHS = st.lists(st.integers(1, 60), min_size=1, max_size=8)


def engine(lengths: list[int], granule: int = 1, prefill: int = 0) -> Decode:
    d = Decode(SERVICE, granule)
    for n, length in enumerate(lengths):
        d.add(
            DecodeRow(handle=n, seed=n, id_token=100 + n, prompt=10 * n, generated=0, length=length, cut=False, sent=0),
            0,
        )
    d.prefill = prefill
    return d


def plain_s(lengths: list[int], steps: int, prefill: int = 0) -> float:
    """Seconds, computed step by step."""
    total = SERVICE.prefill_s * prefill
    for step in range(steps):
        alive = [n for n, length in enumerate(lengths) if length > step]
        total += SERVICE.step_s(len(alive), sum(10 * n + step for n in alive)) if alive else 0.0
    return total


@given(lengths=LENGTHS, steps=st.integers(1, 80), prefill=st.integers(0, 50))
def test_many_steps_at_once_take_as_long_as_one_by_one(lengths: list[int], steps: int, prefill: int) -> None:
    assert engine(lengths, prefill=prefill).seconds(steps) == pytest.approx(plain_s(lengths, steps, prefill))


@settings(max_examples=200)
@given(lengths=LENGTHS, elapsed_s=st.floats(0, 3), prefill=st.integers(0, 5000))
def test_completed_steps_after_an_elapsed_time(lengths: list[int], elapsed_s: float, prefill: int) -> None:
    steps, took_s = engine(lengths, prefill=prefill).done_by(elapsed_s)
    times = [0.0, *(plain_s(lengths, n, prefill) for n in range(1, max(lengths) + 1))]
    assert times[steps] == pytest.approx(took_s)
    assert took_s <= elapsed_s + 1e-8
    assert steps == max(lengths) or times[steps + 1] > elapsed_s - 1e-8


@given(seconds=st.floats(0.001, 100), batch=st.integers(1, 100), context=st.integers(0, 100000))
def test_so_many_steps_take_that_long(seconds: float, batch: int, context: int) -> None:
    count = SERVICE.steps_in(seconds, batch, context)
    grown_s = SERVICE.context_s * batch * count * (count - 1) / 2  # every step adds a token to each context
    assert count * SERVICE.step_s(batch, context) + grown_s == pytest.approx(seconds)


@given(lengths=LENGTHS, granule=st.integers(1, 20), cuts=st.lists(st.integers(1, 15), max_size=20))
def test_every_simulated_token_is_sent_once_and_in_order(lengths: list[int], granule: int, cuts: list[int]) -> None:
    d = engine(lengths, granule)
    sent: dict[int, int] = {}
    for steps in [*cuts, 60]:
        if len(d):
            d.advance(steps)
        frame, ended = d.frame({"": 3})
        if frame is None:
            assert not ended
            continue
        tokens, _ = columns(frame)
        at = 0
        for row, (handle, position) in enumerate(zip(frame.handles, frame.positions, strict=True)):
            count = frame.counts[row] if frame.counts else 1
            assert position == sent.get(handle, 0)
            assert position > 0 or tokens[at] == 100 + handle
            for n in range(position == 0, count - (row in frame.finished)):
                assert tokens[at + n] == FILLER
            sent[handle] = position + count
            at += count
            assert (row in frame.finished) == (tokens[at - 1] == STOP)
    assert sent == {n: simulated(length, granule) for n, length in enumerate(lengths)}


def one_by_one(lengths: list[int], kv_tokens: int) -> tuple[float, dict[int, int], int]:
    """An engine with this KV cache, one step at a time: seconds, the step at which each response ends, preemptions."""
    queue = [[n, 10 * n, 0, length] for n, length in enumerate(lengths)]  # number, prompt, generated, length
    runs: list[list[int]] = []
    total, step, preemptions, ends = 0.0, 0, 0, {}
    while queue or runs:
        prefill = 0
        while len(runs) > 1 and sum(r[1] + r[2] + 1 for r in runs) > kv_tokens:
            queue.insert(0, runs.pop())
            preemptions += 1
        while queue and (not runs or sum(r[1] + r[2] + 1 for r in [*runs, queue[0]]) <= kv_tokens):
            runs.append(queue.pop(0))
            prefill += runs[-1][1] + runs[-1][2]
        total += SERVICE.step_s(len(runs), sum(r[1] + r[2] for r in runs)) + SERVICE.prefill_s * prefill
        step += 1
        for r in runs:
            r[2] += 1
            if r[2] == r[3]:
                ends[r[0]] = step
        runs = [r for r in runs if r[2] < r[3]]
    return total, ends, preemptions


@settings(max_examples=150)
@given(lengths=LENGTHS, kv_tokens=st.integers(20, 400), cut=st.integers(1, 9))
def test_running_responses_fit_the_kv_cache(lengths: list[int], kv_tokens: int, cut: int) -> None:
    """The result is the same as with single steps, however many are taken at once."""
    d = Decode(SERVICE, 1, kv_tokens=kv_tokens)
    for n, length in enumerate(lengths):
        d.add(
            DecodeRow(handle=n, seed=n, id_token=100 + n, prompt=10 * n, generated=0, length=length, cut=False, sent=0),
            10 * n,
        )
    total_s, step = 0.0, 0
    ends: dict[int, int] = {}
    while len(d):
        running = len(d) - len(d.waiting)
        assert running == 1 or d.context + running <= kv_tokens
        steps = min(cut, d.horizon)
        total_s, step = total_s + d.seconds(steps), step + steps
        d.advance(steps)
        ends |= {row.handle: step for row in d.frame({"": 1})[1]}
    plain_s, plain_ends, preemptions = one_by_one(lengths, kv_tokens)
    assert d.preemptions == preemptions
    assert set(ends) == set(plain_ends)
    assert all(0 <= ends[n] - plain_ends[n] < cut for n in ends), "reported at the end of the steps taken at once"
    assert total_s == pytest.approx(plain_s)


def test_measured_lengths_keep_their_proportions() -> None:
    drawn = [MeasuredLengths(lengths=(1, 1, 1, 9)).draw(n) for n in range(2000)]
    assert 0.2 < drawn.count(9) / 2000 < 0.3
    assert len({MeasuredLengths(lengths=(1, 5, 9), alike=1.0).draw(n, group=4) for n in range(50)}) == 1
