"""Which trainers' states are on a device: within the limit, and without switching all the time."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from windfall.turns.residence import STATE_SHARE, WORTH, Residence

GB = 10**9


def residence(limit_gb: float, *sizes_gb: float) -> Residence:
    r = Residence(limit_bytes=int(limit_gb * GB))
    for key, size in enumerate(sizes_gb):
        r.join(key, int(size * GB), now_s=key)
    return r


def test_without_a_limit_nothing_sleeps() -> None:
    r = residence(0, 50, 60, 70)
    assert r.sleepers(2) == []
    assert r.may_work(2, waiting={0, 1, 2}, now_s=3.0)


def test_what_fits_stays() -> None:
    assert residence(100, 40, 40).sleepers(1) == []


def test_only_as_many_sleep_as_needed_and_the_least_recently_used_first() -> None:
    r = residence(100, 40, 40, 40)
    r.worked(0, 1.0, now_s=10.0)
    assert r.sleepers(2) == [1]


def test_one_alone_may_be_larger_than_the_limit() -> None:
    r = residence(10, 40, 5)
    assert r.sleepers(0) == [1]
    r.slept(1, 0.2)
    assert r.may_work(0, waiting={0, 1}, now_s=5.0)


def test_a_state_that_was_fetched_works_off_its_switch_before_it_leaves() -> None:
    r = residence(50, 40, 40)
    r.slept(0, 0.5)  # a switch there and back takes a second
    r.slept(1, 0.5)
    r.woke(0)
    r.worked(0, 1.0, now_s=20.0)
    assert not r.may_work(1, waiting={0, 1}, now_s=20.0)  # 0 has only begun
    assert r.may_work(1, waiting={1}, now_s=21.0)  # 0 has asked for nothing for as long as a switch takes
    r.worked(0, WORTH, now_s=30.0)
    assert r.may_work(1, waiting={0, 1}, now_s=30.0)


def test_what_was_lent_is_not_free() -> None:
    """0 trains and has freed its KV cache of 20 GB for that; 1 finds these free, too, when it measures."""
    r = Residence(limit_bytes=None)
    for key in (0, 1):
        r.join(key, 30 * GB, now_s=0.0)
    r.lends(0, 20 * GB)
    r.lends(1, 5 * GB)
    r.measured(40 * GB)
    assert r.limit_bytes == int(STATE_SHARE * 75 * GB)
    r.lends(0, 0)  # its engine generates again
    r.measured(20 * GB)
    assert r.limit_bytes == int(STATE_SHARE * 75 * GB)
    r.measured(0)
    assert r.limit_bytes == int(STATE_SHARE * 75 * GB), "0: not known"


def test_trainers_that_have_grown_do_not_wait_for_each_other() -> None:
    r = residence(50, 20, 20)
    for key in (0, 1):
        r.slept(key, 0.5)
        r.woke(key)
        r.join(key, 40 * GB, now_s=1.0)  # the first update brings Adam's moments
    assert r.may_work(0, waiting={0, 1}, now_s=1.0)
    assert r.sleepers(0) == [1]


def test_a_trainer_that_left_needs_no_room() -> None:
    r = residence(50, 40, 40)
    r.leave(0)
    assert r.sleepers(1) == []
    r.worked(0, 1.0, now_s=1.0)  # a late message about it changes nothing
    r.slept(0, 1.0)
    r.woke(0)


@given(
    sizes=st.lists(st.integers(1, 50), min_size=1, max_size=6),
    limit=st.integers(0, 100),
    order=st.lists(st.integers(0, 5), max_size=40),
)
def test_states_on_the_device_fit_and_every_trainer_gets_its_turn(
    sizes: list[int], limit: int, order: list[int]
) -> None:
    r = Residence(limit_bytes=limit)
    for key, size in enumerate(sizes):
        r.join(key, size, now_s=0.0)
    now_s = 0.0
    for wanted in order:
        key, waited_s = wanted % len(sizes), 0.0
        while not r.may_work(key, waiting={key}, now_s=now_s + waited_s):
            waited_s += r.next_change_s(now_s + waited_s)
            assert waited_s < 60.0, "it waits for trainers that ask for nothing"
        now_s += waited_s
        for other in r.sleepers(key):
            r.slept(other, 0.1)
        r.woke(key)
        awake = [s.nbytes for s in r.states.values() if s.awake]
        assert not limit or sum(awake) <= limit or len(awake) == 1
        now_s += 1.0
        r.worked(key, 1.0, now_s)
