"""Which lenders are used: as many as the step needs, those with the least recent use first, and few changes."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from windfall.controller.scheduling.borrowing import (
    HOLD_S,
    STANDBY_S,
    STICKY,
    Borrowing,
    LenderCapacity,
    Need,
    choose,
    knee,
)
from windfall.controller.scheduling.members import Member, WorkerState
from windfall.link.messages import Capacity
from windfall.step_time import StepTime
from windfall.types import Lease, LeaseKind

needs = st.builds(
    Need, responses=st.integers(0, 400), own_workers=st.integers(0, 6), own_slots=st.integers(0, 200),
    knee=st.floats(1.0, 50.0),
)  # fmt: skip
lenders = st.lists(
    st.builds(
        LenderCapacity, id=st.integers(0, 10**6).map(str), slots=st.integers(0, 64), use=st.floats(0.0, 1.0),
        in_use=st.booleans(),
    ),
    max_size=12, unique_by=lambda c: c.id,
)  # fmt: skip


@given(needs, lenders, st.integers(0, 10))
def test_never_too_many_and_only_those_that_can_take_something(
    need: Need, all: list[LenderCapacity], most: int
) -> None:
    chosen = choose(need, all, most=most)
    by_id = {c.id: c for c in all}
    assert len(chosen) == len(set(chosen)) <= most
    assert min((by_id[id].slots for id in chosen), default=1) > 0
    left = [c for c in all if c.slots and c.id not in chosen]
    if need.responses > need.own_slots + sum(by_id[id].slots for id in chosen):
        assert len(chosen) == most or not left, "a response waits although a lender has room"
    if chosen and left:
        worst = max(by_id[id].use for id in chosen)
        assert worst <= min(c.use for c in left) + STICKY + 1e-9, "the lenders with the least use come first"


@given(needs, lenders, st.integers(0, 10), st.integers(1, 100))
def test_more_need_never_means_fewer_lenders(need: Need, all: list[LenderCapacity], most: int, more: int) -> None:
    chosen = choose(need, all, most=most)
    assert choose(replace(need, responses=need.responses + more), all, most=most)[: len(chosen)] == chosen
    richer = replace(need, own_workers=need.own_workers + 1, own_slots=need.own_slots + more)
    assert chosen[: len(choose(richer, all, most=most))] == choose(richer, all, most=most)


@given(needs, lenders, st.integers(0, 10))
def test_a_choice_is_stable(need: Need, all: list[LenderCapacity], most: int) -> None:
    for _ in range(2):  # a lender with more slots may make another one superfluous, once
        chosen = choose(need, all, most=most)
        all = [replace(c, in_use=c.id in chosen) for c in all]
    assert set(choose(need, all, most=most)) == {c.id for c in all if c.in_use}


def test_own_machines_are_enough_for_the_tail() -> None:
    fast = knee([StepTime(fixed_s=0.01, each_s=0.0001)])
    lent = [LenderCapacity(id=n, slots=16, use=0.1) for n in "abc"]
    begin = Need(responses=200, own_workers=2, own_slots=64, knee=fast)
    assert len(choose(begin, lent, most=8)) == 3
    assert choose(replace(begin, responses=40), lent, most=8) == []
    assert choose(replace(begin, responses=60), lent, most=8) == ["a"]
    assert choose(replace(begin, responses=1, own_workers=0, own_slots=0), lent, most=8) == ["a"]


def member(id: str, *, use: float = 0.0, slots: int = 8, kind: LeaseKind = "borrowed") -> Member:
    out = Member(id=id, name=id, lease=Lease(kind=kind), joined_s=0, seen_s=0, state=WorkerState.READY)
    out.slots = 8
    if kind == "borrowed":
        out.lends, out.in_use = True, False
        out.capacity = Capacity(slots=slots, state="normal", use=use, lent=0.0)
    return out


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


def test_only_lenders_that_steps_need_load_every_version() -> None:
    own, a, b = member("own", kind="reserved"), member("a", use=0.1), member("b", use=0.3)
    borrowing, profile = Borrowing(most=8), StepTime(fixed_s=0.05, each_s=0.001)

    def look(now_s: float, ready: list[Member], queued: int) -> list[str]:
        borrowing.update([own, a, b], ready, queued, lambda id: 0, lambda id: profile, now_s)
        return [m.id for m in (own, a, b) if borrowing.loads(m, now_s)]

    assert look(0.0, [own, a, b], queued=9) == ["own", "a"]
    assert look(1.0, [], queued=9) == ["own", "a"], "all are outdated, and nothing more is needed"
    a.capacity = Capacity(slots=8, state="normal", use=0.35, lent=0.0)
    assert look(1.5, [], queued=9) == ["own", "a"], "the other one is hardly better"
    a.capacity = Capacity(slots=0, state="frozen", use=0.9, lent=0.0)
    assert look(2.0, [own, a], queued=9) == ["own", "a", "b"], "another one instead"
    assert look(STANDBY_S + 3.0, [own, a, b], queued=0) == ["own"]
    b.state = WorkerState.JOINING
    assert borrowing.loads(b, STANDBY_S + 3.0), "its first version"
    assert not Borrowing(most=0).loads(b, 0.0)


def test_response_that_fits_on_no_own_machine_needs_a_lender() -> None:
    small, large = LenderCapacity(id="a", slots=8, longest=100), LenderCapacity(id="b", slots=8, use=0.9, longest=900)
    need = Need(responses=1, own_workers=4, own_slots=32, knee=16.0)
    assert choose(need, [small, large], most=2) == []
    assert choose(replace(need, room=500), [small, large], most=2) == ["b"]


def test_lenders_that_can_take_part_in_a_step() -> None:
    own, a, b, c = member("own", kind="reserved"), member("a", use=0.4), member("b", use=0.2), member("c", slots=0)
    borrowing = Borrowing(most=1)
    assert [w.id for w in borrowing.usable([own, a, b, c], 100.0)] == ["own", "b"]
    assert [w.id for w in Borrowing(most=9).usable([a, c], 100.0)] == ["a"]
    c.able_s = 95.0
    assert [w.id for w in Borrowing(most=9).usable([a, c], 100.0)] == ["a", "c"], "it had slots a moment ago"
    assert Borrowing(most=0).usable([a, b, c], 100.0) == []
