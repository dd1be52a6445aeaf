"""A step keeps places for the open groups that the next version would make too old."""

from __future__ import annotations

from windfall.scheduling.admission import Admission
from windfall.types import Group, Response, Task


def group(index: int, version: int) -> Group:
    response = Response(
        id=f"{index}/0", prompt=(1,), tokens=(2,), logprobs=(-1.0,), versions=(version,), sampled=(True,),
        finish="stop", reward=1.0,
    )  # fmt: skip
    return Group(index=index, task=Task(id=str(index), prompt="p"), responses=(response,))


def after_one_step() -> Admission:
    """Version 1 of a run with two groups per step: 0 and 1 are trained on, 2 and 3 began with version 0 and are open, 4
    and 5 were admitted with version 1."""
    admission = Admission(batch=2, steps=10, staleness=1)
    assert admission.admit() == [0, 1, 2, 3]
    for index in (0, 1):
        admission.finish(group(index, 0))
        assert admission.take() is not None
    admission.publish()
    assert admission.admit() == [4, 5]
    return admission


def test_short_groups_do_not_take_the_places_of_long_ones_that_would_become_too_old() -> None:
    admission = after_one_step()
    admission.expect([2, 3])
    for index in (4, 5):
        admission.finish(group(index, 1))
    assert admission.take() is None
    assert not admission.complete
    for index in (3, 2):
        admission.finish(group(index, 0))
        assert (taken := admission.take()) is not None
        assert taken.index == index
    admission.check()
    assert admission.complete
    admission.publish()
    assert [g.index for _ in range(2) if (g := admission.take())] == [4, 5]
    assert admission.dropped.responses == 0


def test_a_place_that_is_no_longer_needed_is_free() -> None:
    admission = after_one_step()
    admission.expect([2, 3])
    admission.finish(group(4, 1))
    admission.finish(group(2, 0), informative=False)
    assert (taken := admission.take()) is not None
    assert taken.index == 4
    admission.finish(group(5, 1))
    assert admission.take() is None
    admission.drop(3)
    assert admission.take() is not None
    assert admission.complete


def test_without_old_open_groups_every_ready_group_is_taken() -> None:
    admission = after_one_step()
    admission.expect([])
    for index in (4, 5):
        admission.finish(group(index, 1))
    assert [g.index for _ in range(2) if (g := admission.take())] == [4, 5]
