"""Which workers keep a version for an evaluation."""

from __future__ import annotations

from windfall.controller.scheduling.fixed_versions import FixedVersions
from windfall.controller.scheduling.members import Member, Members, WorkerState
from windfall.link.messages import Capacity
from windfall.types import LOCAL, Lease


def worker(members: Members, name: str, *, version: int = 5, slots: int = 8, lends: bool = False) -> Member:
    member = members.join(name, Lease(), 0.0, lends=lends)
    member.capacity = Capacity(slots=slots, state="normal", use=0.1, lent=0.0) if lends else None
    members.pull(member.id, 0.0)
    member.requested = (version, f"d{version}")
    members.loaded(member.id, version, f"d{version}", slots, 1.0)
    return member


def kept(fixed: FixedVersions, version: int = 5) -> list[str]:
    fixed.choose()
    return [m.id for m in fixed.holders(version)]


def test_as_few_workers_as_have_slots_keep_the_version() -> None:
    members = Members()
    for name, slots in (("a", 4), ("b", 8), ("c", 8)):
        worker(members, name, slots=slots)
    fixed = FixedVersions(members)
    assert fixed.keep(5, "d5", 10)
    assert kept(fixed) == ["b", "c"]
    assert [fixed.keeps(name) for name in "abc"] == [False, True, True]
    fixed.release(5)
    assert not fixed.keeps("b")


def test_workers_are_chosen_as_they_load_the_version() -> None:
    members = Members()
    late = worker(members, "late", version=4)
    fixed = FixedVersions(members)
    assert fixed.keep(5, "d5", 4)
    assert (kept(fixed), fixed.is_gone(5, 5)) == ([], False)
    late.requested = (5, "d5")
    assert (kept(fixed), fixed.wanted(6), fixed.is_gone(5, 7)) == ([], None, False), "it is loading the version"
    members.loaded("late", 5, "d5", 8, 1.0)
    assert kept(fixed) == ["late"]


def test_lost_worker_is_replaced_while_the_version_can_be_had() -> None:
    members = Members()
    worker(members, "a", slots=8)
    worker(members, "b", slots=6)
    fixed = FixedVersions(members)
    fixed.keep(5, "d5", 4)
    assert kept(fixed) == ["a"]
    members.move("a", WorkerState.GONE, "lost")
    assert kept(fixed) == ["b"], "it happens to hold the version"
    members.move("b", WorkerState.GONE, "lost")
    worker(members, "c", version=6)
    assert kept(fixed) == []
    wanted = fixed.wanted(6)
    assert wanted is not None, "the trainer still serves the version before the newest"
    assert wanted.digest == "d5"
    assert not fixed.is_gone(5, 6)
    assert fixed.is_gone(5, 7)


def test_other_digest_loading_or_suspect_worker_and_the_trainers_engine_do_not_keep_it() -> None:
    members = Members()
    fixed = FixedVersions(members)
    assert not fixed.keep(5, "d5", 1), "there is no worker"
    worker(members, LOCAL)
    assert not fixed.keep(5, "d5", 1), "the trainer's engine cannot keep old weights"
    worker(members, "other").digest = "another"
    worker(members, "suspect").suspect = True
    worker(members, "loading").requested = (6, "d6")
    assert fixed.keep(5, "d5", 100)
    assert kept(fixed) == []


def test_worker_that_is_silent_for_a_moment_keeps_its_version() -> None:
    members = Members()
    member = worker(members, "a")
    fixed = FixedVersions(members)
    fixed.keep(5, "d5", 4)
    assert kept(fixed) == ["a"]
    member.suspect = True
    assert kept(fixed) == [], "it gets no more work"
    assert fixed.keeps("a"), "but it is not asked to load another version"
    member.suspect = False
    assert kept(fixed) == ["a"]


def test_lenders_keep_a_version_only_if_there_are_no_other_workers() -> None:
    members = Members()
    for name in "abc":
        worker(members, name, lends=True)
    fixed = FixedVersions(members, borrowed_max=2)
    assert fixed.keep(5, "d5", 100)
    assert kept(fixed) == ["a", "b"], "as many as may be used"
    members.join("spot", Lease(), 0.0)
    fixed = FixedVersions(members)
    fixed.keep(5, "d5", 4)
    assert kept(fixed) == [], "the worker that pulls will keep it"
