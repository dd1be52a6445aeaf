"""Where responses go, over random fleets and queues; and that giving back, then placing again, comes to rest."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from windfall.rollout.balance import Load, even, place


@st.composite
def fleets(draw: st.DrawFn, most: int = 6) -> list[Load]:
    loads = []
    for n in range(draw(st.integers(1, most))):
        slots = draw(st.integers(1, 12))
        loads.append(Load(worker=f"w{n}", running=draw(st.integers(0, slots)), slots=slots))
    return loads


@st.composite
def queues(draw: st.DrawFn) -> list[str]:
    sizes = draw(st.lists(st.integers(1, 8), max_size=6))
    return [f"{task}/{sibling}" for task, size in enumerate(sizes) for sibling in range(size)]


def after(loads: list[Load], placed: list[tuple[str, str]]) -> list[Load]:
    more = Counter(worker for _, worker in placed)
    return [replace(load, running=load.running + more[load.worker]) for load in loads]


@given(queues(), fleets(), st.integers(0, 20), st.integers(0, 3))
def test_in_order_once_and_never_over_slots(queued: list[str], loads: list[Load], behind: int, coming: int) -> None:
    placed = place(queued, loads, behind=behind, coming=coming)
    assert [id for id, _ in placed] == queued[: len(placed)]
    assert {worker for _, worker in placed} <= {load.worker for load in loads}
    assert all(load.running <= load.slots for load in after(loads, placed))
    assert place(queued, loads, behind=behind, coming=coming) == placed, "the same state, the same choice"


@given(queues(), fleets(), st.just(0) | st.integers(0, 20))
@settings(max_examples=400)
def test_nothing_waits_while_there_is_room_and_nobody_is_coming(queued: list[str], loads: list[Load], n: int) -> None:
    """Also when the workers are of very different sizes, or unevenly loaded."""
    room = sum(load.slots - load.running for load in loads)
    assert len(place(queued, loads, behind=n)) == min(room, len(queued))


def test_a_large_worker_takes_what_a_small_one_cannot() -> None:
    loads = [Load(worker="small", running=0, slots=1), Load(worker="large", running=0, slots=10)]
    placed = place([f"{n}/0" for n in range(8)], loads)
    assert Counter(worker for _, worker in placed) == {"small": 1, "large": 7}


@given(queues(), fleets(), st.integers(0, 20), st.integers(1, 3))
def test_those_who_are_coming_find_their_part(queued: list[str], loads: list[Load], behind: int, coming: int) -> None:
    """Nobody who is here is given more than its part of all that is open."""
    total = len(queued) + behind + sum(load.running for load in loads)
    fair = -(-total // (len(loads) + coming))
    for before, now in zip(loads, after(loads, place(queued, loads, behind=behind, coming=coming)), strict=True):
        assert now.running <= max(fair, before.running)


@given(queues(), fleets())
def test_as_even_as_the_slots_allow(queued: list[str], loads: list[Load]) -> None:
    """Nobody goes beyond its part while another, who has not reached his, has room."""
    fair = -(-(len(queued) + sum(load.running for load in loads)) // len(loads))
    now = after(loads, place(queued, loads))
    grown = [n for n, before in zip(now, loads, strict=True) if n.running > max(fair, before.running)]
    if grown:
        assert all(load.running >= min(load.slots, fair) for load in now)


@given(queues(), fleets())
def test_siblings_stay_together_while_there_is_room(queued: list[str], loads: list[Load]) -> None:
    """A group goes on at another worker only when the one before has no room for more, or has its part."""
    placed = place(queued, loads)
    total = len(queued) + sum(load.running for load in loads)
    fair = -(-total // len(loads))
    running = {load.worker: load.running for load in loads}
    slots = {load.worker: load.slots for load in loads}
    for (id, worker), (next_id, next_worker) in pairwise(placed):
        running[worker] += 1
        if id.rpartition("/")[0] == next_id.rpartition("/")[0] and worker != next_worker:
            assert running[worker] >= min(slots[worker], fair)


def test_whole_groups_side_by_side() -> None:
    loads = [Load(worker=w, running=0, slots=8) for w in "ab"]
    placed = place([f"{task}/{sibling}" for task in range(4) for sibling in range(4)], loads)
    assert all(len({worker for id, worker in placed if id.startswith(f"{task}/")}) == 1 for task in range(4))
    assert Counter(worker for _, worker in placed) == {"a": 8, "b": 8}


@given(queues(), fleets())
def test_a_group_begins_where_the_smallest_share_is_taken(queued: list[str], loads: list[Load]) -> None:
    loads = [replace(load, slots=200 + n) for n, load in enumerate(loads)]  # room for all, shares of their own
    share = {load.worker: load.running / load.slots for load in loads}
    slots = {load.worker: load.slots for load in loads}
    fair = -(-(len(queued) + sum(load.running for load in loads)) // len(loads))
    group = None
    for id, worker in place(queued, loads):
        if id.rpartition("/")[0] != group:
            group = id.rpartition("/")[0]
            assert share[worker] == pytest.approx(min(x for w, x in share.items() if x < (fair - 1e-6) / slots[w]))
        share[worker] += 1 / slots[worker]


def test_nothing_and_nobody() -> None:
    assert place([], [Load(worker="a", running=0, slots=1)]) == []
    assert place(["1/0"], []) == []
    assert even([]) == []


@given(fleets())
def test_giving_back_makes_it_better_and_comes_to_rest(loads: list[Load]) -> None:
    """Give back, place again, look again: the most loaded never gets more, somebody idle gets work, and it ends."""
    for _ in range(5):
        back = dict(even(loads))
        if not back:
            break
        assert any(load.running == 0 for load in loads)
        before = loads
        loads = [replace(load, running=load.running - back.get(load.worker, 0)) for load in loads]
        assert all(count > 0 for count in back.values())
        assert all(load.running > 0 for load in loads if load.worker in back), "nobody is left with nothing"
        moved = [f"{n}/0" for n in range(sum(back.values()))]
        placed = place(moved, loads)
        assert len(placed) == len(moved), "what was taken back waits"
        assert not {worker for _, worker in placed} & set(back), "a move to where it was is a prefill for nothing"
        loads = after(loads, placed)
        assert max(load.running for load in loads) <= max(load.running for load in before)
        assert sum(load.running == 0 for load in loads) < sum(load.running == 0 for load in before)
    assert even(loads) == [], "it does not come to rest"


@given(fleets())
def test_nobody_gives_back_unless_somebody_is_idle(loads: list[Load]) -> None:
    assume(all(load.running for load in loads))
    assert even(loads) == []


@pytest.mark.parametrize(
    ("loads", "back"),
    [
        ([(1, 4), (0, 4)], {}),
        ([(2, 4), (0, 4)], {"w0": 1}),
        ([(9, 16), (0, 1)], {"w0": 1}),
        ([(8, 8), (8, 8), (0, 8)], {"w0": 2, "w1": 2}),
        ([(0, 4), (0, 4)], {}),
    ],
)
def test_how_much_is_given_back(loads: list[tuple[int, int]], back: dict[str, int]) -> None:
    made = [Load(worker=f"w{n}", running=running, slots=slots) for n, (running, slots) in enumerate(loads)]
    assert dict(even(made)) == back
