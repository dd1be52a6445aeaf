"""Admission keeps places in the batch for groups that would be too old for the next one."""

from __future__ import annotations

from tests.support.fleets.admitting import admit
from windfall.controller.tasks.admission import Admission
from windfall.types import Group, Response, Task


def group(index: int, version: int) -> Group:
    response = Response(
        id=f"{index}/0", prompt=(1,), tokens=(2,), logprobs=(-0.5,), versions=(version,), sampled=(True,),
        finish="stop", reward=1.0,
    )  # fmt: skip
    return Group(index=index, task=Task(id=str(index), prompt=""), responses=(response,))


def take_all(admission: Admission) -> list[int]:
    taken: list[int] = []
    while (g := admission.take()) is not None:
        taken.append(g.index)
    admission.check()
    return taken


def test_trainer_waits_for_groups_that_would_be_too_old() -> None:
    admission = Admission(batch=2, steps=10, staleness=1)
    assert admit(admission) == [0, 1, 2, 3]
    for index in (1, 3):
        admission.finish(group(index, 0))
    assert take_all(admission) == [1, 3], "nothing is too old yet, so the first groups that finish are taken"
    admission.publish()
    assert admit(admission) == [4, 5]
    for index in (4, 5):  # short groups overtake 0 and 2
        admission.finish(group(index, 1))
    assert take_all(admission) == []
    assert not admission.complete
    admission.finish(group(2, 0))
    assert take_all(admission) == [2]
    admission.dismiss(0)  # its place is free again
    assert take_all(admission) == [4]
    assert admission.complete
    assert admission.dropped.responses == 0


def test_groups_that_have_not_begun_do_not_hold_the_trainer_back() -> None:
    admission = Admission(batch=2, steps=10, staleness=1)
    admit(admission)
    for index in (0, 1):
        admission.finish(group(index, 0))
    assert take_all(admission) == [0, 1]
    admission.publish()
    admission.not_begun([3])  # 2 runs since version 0, and 3 waits for a free slot
    admit(admission)
    for index in (4, 5):
        admission.finish(group(index, 1))
    assert take_all(admission) == [4], "the other place is for 2"
    admission.finish(group(2, 0))
    assert take_all(admission) == [2]
    admission.publish()
    admission.finish(group(3, 1))
    assert take_all(admission) == [3, 5], "3 has begun meanwhile and is not too old"
    assert admission.dropped.responses == 0


def test_free_places_go_to_younger_groups() -> None:
    admission = Admission(batch=3, steps=10, staleness=1)
    admit(admission)
    for index in (1, 2, 3, 4):
        admission.finish(group(index, 0))
    assert take_all(admission) == [1, 2, 3]
    admission.publish()
    admit(admission)  # 6, 7, 8
    admission.finish(group(6, 1))
    assert take_all(admission) == [4], "0 and 5 are open and keep the other places"
    admission.finish(group(0, 0))
    admission.drop(5)
    assert take_all(admission) == [0, 6]
    assert admission.complete


def test_groups_restored_from_the_journal_keep_their_age() -> None:
    admission = Admission(batch=2, steps=10, staleness=1)
    admission.restore(version=3, next_task=8, open_tasks=[6, 7], oldest={6: 2, 7: 2})
    assert admit(admission) == [6, 7, 8, 9]
    for index in (8, 9):
        admission.finish(group(index, 3))
    assert take_all(admission) == [], "6 and 7 would be too old for the next step"
    for index in (6, 7):
        admission.finish(group(index, 2))
    assert take_all(admission) == [6, 7]


def test_plan_of_which_nothing_is_left_is_no_plan() -> None:
    admission = Admission(batch=1, steps=10, staleness=1)
    admission.restore(version=3, next_task=5, open_tasks=[4], planned={4: [4]})
    assert admit(admission) == [4, 5]
    admission.dismiss(4)
    assert not admission.complete
    admission.finish(group(5, 3))
    assert take_all(admission) == [5]
