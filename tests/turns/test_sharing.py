"""Who gets the next turn of a device."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from windfall.turns.sharing import Claim, Sharing


def device(**shares: float) -> Sharing:
    sharing = Sharing(slice_s=0.25)
    for job, share in shares.items():
        sharing.set_terms(job, share=share)
    return sharing


@dataclass
class Clock:
    """A device that always works for the job that is next; each turn lasts as long as its job's turns last."""

    sharing: Sharing
    turn_s: dict[str, float]
    now_s: float = 0.0
    used_s: dict[str, float] = field(default_factory=dict)

    def run(self, jobs: set[str], until_s: float) -> None:
        """These jobs wait whenever they do not have the device."""
        for job in sorted(jobs):
            self.sharing.begin(job, self.now_s)
        while self.now_s < until_s:
            turn = self.sharing.next([Claim(job, "rollout", 0.0) for job in jobs], self.now_s)
            assert turn is not None
            self.now_s += self.turn_s[turn.job]
            self.sharing.use(turn.job, self.turn_s[turn.job])
            self.used_s[turn.job] = self.used_s.get(turn.job, 0.0) + self.turn_s[turn.job]
        for job in jobs:
            self.sharing.end(job, self.now_s)


@given(
    st.dictionaries(st.sampled_from("abcdef"), st.tuples(st.floats(0.1, 10.0), st.floats(0.1, 20.0)), min_size=2),
    st.floats(100.0, 1000.0),
)
def test_jobs_that_always_wait_use_the_device_by_their_shares(
    jobs: dict[str, tuple[float, float]], until_s: float
) -> None:
    clock = Clock(device(**{job: share for job, (share, _) in jobs.items()}), {job: s for job, (_, s) in jobs.items()})
    clock.run(set(jobs), until_s)
    passes = {job: clock.used_s.get(job, 0.0) / share for job, (share, _) in jobs.items()}
    longest = max(turn_s / share for share, turn_s in jobs.values())
    assert max(passes.values()) - min(passes.values()) <= longest + 1e-6


@given(st.floats(0.1, 10.0), st.floats(0.1, 10.0), st.floats(1.0, 300.0))
def test_idling_earns_no_credit(share: float, other: float, idle_s: float) -> None:
    clock = Clock(device(a=share, b=other), {"a": 1.0, "b": 1.0})
    clock.run({"a", "b"}, 50.0)
    clock.run({"b"}, 50.0 + idle_s)
    before, start_s = dict(clock.used_s), clock.now_s
    clock.run({"a", "b"}, start_s + 200.0)
    used = {job: clock.used_s.get(job, 0.0) - before.get(job, 0.0) for job in "ab"}
    # At its return, a may be behind by what it was behind when it went idle: one turn of each.
    assert used["a"] / share - used["b"] / other <= 2 / share + 2 / other + 1e-6


def test_a_short_pause_costs_little() -> None:
    sharing = device(a=1.0, b=1.0)
    for job in "ab":
        sharing.begin(job, 0.0)
    sharing.use("a", 20.0)  # a training turn
    for n in range(19):  # b generates in slices, and is not in the queue for a moment after each
        sharing.end("b", n + 0.99)
        sharing.use("a", 0.0)
        sharing.begin("b", n + 1.0)
        sharing.use("b", 1.0)
    waiting = [Claim("a", "train", 0.0), Claim("b", "rollout", 0.0)]
    assert sharing.next(waiting, 19.0) == waiting[1]


def test_higher_priority_first_and_at_once() -> None:
    sharing = device(a=1.0, b=100.0)
    sharing.set_terms("a", priority=1)
    for job in "ab":
        sharing.begin(job, 0.0)
    sharing.use("a", 1000.0)
    a, b = Claim("a", "rollout", 0.0), Claim("b", "rollout", 0.0)
    assert sharing.next([a, b], 0.0) == a
    assert sharing.yields_in_s(b, [a], 0.0) == 0.0
    assert sharing.yields_in_s(a, [b], 0.0) == math.inf


def test_a_deadline_that_would_be_missed_raises_a_job() -> None:
    sharing = device(a=1.0, b=1.0)
    sharing.set_terms("a", deadline_s=100.0, left_s=60.0)
    sharing.begin("a", 0.0)
    assert not sharing.late("a", 0.0)
    sharing.begin("b", 0.0)
    assert sharing.late("a", 0.0), "with half of the device it needs 120 s"
    sharing.use("a", 50.0)
    waiting = [Claim("a", "rollout", 0.0), Claim("b", "rollout", 0.0)]
    assert sharing.next(waiting, 0.0) == waiting[0]
    sharing.set_terms("a", deadline_s=100.0, left_s=10.0)
    assert sharing.next(waiting, 50.0) == waiting[1]
    sharing.set_terms("a", deadline_s=100.0, left_s=1000.0)
    assert sharing.next(waiting, 101.0) == waiting[1], "a deadline that has passed counts no more"
    sharing.set_terms("a", priority=-1, deadline_s=100.0, left_s=1000.0)
    assert sharing.next(waiting, 50.0) == waiting[1], "priority comes first"


def test_how_long_a_turn_lasts() -> None:
    sharing = device(a=2.0, b=1.0)
    for job in "ab":
        sharing.begin(job, 10.0)
    held = Claim("a", "rollout", 10.0)
    b = Claim("b", "rollout", 10.0)
    assert sharing.yields_in_s(held, [], 10.0) == math.inf
    assert sharing.yields_in_s(held, [b], 10.1) == pytest.approx(0.15)
    assert sharing.yields_in_s(held, [b], 99.0) == 0.0
    assert sharing.yields_in_s(held, [Claim("a", "train", 10.0)], 10.0) == 0.0, "its own trainer does not wait"
    assert sharing.yields_in_s(Claim("a", "train", 10.0), [b], 99.0) == math.inf
    sharing.use("b", 5.0)
    assert sharing.yields_in_s(held, [b], 99.0) == pytest.approx(10.0), "b has used 5 s, so a may use 10 s"
