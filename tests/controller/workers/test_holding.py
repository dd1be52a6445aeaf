"""Workers go to the base that needs them, and switch only if that lasts."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from windfall.controller.workers.holding import JOINS, LOOK_S, LOOKS, BaseDemand, HeldBases

NAMES = "abcd"


def demands(*figures: tuple[int, int]) -> list[BaseDemand]:
    return [BaseDemand(name=n, responses=r, workers=w) for n, (r, w) in zip(NAMES, figures, strict=False)]


def looks(holding: HeldBases, wanted: list[BaseDemand], *, since_s: float = 0.0, join_s: float = 0.0) -> tuple | None:
    return [holding.switch(wanted, since_s + n * LOOK_S, join_s) for n in range(LOOKS)][-1]


def test_a_joining_worker_gets_the_base_with_most_responses_per_worker() -> None:
    assert HeldBases().choose(demands((60, 3), (60, 1))) == "b"
    assert HeldBases().choose(demands((60, 3), (0, 0))) == "b", "a base without a worker comes first"
    assert HeldBases().choose(demands((0, 0), (5, 0))) == "b"
    assert HeldBases().choose(demands((0, 0), (0, 0))) == "a"


def test_a_base_without_workers_gets_one_although_others_are_busier() -> None:
    assert looks(HeldBases(), demands((1000, 2), (1, 0))) == ("a", "b")
    assert looks(HeldBases(), demands((1000, 1), (1, 0))) is None, "the only worker of a busy base stays"
    assert looks(HeldBases(), demands((0, 1), (1, 0))) == ("a", "b")


def test_demand_that_swings_moves_nobody() -> None:
    holding = HeldBases()
    swings = [demands((100, 2), (0, 2)), demands((0, 2), (100, 2))]
    assert not any(holding.switch(swings[n % 2], n * LOOK_S, 0.0) for n in range(20))


def test_looks_in_between_do_not_count() -> None:
    holding, wanted = HeldBases(), demands((0, 3), (100, 1))
    assert not any(holding.switch(wanted, n / 100 * LOOK_S, 0.0) for n in range(200))
    assert holding.switch(wanted, 2.5 * LOOK_S, 0.0) == ("a", "b")


def test_no_switch_follows_before_the_last_one_could_help() -> None:
    holding, wanted, join_s = HeldBases(), demands((0, 9), (100, 1)), 30.0
    times = [n * LOOK_S for n in range(60)]
    switched = [s for s in times if holding.switch(wanted, s, join_s)]
    assert switched[0] == (LOOKS - 1) * LOOK_S
    assert all(later - s >= JOINS * join_s for s, later in pairwise(switched))
    assert len(switched) >= 4


@given(st.lists(st.tuples(st.integers(0, 200), st.integers(0, 20)), min_size=1, max_size=4))
def test_switches_come_to_an_end(figures: list[tuple[int, int]]) -> None:
    """With constant demand, and each switch carried out, every base with responses has a worker in the end if there
    are enough, and no further switch is wanted."""
    holding, now_s, before = HeldBases(), 0.0, [list(f) for f in figures]
    total = sum(w for _, w in figures)
    for _ in range(LOOKS * 200):
        now_s += LOOK_S
        if switch := holding.switch(demands(*((r, w) for r, w in before)), now_s, 0.0):
            source, target = (NAMES.index(name) for name in switch)
            before[source][1] -= 1
            before[target][1] += 1
            assert before[source][1] >= 0
            assert before[target][0] > 0, "no worker goes where nothing is to be done"
    assert looks(holding, demands(*((r, w) for r, w in before)), since_s=now_s + LOOK_S) is None
    assert sum(w for _, w in before) == total
    needy = [r for r, _ in before if r]
    if total >= len(needy):
        assert all(w for r, w in before if r)
