"""Responses without a sampled token, of agents that made no call: they have no version, so they never get too old."""

from __future__ import annotations

from tests.support.fleets.admitting import admit
from windfall.controller.tasks.admission import Admission, is_usable, staleness
from windfall.types import Group, Response, Task


def response(id: str, *versions: int, more: tuple[Response, ...] = ()) -> Response:
    n = len(versions)
    return Response(
        id=id, prompt=(), tokens=(7,) * n, logprobs=(-1.0,) * n, sampled=(True,) * n, versions=versions, finish="stop",
        reward=1.0, more=more,
    )  # fmt: skip


def test_silent_response_is_used_at_every_version() -> None:
    a = Admission(batch=1, steps=9)
    a.restore(version=5, next_task=5)
    for _ in range(3):
        index = admit(a)[0]
        silent, other = response(f"{index}/0"), response(f"{index}/1", a.version)
        a.finish(Group(index=index, task=Task(id="t", prompt=""), responses=(silent, other)))
        got = a.take()
        assert got is not None
        assert len(got.responses) == 2
        assert a.dropped.responses == 0
        a.publish()


def test_silent_group_that_waits_is_counted_once() -> None:
    """A group without any version is finished at one version and taken at a later one."""
    a = Admission(batch=1, steps=9, staleness=2)
    for index in admit(a):
        a.finish(Group(index=index, task=Task(id="t", prompt=""), responses=(response(f"{index}/0"),)))
    for _ in range(3):
        assert a.take() is not None
        a.publish()
    assert not +a._held
    assert min(a._held.values(), default=0) == 0


def test_versions_of_all_segments_count() -> None:
    late = response("0/0", 3, more=(response("0/0+1", 6),))
    assert (late.oldest_version, late.newest_version, staleness(late, 5)) == (3, 6, 2)
    assert not is_usable(late, 5, 4), "its second segment is newer than the trainer"
    assert is_usable(late, 6, 4)
    assert (response("0/0").oldest_version, response("0/0").newest_version) == (None, None)
