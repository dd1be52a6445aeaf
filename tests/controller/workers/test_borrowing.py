"""Which lenders are used: as many as the step needs, those with the least recent use first, and few changes."""

from __future__ import annotations

import math
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from windfall.controller.workers.borrowing import HOLD_S, STICKY, Borrowing, Need, choose, knee
from windfall.controller.workers.members import Member, WorkerState
from windfall.link.messages import Capacity
from windfall.step_time import StepTime
from windfall.types import Lease, LeaseKind


def member(
    id: str,
    *,
    use: float = 0.0,
    slots: int = 8,
    kind: LeaseKind = "borrowed",
    in_use: bool = False,
    longest: float = math.inf,
) -> Member:
    out = Member(id=id, name=id, lease=Lease(kind=kind), joined_s=0, seen_s=0, state=WorkerState.READY, longest=longest)
    out.slots = 64
    if kind == "borrowed":
        out.lends, out.in_use = True, in_use
        out.capacity = Capacity(slots=slots, state="normal", use=use, lent=0.0)
    else:
        out.slots = slots
    return out


needs = st.builds(
    Need, responses=st.integers(0, 400), own_workers=st.integers(0, 6), own_slots=st.integers(0, 200),
    knee=st.floats(1.0, 50.0),
)  # fmt: skip
lenders = st.lists(
    st.builds(
        member, st.integers(0, 10**6).map(str), slots=st.integers(0, 64), use=st.floats(0.0, 1.0),
        in_use=st.booleans(),
    ),
    max_size=12, unique_by=lambda w: w.id,
)  # fmt: skip


def use(lender: Member) -> float:
    assert lender.capacity is not None
    return lender.capacity.use


@given(needs, lenders, st.integers(0, 10))
def test_never_too_many_and_only_those_that_can_take_something(need: Need, all: list[Member], most: int) -> None:
    chosen = choose(need, all, most=most)
    assert len(chosen) <= most
    assert min((w.lendable for w in chosen), default=1) > 0
    left = [w for w in all if w.lendable and w not in chosen]
    if need.responses > need.own_slots + sum(w.lendable for w in chosen):
        assert len(chosen) == most or not left, "a response waits although a lender has room"
    if chosen and left:
        worst = max(map(use, chosen))
        assert worst <= min(map(use, left)) + STICKY + 1e-9, "the lenders with the least use come first"


@given(needs, lenders, st.integers(0, 10), st.integers(1, 100))
def test_more_need_never_means_fewer_lenders(need: Need, all: list[Member], most: int, more: int) -> None:
    chosen = choose(need, all, most=most)
    assert choose(replace(need, responses=need.responses + more), all, most=most)[: len(chosen)] == chosen
    richer = replace(need, own_workers=need.own_workers + 1, own_slots=need.own_slots + more)
    assert chosen[: len(choose(richer, all, most=most))] == choose(richer, all, most=most)


@given(needs, lenders, st.integers(0, 10))
def test_a_choice_is_stable(need: Need, all: list[Member], most: int) -> None:
    for _ in range(2):  # a lender with more slots may make another one superfluous, once
        chosen = choose(need, all, most=most)
        for lender in all:
            lender.in_use = lender in chosen
    assert {w.id for w in choose(need, all, most=most)} == {w.id for w in all if w.in_use}


def names(chosen: list[Member]) -> list[str]:
    return [w.id for w in chosen]


def test_backlog_decides_and_the_least_used_come_first() -> None:
    """A batch of 25 makes steps a quarter longer; a backlog of 24 responses needs two lenders with 16 slots each."""
    need = Need(responses=40, own_workers=1, own_slots=16, knee=knee([StepTime(fixed_s=0.01, each_s=0.0001)]))
    lent = [member(id, slots=16, use=use) for id, use in (("a", 0.6), ("b", 0.1), ("c", 0.3))]
    assert names(choose(need, lent, most=8)) == ["b", "c"]


def test_own_machines_are_enough_for_the_tail() -> None:
    fast = knee([StepTime(fixed_s=0.01, each_s=0.0001)])
    lent = [member(n, slots=16, use=0.1) for n in "abc"]
    begin = Need(responses=200, own_workers=2, own_slots=64, knee=fast)
    assert len(choose(begin, lent, most=8)) == 3
    assert choose(replace(begin, responses=40), lent, most=8) == []
    assert names(choose(replace(begin, responses=60), lent, most=8)) == ["a"]
    assert names(choose(replace(begin, responses=1, own_workers=0, own_slots=0), lent, most=8)) == ["a"]


def test_number_grows_at_once_and_falls_after_a_while() -> None:
    own, a, b = member("own", kind="reserved"), member("a", use=0.3), member("b", use=0.1)
    borrowing, running = Borrowing(most=2), {"own": 8}
    profile = StepTime(fixed_s=0.05, each_s=0.001)

    def look(now_s: float, queued: int) -> list[str]:
        all = [own, a, b]
        borrowing.update(all, all, queued, lambda id: running.get(id, 0), lambda id: profile, now_s)
        return [m.id for m in (a, b) if m.in_use]

    assert look(0.0, queued=16) == ["a", "b"]
    assert look(1.0, queued=0) == ["a", "b"]
    assert look(HOLD_S + 0.5, queued=4) == ["b"]
    assert (a.open_slots, b.open_slots, own.open_slots) == (0, 8, 8)
    assert look(2 * HOLD_S, queued=4) == ["b"]
    assert look(4 * HOLD_S, queued=0) == []
    a.capacity = Capacity(slots=0, state="frozen", use=0.0, lent=0.0)
    assert look(4 * HOLD_S + 1, queued=16) == ["b"]
    assert Borrowing(most=0).update([a, b], [a, b], 9, lambda id: 0, lambda id: None, 0.0) is None
    assert (a.open_slots, b.open_slots) == (0, 0)


def test_lender_that_was_given_back_counts_until_its_responses_have_ended() -> None:
    a, b, c = (member(id, use=use) for id, use in (("a", 0.5), ("b", 0.5), ("c", 0.1)))
    borrowing, running = Borrowing(most=2), dict[str, int]()

    def look(now_s: float, all: list[Member]) -> list[str]:
        borrowing.update(all, all, 40, lambda id: running.get(id, 0), lambda id: None, now_s)
        return [m.id for m in (a, b, c) if m.in_use]

    assert look(0.0, [a, b]) == ["a", "b"]
    running |= {"a": 8, "b": 8}
    for now_s in (1.0, 2.0, 3.0):  # `c` is better, but two lenders have responses
        assert "c" not in look(now_s, [a, b, c])
    del running["b"]
    assert set(look(4.0, [a, b, c])) <= {"a", "c"}
    assert "c" in look(5.0, [a, b, c])


def test_response_that_fits_on_no_own_machine_needs_a_lender() -> None:
    small, large = member("a", longest=100), member("b", use=0.9, longest=900)
    need = Need(responses=1, own_workers=4, own_slots=32, knee=16.0)
    assert choose(need, [small, large], most=2) == []
    assert names(choose(replace(need, room=500), [small, large], most=2)) == ["b"]


def test_lenders_that_can_take_part_in_a_step() -> None:
    own, a, b, c = member("own", kind="reserved"), member("a", use=0.4), member("b", use=0.2), member("c", slots=0)
    borrowing = Borrowing(most=1)
    assert [w.id for w in borrowing.usable([own, a, b, c], 100.0)] == ["own", "b"]
    assert [w.id for w in Borrowing(most=9).usable([a, c], 100.0)] == ["a"]
    c.able_s = 95.0
    assert [w.id for w in Borrowing(most=9).usable([a, c], 100.0)] == ["a", "c"], "it had slots a moment ago"
    assert Borrowing(most=0).usable([a, b, c], 100.0) == []
