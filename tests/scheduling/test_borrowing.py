"""Which lenders are used: as many as the step needs, those with the least recent use first, and few changes."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from windfall.link.messages import Capacity
from windfall.scheduling.borrowing import HOLD_S, STICKY, Borrowing, LenderCapacity, Need, choose, knee
from windfall.scheduling.members import Member, WorkerState
from windfall.scheduling.worker_speed import Profile
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
    fast = knee([Profile(fixed_s=0.01, each_s=0.0001)])
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
        out.capacity = Capacity(slots=slots, state="normal", use=use, lent=0.0)
    return out


def test_number_grows_at_once_and_falls_after_a_while() -> None:
    own, a, b = member("own", kind="reserved"), member("a", use=0.3), member("b", use=0.1)
    borrowing, running = Borrowing(most=2), {"own": 8}
    profile = Profile(fixed_s=0.05, each_s=0.001)

    def look(now_s: float, queued: int) -> list[str]:
        borrowing.update([own, a, b], queued, lambda id: running.get(id, 0), lambda id: profile, now_s)
        return [m.id for m in (a, b) if m.in_use]

    assert look(0.0, queued=16) == ["a", "b"]
    assert look(1.0, queued=0) == ["a", "b"]
    assert look(HOLD_S + 0.5, queued=4) == ["b"]
    assert (a.open_slots, b.open_slots, own.open_slots) == (0, 8, 8)
    assert look(2 * HOLD_S, queued=4) == ["b"]
    assert look(4 * HOLD_S, queued=0) == []
    a.capacity = Capacity(slots=0, state="frozen", use=0.0, lent=0.0)
    assert look(4 * HOLD_S + 1, queued=16) == ["b"]
    assert Borrowing(most=0).update([a, b], 9, lambda id: 0, lambda id: None, 0.0) is None
    assert (a.open_slots, b.open_slots) == (0, 0)
