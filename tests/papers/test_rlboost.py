"""RLBoost's Algorithm 2 as published: fewest pending first, one move at a time, all above B to an idle worker."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from benchmarks.papers.rlboost import THETA, balance, knee, select
from windfall.controller.scheduling.balance import Running, WorkerLoad
from windfall.step_time import StepTime

PROFILE = StepTime(fixed_s=0.01, each_s=0.001)  # knee 40


def load(name: str, running: int, *, slots: int = 100, waiting: int = 0) -> WorkerLoad:
    return WorkerLoad(worker=name, running=running, slots=slots, waiting=waiting, profile=PROFILE)


def held(worker: str) -> list[Running]:
    return [Running(id=f"{worker}/{n}", context=10, waiting=n % 2 == 1) for n in range(60)]


def test_fewest_pending_first_then_lowest_load() -> None:
    loads = [load("a", 5, waiting=2), load("b", 50), load("c", 20)]
    assert [w for _, w in select(["1/0", "1/1"], loads)] == ["c", "c"]
    assert select(["1/0"], [load("a", 5, waiting=THETA)]) == [], "held back"


def test_machine_with_four_times_the_slots_gets_four_times_as_many() -> None:
    loads = [load("local", 0, slots=400), *(load(n, 0) for n in "abcd")]
    found = Counter(w for _, w in select([f"{n}/0" for n in range(400)], loads))
    assert found == {"local": 200, "a": 50, "b": 50, "c": 50, "d": 50}


def test_share_of_workers_about_to_be_ready_is_held_back() -> None:
    ids = [f"{n}/0" for n in range(60)]
    assert len(select(ids, [load("a", 0)], coming=2)) == 20
    assert [i for i, _ in select(ids, [load("a", 0)], coming=2)] == ids[:20]


@given(
    queued=st.integers(0, 60), coming=st.integers(0, 2),
    workers=st.lists(st.tuples(st.integers(0, 12), st.integers(1, 12), st.integers(0, 10)), max_size=5),
)  # fmt: skip
def test_responses_are_placed_in_order_and_within_slots(
    queued: int, coming: int, workers: list[tuple[int, int, int]]
) -> None:
    loads = [load(f"w{n}", r, slots=s, waiting=min(r, w)) for n, (r, s, w) in enumerate(workers)]
    ids = [f"{n}/0" for n in range(queued)]
    out = select(ids, loads, coming=coming, move_targets={"0/0": "w0", "1/0": "gone"})
    assert [i for i, _ in out] == ids[: len(out)]
    got = Counter(w for _, w in out)
    for each in loads:
        assert got[each.worker] <= max(0, each.slots - each.running)


def test_pending_response_moves_to_a_worker_without_pending_ones() -> None:
    [move] = balance([load("a", 60, waiting=3), load("b", 60, waiting=1), load("c", 50)], held)
    assert (move.id, move.source, move.target) == ("a/1", "a", "c")
    assert balance([load("a", 60, waiting=3), load("b", 60, waiting=1)], held) == []


def test_all_above_b_move_to_an_idle_worker() -> None:
    moves = balance([load("a", 60), load("b", 30), load("c", 0)], held)
    assert len(moves) == 60 - knee(PROFILE)
    assert {(m.source, m.target) for m in moves} == {("a", "c")}
    assert balance([load("a", 39), load("b", 30), load("c", 0)], held) == []
    assert balance([load("a", 60), load("b", 1)], held) == [], "no worker is idle"
