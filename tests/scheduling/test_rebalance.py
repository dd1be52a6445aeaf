"""Moves that pay, by figures computed here again, and that come to rest; in random fleets and in worked cases."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from windfall.scheduling.balance import WorkerLoad
from windfall.scheduling.rebalance import MARGIN, Move, Running, rebalance
from windfall.scheduling.worker_speed import Profile

ENGINE = Profile(fixed_s=0.010, each_s=0.0001)
Fleet = dict[str, tuple[WorkerLoad, list[Running]]]


def fleet(*workers: tuple[Profile | None, int, int], context: int = 500, waiting: int = 0) -> Fleet:
    """(profile, running, slots) each; of those running at the first, `waiting` wait."""
    out: Fleet = {}
    for n, (profile, running, slots) in enumerate(workers):
        w = waiting if n == 0 else 0
        held = [Running(id=f"{n}/{k}", context=context, waiting=k < w) for k in range(running)]
        out[f"w{n}"] = (WorkerLoad(worker=f"w{n}", running=running, slots=slots, profile=profile, waiting=w), held)
    return out


def choose(workers: Fleet, typical: float = 1000.0, queued: int = 0, most: int = 10_000) -> list[Move]:
    loads = [load for load, _ in workers.values()]
    return rebalance(loads, lambda w: workers[w][1], typical=typical, queued=queued, most=most)


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
        profile = ENGINE.times(draw(st.sampled_from([1, 1.02, 2, 4, 10])))
        running = [
            Running(
                id=f"{n}/{k}", context=draw(st.sampled_from([10, 500, 8000])), moves=draw(st.integers(0, 3)),
                left=draw(st.none() | st.sampled_from([5.0, 3000.0])), waiting=waits and draw(st.booleans()),
            )
            for k in range(draw(st.integers(0, slots)))
        ]  # fmt: skip
        wait = sum(r.waiting for r in running)
        load = WorkerLoad(worker=f"w{n}", running=len(running), slots=slots, profile=profile, waiting=wait)
        out[load.worker] = (load, running)
    return out


@given(fleets(), st.sampled_from([20.0, 1000.0]))
@settings(max_examples=150, deadline=None)
def test_each_move_pays_and_fits(workers: Fleet, typical: float) -> None:
    moved = set()
    for move in choose(workers, typical):
        assert move.gain_s > MARGIN * move.cost_s > 0
        assert move.id not in moved
        moved.add(move.id)
        (source, held), (target, _) = workers[move.source], workers[move.target]
        [r] = [r for r in held if r.id == move.id]
        assert move.gain_s > MARGIN * move.cost_s * 2**r.moves, "moved before, and gains too little"
        assert step_s(target, 1) < step_s(source)
        # What it costs: its prefill, which all at the target wait for. What it can gain at most: all steps shorter.
        assert move.cost_s == pytest.approx(0.05 + r.context * target.profile.each_s * (1 + target.running))  # type: ignore
        left = typical if r.left is None else r.left
        most_s = left * (step_s(source) - min(step_s(target, 1), target.profile.fixed_s))  # type: ignore
        assert move.gain_s <= most_s + typical * source.profile.each_s * source.running  # type: ignore
        workers = apply(workers, [move])
        assert target.running < target.slots


@given(fleets(waits=True))
@settings(max_examples=150, deadline=None)
def test_it_comes_to_rest(workers: Fleet) -> None:
    """Whatever is proposed is done, again and again: the sum of all steps falls, or fewer wait, until nothing moves."""

    def height() -> float:
        return sum(
            load.profile.step_s(k + 1)  # type: ignore[union-attr]
            for load, _ in workers.values() for k in range(load.running - load.waiting)
        )  # fmt: skip

    for _ in range(100):
        before, waited = height(), sum(load.waiting for load, _ in workers.values())
        moves = choose(workers, most=5)
        if not moves:
            return
        workers = apply(workers, moves)
        waits = sum(load.waiting for load, _ in workers.values())
        assert waits < waited or (waits == waited and height() < before)
    pytest.fail("it goes on and on")


@given(st.lists(st.integers(0, 30), min_size=2, max_size=6))
@settings(max_examples=60, deadline=None)
def test_nobody_is_idle_beside_a_crowd(running: list[int]) -> None:
    """Where moving costs next to nothing."""
    workers = fleet(*((ENGINE, n, 30) for n in running), context=1)
    workers = apply(workers, choose(workers, typical=10_000))
    assert choose(workers, typical=10_000) == []
    assert not (0 in counts(workers) and max(counts(workers)) > 1)
    assert sum(counts(workers)) == sum(running)


def test_an_idle_worker_takes_its_part_of_a_crowd() -> None:
    workers = fleet((ENGINE, 60, 64), (ENGINE, 0, 64))
    a, b = counts(apply(workers, choose(workers, typical=3000)))
    assert 15 <= b <= 30
    assert a > b, "the last ones would gain less than they cost"


@pytest.mark.parametrize("slower", [4, 10])
def test_the_tail_leaves_the_slow_worker(slower: int) -> None:
    workers = fleet((ENGINE.times(slower), 6, 64), (ENGINE, 20, 64), (ENGINE, 10, 64))
    moves = choose(workers)
    assert counts(apply(workers, moves))[0] == 0
    assert Counter(m.target for m in moves) == {"w2": 6}, "to the one with fewer"


def test_no_move_for_little_gain() -> None:
    assert choose(fleet((ENGINE, 12, 64), (ENGINE, 10, 64))) == [], "about even"
    assert choose(fleet((ENGINE.times(1.05), 10, 64), (ENGINE, 10, 64))) == [], "that may be noise"
    assert choose(fleet((ENGINE.times(1.1), 20, 64), (ENGINE, 20, 64), context=1), typical=9000) == [], "that, too"
    assert choose(fleet((ENGINE.times(1.4), 20, 64), (ENGINE, 20, 64), context=1), typical=9000)
    assert choose(fleet((ENGINE, 3, 64), (ENGINE, 0, 64)), typical=100) == [], "nearly done"
    assert choose(fleet((ENGINE.times(4), 1, 64), (ENGINE, 60, 64), context=200_000)) == [], "a very long prefill"
    assert choose(fleet((ENGINE.times(4), 1, 64), (ENGINE, 64, 64))) == [], "no room"
    assert choose(fleet((ENGINE, 0, 4), (ENGINE, 0, 4))) == []


def test_not_while_something_is_queued_or_nobody_was_measured() -> None:
    crowd = fleet((ENGINE, 60, 64), (ENGINE, 0, 64))
    assert choose(crowd)
    assert choose(crowd, queued=1) == []
    assert choose(fleet((None, 60, 64), (None, 0, 64))) == []


def test_who_goes_first() -> None:
    workers = fleet((ENGINE.times(4), 3, 64), (ENGINE, 0, 64))
    load, held = workers["w0"]
    known = [replace(held[0], left=100.0), replace(held[1], left=5000.0), held[2]]
    assert [m.id for m in choose({**workers, "w0": (load, known)})] == ["0/1", "0/2", "0/0"], "what has most left"
    young = [replace(held[0], context=900), replace(held[1], context=100), held[2]]
    assert [m.id for m in choose({**workers, "w0": (load, young)})] == ["0/1", "0/2", "0/0"], "what costs least"


def test_what_waits_goes_first_and_even_to_a_slower_worker() -> None:
    workers = fleet((ENGINE, 20, 64), (ENGINE.times(1.1), 4, 5), waiting=3)
    moves = choose(workers)
    assert [m.source for m in moves] == ["w0"]
    assert int(moves[0].id.rpartition("/")[2]) < 3, "one of those that wait"
    assert moves[0].target == "w1", "it had room for one"
    assert choose(fleet((ENGINE, 20, 64), (ENGINE.times(1000), 0, 5), waiting=1)) == [], "sooner done where it waits"


def test_when_nothing_waits_any_more_what_runs_is_next() -> None:
    moves = choose(fleet((ENGINE.times(4), 6, 64), (ENGINE, 0, 64), waiting=2))
    assert [int(m.id.rpartition("/")[2]) < 2 for m in moves] == [True, True, False, False, False, False]


def test_no_more_than_asked_for() -> None:
    assert len(choose(fleet((ENGINE.times(4), 30, 64), (ENGINE, 0, 64)), most=7)) == 7
