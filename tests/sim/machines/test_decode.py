"""A simulated engine's arithmetic beside the plainest form of it, step by step; and shared bandwidth."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from windfall.link.messages import columns
from windfall.sim.core import loop as loops
from windfall.sim.core.loop import VirtualLoop
from windfall.sim.core.service import Listed, Service
from windfall.sim.machines.decode import FILLER, STOP, Decode, DecodeRow, marked, simulated
from windfall.sim.machines.network import Network, shares

SERVICE = Service(fixed_s=0.01, each_s=0.001, context_s=1e-5, prefill_s=0.0002, over_batch=3, over_s=0.002)
LENGTHS = st.lists(st.integers(1, 60), min_size=1, max_size=8)


def engine(lengths: list[int], granule: int = 1, prefill: int = 0, marks: bool = False) -> Decode:
    d = Decode(SERVICE, granule, marks=marks)
    for n, length in enumerate(lengths):
        d.add(DecodeRow(handle=n, seed=n, tag=100 + n, prompt=10 * n, made=0, length=length, cut=False, sent=0), 0)
    d.prefill = prefill
    return d


def plain_s(lengths: list[int], steps: int, prefill: int = 0) -> float:
    """Step by step."""
    total = SERVICE.prefill_s * prefill
    for step in range(steps):
        alive = [n for n, length in enumerate(lengths) if length > step]
        total += SERVICE.step_s(len(alive), 0, sum(10 * n + step for n in alive))
    return total


@given(lengths=LENGTHS, steps=st.integers(1, 80), prefill=st.integers(0, 50))
def test_many_steps_at_once_take_what_they_take_one_by_one(lengths: list[int], steps: int, prefill: int) -> None:
    assert engine(lengths, prefill=prefill).seconds(steps) == pytest.approx(plain_s(lengths, steps, prefill))


@settings(max_examples=200)
@given(lengths=LENGTHS, elapsed_s=st.floats(0, 3), prefill=st.integers(0, 5000))
def test_the_steps_that_are_over(lengths: list[int], elapsed_s: float, prefill: int) -> None:
    steps, took_s = engine(lengths, prefill=prefill).done_by(elapsed_s)
    times = [0.0, *(plain_s(lengths, n, prefill) for n in range(1, max(lengths) + 1))]
    assert times[steps] == pytest.approx(took_s)
    assert took_s <= elapsed_s + 1e-8
    assert steps == max(lengths) or times[steps + 1] > elapsed_s - 1e-8


@given(seconds=st.floats(0.001, 100), batch=st.integers(1, 100), context=st.integers(0, 100000))
def test_steps_in_is_steps_s_the_other_way_round(seconds: float, batch: int, context: int) -> None:
    count = SERVICE.steps_in(seconds, batch, context)
    assert SERVICE.steps_s(count, batch, context) == pytest.approx(seconds)


@given(lengths=LENGTHS, granule=st.integers(1, 20), cuts=st.lists(st.integers(1, 15), max_size=20), marks=st.booleans())
def test_every_simulated_token_is_told_once_and_in_order(
    lengths: list[int], granule: int, cuts: list[int], marks: bool
) -> None:
    d = engine(lengths, granule, marks=marks)
    told: dict[int, int] = {}
    for steps in [*cuts, 60]:
        if len(d):
            d.advance(steps)
        frame, ended = d.frame(3)
        if frame is None:
            assert not ended
            continue
        tokens, _ = columns(frame)
        at = 0
        for row, (handle, position) in enumerate(zip(frame.handles, frame.positions, strict=True)):
            count = frame.counts[row] if frame.counts else 1
            assert position == told.get(handle, 0)
            assert position > 0 or tokens[at] == 100 + handle
            for n in range(position == 0, count - (row in frame.finished)):
                assert tokens[at + n] == (marked(100 + handle, position + n) if marks else FILLER)
            told[handle] = position + count
            at += count
            assert (row in frame.finished) == (tokens[at - 1] == STOP)
    assert told == {n: simulated(length, granule) for n, length in enumerate(lengths)}


def one_by_one(lengths: list[int], kv_tokens: int) -> tuple[float, dict[int, int], int]:
    """An engine with so much room, a step at a time: how long it takes, the step at which each ends, preemptions."""
    line = [[n, 10 * n, 0, length] for n, length in enumerate(lengths)]  # who, prompt, made, length
    runs: list[list[int]] = []
    total, step, again, ends = 0.0, 0, 0, {}
    while line or runs:
        prefill = 0
        while len(runs) > 1 and sum(r[1] + r[2] + 1 for r in runs) > kv_tokens:
            line.insert(0, runs.pop())
            again += 1
        while line and (not runs or sum(r[1] + r[2] + 1 for r in [*runs, line[0]]) <= kv_tokens):
            runs.append(line.pop(0))
            prefill += runs[-1][1] + runs[-1][2]
        total += SERVICE.step_s(len(runs), prefill, sum(r[1] + r[2] for r in runs))
        step += 1
        for r in runs:
            r[2] += 1
            if r[2] == r[3]:
                ends[r[0]] = step
        runs = [r for r in runs if r[2] < r[3]]
    return total, ends, again


@settings(max_examples=150)
@given(lengths=LENGTHS, kv_tokens=st.integers(20, 400), cut=st.integers(1, 9))
def test_no_more_run_than_there_is_room_for(lengths: list[int], kv_tokens: int, cut: int) -> None:
    """As one engine step after the other would have it, however many are made at once."""
    d = Decode(SERVICE, 1, kv_tokens=kv_tokens)
    for n, length in enumerate(lengths):
        d.add(DecodeRow(handle=n, seed=n, tag=100 + n, prompt=10 * n, made=0, length=length, cut=False, sent=0), 10 * n)
    total_s, step = 0.0, 0
    ends: dict[int, int] = {}
    while len(d):
        running = len(d) - len(d.waiting)
        assert running == 1 or d.context + running <= kv_tokens
        steps = min(cut, d.horizon)
        total_s, step = total_s + d.seconds(steps), step + steps
        d.advance(steps)
        ends |= {row.handle: step for row in d.frame(1)[1]}
    plain_s, plain_ends, again = one_by_one(lengths, kv_tokens)
    assert d.preemptions == again
    assert set(ends) == set(plain_ends)
    assert all(0 <= ends[n] - plain_ends[n] < cut for n in ends), "told at the end of the steps made at once"
    assert total_s == pytest.approx(plain_s)


def test_bandwidth_is_shared_and_what_a_slow_one_leaves_is_for_others() -> None:
    assert shares(10.0, [1.0, 100.0, 100.0]) == [1.0, 4.5, 4.5]
    assert shares(10.0, []) == []

    async def main(loop: VirtualLoop) -> list[tuple[str, float]]:
        net, out = Network(10.0), []
        net.start(50.0, 100.0, lambda: out.append(("a", loop.time())))
        await asyncio.sleep(2)  # a has 20 bytes; then both get 5 a second
        net.start(50.0, 100.0, lambda: out.append(("b", loop.time())))
        gone = net.start(1e9, 100.0, lambda: out.append(("gone", loop.time())))
        net.stop(gone)
        await asyncio.sleep(60)
        return out

    assert loops.run(main) == [("a", pytest.approx(8.0)), ("b", pytest.approx(10.0))]


def test_listed_lengths_are_those_of_the_list_in_their_proportions() -> None:
    drawn = [Listed(lengths=(1, 1, 1, 9)).of(n) for n in range(2000)]
    assert 0.2 < drawn.count(9) / 2000 < 0.3
    assert len({Listed(lengths=(1, 5, 9), alike=1.0).of(n, group=4) for n in range(50)}) == 1
