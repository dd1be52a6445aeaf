"""Moves gain more than they cost, by figures computed independently here, and come to an end; random and worked
cases."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from windfall.controller.scheduling.balance import MARGIN, Move, Running, WorkerLoad, rebalance
from windfall.step_time import StepTime

ENGINE = StepTime(fixed_s=0.010, each_s=0.0001)
Fleet = dict[str, tuple[WorkerLoad, list[Running]]]


def fleet(*workers: tuple[StepTime | None, int, int], context: int = 500, waiting: int = 0) -> Fleet:
    """Workers as (profile, running, slots). At the first worker, `waiting` of the running responses wait."""
    out: Fleet = {}
    for n, (profile, running, slots) in enumerate(workers):
        w = waiting if n == 0 else 0
        held = [Running(id=f"{n}/{k}", context=context, waiting=k < w) for k in range(running)]
        out[f"w{n}"] = (WorkerLoad(worker=f"w{n}", running=running, slots=slots, profile=profile, waiting=w), held)
    return out


def choose(workers: Fleet, typical: float = 1000.0, max_moves: int = 10_000) -> list[Move]:
    loads = [load for load, _ in workers.values()]
    return rebalance(loads, lambda w: workers[w][1], typical=typical, max_moves=max_moves)


def apply(workers: Fleet, moves: list[Move]) -> Fleet:
    held = {name: list(running) for name, (_, running) in workers.items()}
    for move in moves:
        [r] = [r for r in held[move.source] if r.id == move.id]
        held[move.source].remove(r)
        held[move.target].append(replace(r, moves=r.moves + 1, waiting=False))
    return {
        name: (replace(load, running=len(held[name]), waiting=sum(r.waiting for r in held[name])), held[name])
        for name, (load, _) in workers.items()
    }


def counts(workers: Fleet) -> list[int]:
    return [load.running for load, _ in workers.values()]


def step_s(load: WorkerLoad, more: int = 0) -> float:
    assert load.profile is not None
    return load.profile.step_s(load.running - load.waiting + more)


@st.composite
def fleets(draw: st.DrawFn, waits: bool = False) -> Fleet:
    out: Fleet = {}
    for n in range(draw(st.integers(1, 5))):
        slots = draw(st.integers(1, 40))
        profile = ENGINE.slower(draw(st.sampled_from([1, 1.02, 2, 4, 10])))
        running = [
            Running(
                id=f"{n}/{k}", context=draw(st.sampled_from([10, 500, 8000])), moves=draw(st.integers(0, 3)),
                waiting=waits and draw(st.booleans()),
            )
            for k in range(draw(st.integers(0, slots)))
        ]  # fmt: skip
        wait = sum(r.waiting for r in running)
        load = WorkerLoad(worker=f"w{n}", running=len(running), slots=slots, profile=profile, waiting=wait)
        out[load.worker] = (load, running)
    return out


@given(fleets(), st.sampled_from([20.0, 1000.0]))
@settings(max_examples=150, deadline=None)
def test_each_move_pays_and_fits_into_free_slots(workers: Fleet, typical: float) -> None:
    moved = set()
    for move in choose(workers, typical):
        assert move.gain_s > MARGIN * move.cost_s > 0
        assert move.id not in moved
        moved.add(move.id)
        (source, held), (target, _) = workers[move.source], workers[move.target]
        [r] = [r for r in held if r.id == move.id]
        assert move.gain_s > MARGIN * move.cost_s * 2**r.moves, "moved before, and gains too little now"
        assert step_s(target, 1) < step_s(source)
        # Cost: its prefill, during which all responses at the target wait. Gain at most: all steps become shorter.
        assert move.cost_s == pytest.approx(0.05 + r.context * target.profile.each_s * (1 + target.running))  # type: ignore
        most_s = typical * (step_s(source) - min(step_s(target, 1), target.profile.fixed_s))  # type: ignore
        assert move.gain_s <= most_s + typical * source.profile.each_s * source.running  # type: ignore
        workers = apply(workers, [move])
        assert target.running < target.slots


@given(fleets(waits=True), st.sampled_from([20.0, 1000.0]))
@settings(max_examples=150, deadline=None)
def test_bound_for_the_context_changes_no_move(workers: Fleet, typical: float) -> None:
    loads = [load for load, _ in workers.values()]
    least = {name: min((r.context for r in held), default=0) for name, (_, held) in workers.items()}
    bounded = rebalance(loads, lambda w: workers[w][1], typical=typical, least_context=least.__getitem__)
    assert bounded == choose(workers, typical, max_moves=256)


def test_responses_of_a_large_fleet_are_looked_at_only_if_a_move_may_pay() -> None:
    """Otherwise a round would cost as much as all workers have responses, with each response that ends."""
    looked: list[str] = []

    def rounds(workers: Fleet, context: int) -> list[Move]:
        loads = [load for load, _ in workers.values()]
        held = lambda w: looked.append(w) or workers[w][1]  # noqa: E731
        return rebalance(loads, held, typical=20.0, least_context=lambda worker: context)

    balanced = fleet(*[(ENGINE, 20 + n % 2, 32) for n in range(300)])
    assert rounds(balanced, 500) == []
    one_idle = fleet(*[(ENGINE, 20, 32)] * 300, (ENGINE, 0, 32), context=8000)
    assert rounds(one_idle, 8000) == []
    assert looked == []
    short = fleet(*[(ENGINE, 20, 32)] * 300, (ENGINE, 0, 32), context=1)
    assert rounds(short, 1) == choose(short, 20.0, max_moves=256)


@given(fleets(waits=True))
@settings(max_examples=150, deadline=None)
def test_moving_comes_to_an_end(workers: Fleet) -> None:
    """Every proposed move is applied, repeatedly: the sum of all steps falls, or fewer wait, until nothing moves."""

    def height() -> float:
        return sum(
            load.profile.step_s(k + 1)  # type: ignore[union-attr]
            for load, _ in workers.values() for k in range(load.running - load.waiting)
        )  # fmt: skip

    for _ in range(100):
        before, waited = height(), sum(load.waiting for load, _ in workers.values())
        moves = choose(workers, max_moves=5)
        if not moves:
            return
        workers = apply(workers, moves)
        waits = sum(load.waiting for load, _ in workers.values())
        assert waits < waited or (waits == waited and height() < before)
    pytest.fail("moving does not end")


@given(st.lists(st.integers(0, 30), min_size=2, max_size=6))
@settings(max_examples=60, deadline=None)
def test_no_worker_stays_idle_beside_a_busy_one(running: list[int]) -> None:
    """With nearly free moves."""
    workers = fleet(*((ENGINE, n, 30) for n in running), context=1)
    workers = apply(workers, choose(workers, typical=10_000))
    assert choose(workers, typical=10_000) == []
    assert not (0 in counts(workers) and max(counts(workers)) > 1)
    assert sum(counts(workers)) == sum(running)


def test_idle_worker_takes_its_share() -> None:
    workers = fleet((ENGINE, 60, 64), (ENGINE, 0, 64))
    a, b = counts(apply(workers, choose(workers, typical=3000)))
    assert 15 <= b <= 30
    assert a > b, "moving the last ones would gain less than it costs"


@pytest.mark.parametrize("slower", [4, 10])
def test_last_responses_leave_the_slow_worker(slower: int) -> None:
    workers = fleet((ENGINE.slower(slower), 6, 64), (ENGINE, 20, 64), (ENGINE, 10, 64))
    moves = choose(workers)
    assert counts(apply(workers, moves))[0] == 0
    assert Counter(m.target for m in moves) == {"w2": 6}, "to the worker with fewer responses"


def test_no_move_for_little_gain() -> None:
    assert choose(fleet((ENGINE, 12, 64), (ENGINE, 10, 64))) == [], "about even"
    assert choose(fleet((ENGINE.slower(1.05), 10, 64), (ENGINE, 10, 64))) == [], "the difference may be noise"
    assert choose(fleet((ENGINE.slower(1.1), 20, 64), (ENGINE, 20, 64), context=1), typical=9000) == [], "so may this"
    assert choose(fleet((ENGINE.slower(1.4), 20, 64), (ENGINE, 20, 64), context=1), typical=9000)
    assert choose(fleet((ENGINE, 3, 64), (ENGINE, 0, 64)), typical=100) == [], "nearly finished"
    assert choose(fleet((ENGINE.slower(4), 1, 64), (ENGINE, 60, 64), context=200_000)) == [], "a very long prefill"
    assert choose(fleet((ENGINE.slower(4), 1, 64), (ENGINE, 64, 64))) == [], "no free slots"
    assert choose(fleet((ENGINE, 0, 4), (ENGINE, 0, 4))) == []


def test_no_move_without_measured_speeds() -> None:
    assert choose(fleet((ENGINE, 60, 64), (ENGINE, 0, 64)))
    assert choose(fleet((None, 60, 64), (None, 0, 64))) == []


def test_response_with_the_shortest_prefill_moves_first() -> None:
    workers = fleet((ENGINE.slower(4), 3, 64), (ENGINE, 0, 64))
    load, held = workers["w0"]
    held = [replace(held[0], context=900), replace(held[1], context=100), held[2]]
    assert [m.id for m in choose({**workers, "w0": (load, held)})] == ["0/1", "0/2", "0/0"]


def test_waiting_responses_move_first_even_to_a_slower_worker() -> None:
    workers = fleet((ENGINE, 20, 64), (ENGINE.slower(1.1), 4, 5), waiting=3)
    moves = choose(workers)
    assert [m.source for m in moves] == ["w0"]
    assert int(moves[0].id.rpartition("/")[2]) < 3, "one of the waiting responses"
    assert moves[0].target == "w1", "it has one free slot"
    assert choose(fleet((ENGINE, 20, 64), (ENGINE.slower(1000), 0, 5), waiting=1)) == [], (
        "it ends sooner where it waits"
    )


def test_running_responses_move_after_waiting_ones() -> None:
    moves = choose(fleet((ENGINE.slower(4), 6, 64), (ENGINE, 0, 64), waiting=2))
    assert [int(m.id.rpartition("/")[2]) < 2 for m in moves] == [True, True, False, False, False, False]


def test_number_of_moves_is_limited() -> None:
    assert len(choose(fleet((ENGINE.slower(4), 30, 64), (ENGINE, 0, 64)), max_moves=7)) == 7
