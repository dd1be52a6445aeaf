"""Placement of responses: random fleets and queues against placing them one by one, and worked cases."""

from __future__ import annotations

import heapq
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from windfall.controller.scheduling.balance import WorkerLoad, place
from windfall.step_time import StepTime

FAST = StepTime(fixed_s=0.010, each_s=0.0001)
CROWDED = StepTime(fixed_s=1e-9, each_s=0.001)  # a batch of twice the size takes twice as long


@st.composite
def fleets(draw: st.DrawFn, most: int = 6, measured: bool = False) -> list[WorkerLoad]:
    loads = []
    for n in range(draw(st.integers(1, most))):
        slots = draw(st.integers(1, 12))
        profile = None
        if measured:
            each = draw(st.sampled_from([0.0001, 0.001, 0.01]))
            profile = StepTime(fixed_s=draw(st.sampled_from([0.0001, 0.01, 0.04, 0.1])), each_s=each)
        loads.append(WorkerLoad(worker=f"w{n}", running=draw(st.integers(0, slots)), slots=slots, profile=profile))
    return loads


@st.composite
def queues(draw: st.DrawFn) -> list[str]:
    sizes = draw(st.lists(st.integers(1, 8), max_size=6))
    return [f"{task}/{sibling}" for task, size in enumerate(sizes) for sibling in range(size)]


prefixes = st.dictionaries(
    st.sampled_from("012345"), st.lists(st.sampled_from(["w0", "w1", "w2", "gone"]), unique=True)
)
targets = st.dictionaries(st.sampled_from(["0/0", "0/1", "1/0", "2/3"]), st.sampled_from(["w0", "w1", "gone"]))


def after(loads: list[WorkerLoad], placed: list[tuple[str, str]]) -> list[WorkerLoad]:
    more = Counter(worker for _, worker in placed)
    return [replace(load, running=load.running + more[load.worker]) for load in loads]


def step_s(load: WorkerLoad, more: int = 0) -> float:
    assert load.profile is not None
    return load.profile.step_s(load.running + more)


@given(queues(), fleets() | fleets(measured=True), st.integers(0, 20), st.integers(0, 3), prefixes, targets)
@settings(max_examples=300)
def test_responses_are_placed_in_order_and_within_free_slots(
    queued: list[str], loads: list[WorkerLoad], backlog: int, coming: int, prefix_holders: dict[str, list[str]],
    move_targets: dict[str, str],
) -> None:  # fmt: skip
    def choose() -> list[tuple[str, str]]:
        return place(
            queued, loads, backlog=backlog, coming=coming, prefix_holders=prefix_holders, move_targets=move_targets
        )

    placed = choose()
    assert [id for id, _ in placed] == queued[: len(placed)]
    assert {worker for _, worker in placed} <= {load.worker for load in loads}
    assert all(load.running <= load.slots for load in after(loads, placed))
    assert choose() == placed, "the same state gives the same choice"


@given(queues(), fleets(), st.just(0) | st.integers(0, 20))
@settings(max_examples=200)
def test_unmeasured_workers_are_filled_up(queued: list[str], loads: list[WorkerLoad], n: int) -> None:
    room = sum(load.slots - load.running for load in loads)
    assert len(place(queued, loads, backlog=n)) == min(room, len(queued))


@given(queues(), fleets(measured=True))
@settings(max_examples=300)
def test_equals_placing_one_by_one_on_the_shortest_step(queued: list[str], loads: list[WorkerLoad]) -> None:
    heap = [(step_s(load, 1), n, load.running + 1) for n, load in enumerate(loads) if load.running < load.slots]
    heapq.heapify(heap)
    steps = []
    while heap and len(steps) < len(queued):
        s, n, running = heapq.heappop(heap)
        steps.append(s)
        if running < loads[n].slots:
            heapq.heappush(heap, (step_s(loads[n], running + 1 - loads[n].running), n, running + 1))
    mine, count = [], Counter[str]()
    of = {load.worker: load for load in loads}
    for _, worker in place(queued, loads):
        count[worker] += 1
        mine.append(step_s(of[worker], count[worker]))
    assert sorted(mine) == pytest.approx(sorted(steps))


@given(queues(), fleets(), st.integers(1, 3))
def test_share_of_workers_about_to_be_ready_is_held_back(
    queued: list[str], loads: list[WorkerLoad], coming: int
) -> None:
    """Each of them finds as many responses as the fullest worker has, minus one."""
    placed = place(queued, loads, coming=coming)
    before = {load.worker: load.running for load in loads}
    top = max((load.running for load in after(loads, placed) if load.running > before[load.worker]), default=0)
    assert len(queued) - len(placed) >= coming * (top - 1)


@given(queues(), fleets())
def test_responses_of_one_group_stay_together(queued: list[str], loads: list[WorkerLoad]) -> None:
    """A group is split only where the share of a worker ends."""
    placed = place(queued, loads)
    pairs = {(id.rpartition("/")[0], worker) for id, worker in placed}
    groups, workers = {group for group, _ in pairs}, {worker for _, worker in pairs}
    assert len(pairs) <= len(groups) + max(0, len(workers) - 1)


def test_groups_are_spread_as_wholes() -> None:
    loads = [WorkerLoad(worker=w, running=0, slots=8) for w in "ab"]
    placed = place([f"{task}/{sibling}" for task in range(4) for sibling in range(4)], loads)
    assert all(len({worker for id, worker in placed if id.startswith(f"{task}/")}) == 1 for task in range(4))
    assert Counter(worker for _, worker in placed) == {"a": 8, "b": 8}


def test_large_worker_takes_what_a_small_one_cannot() -> None:
    loads = [WorkerLoad(worker="small", running=0, slots=1), WorkerLoad(worker="large", running=0, slots=10)]
    placed = place([f"{n}/0" for n in range(8)], loads)
    assert Counter(worker for _, worker in placed) == {"small": 1, "large": 7}


@pytest.mark.parametrize(("slower", "share"), [(1, 50), (4, 20), (10, 9.1)])
def test_slower_worker_gets_its_share(slower: int, share: float) -> None:
    """If step time is proportional to the batch, a worker that is 4 times slower gets a fifth of 100 responses."""
    loads = [
        WorkerLoad(worker="fast", running=0, slots=200, profile=CROWDED),
        WorkerLoad(worker="slow", running=0, slots=200, profile=CROWDED.slower(slower)),
    ]
    placed = Counter(worker for _, worker in place([f"{n}/0" for n in range(100)], loads))
    assert placed["slow"] == pytest.approx(share, abs=1)
    assert placed.total() == 100


@pytest.mark.parametrize("slower", [4, 10])
def test_slow_worker_gets_nothing_while_a_fast_one_has_free_slots(slower: int) -> None:
    loads = [
        WorkerLoad(worker="fast", running=30, slots=64, profile=FAST),
        WorkerLoad(worker="slow", running=0, slots=64, profile=FAST.slower(slower)),
    ]
    assert {worker for _, worker in place([f"{n}/0" for n in range(20)], loads)} == {"fast"}


def test_cached_prefix_is_preferred_if_it_costs_little() -> None:
    loads = [WorkerLoad(worker=w, running=n, slots=64, profile=FAST) for w, n in (("a", 10), ("b", 18), ("c", 60))]
    assert place(["7/3"], loads) == [("7/3", "a")]
    assert place(["7/3"], loads, prefix_holders={"7": ["b"]}) == [("7/3", "b")], "11.9 beside 11.1 ms"
    assert place(["7/3"], loads, prefix_holders={"7": ["c"]}) == [("7/3", "a")], "16 beside 11 ms"
    assert place(["7/3"], loads, prefix_holders={"7": ["gone", "c", "b"]}) == [("7/3", "b")]
    assert place(["7/3"], [replace(loads[1], slots=18), loads[0]], prefix_holders={"7": ["b"]}) == [("7/3", "a")], (
        "no slot"
    )


def test_moved_response_goes_to_its_target() -> None:
    loads = [WorkerLoad(worker=w, running=10, slots=64, profile=FAST) for w in "abc"]
    placed = dict(
        place(["7/3", "7/4", "8/0"], loads, prefix_holders={"7": ["a"]}, move_targets={"7/3": "c", "8/0": "gone"})
    )
    assert placed["7/3"] == "c"
    assert placed["7/4"] == "a"
    assert placed["8/0"] in "abc"


def test_empty_queue_and_empty_fleet() -> None:
    assert place([], [WorkerLoad(worker="a", running=0, slots=1)]) == []
    assert place(["1/0"], []) == []
