"""Admission after a run was resumed with another bound on staleness."""

from __future__ import annotations

from tests.support.fleets.admitting import admit
from windfall.controller.tasks.admission import Admission
from windfall.types import Group, Response, Task


def group(index: int, version: int) -> Group:
    response = Response(
        id=f"{index}/0",
        prompt=(1,),
        tokens=(2,),
        logprobs=(-0.5,),
        versions=(version,),
        sampled=(True,),
        finish="stop",
        reward=1.0,
    )
    return Group(index=index, task=Task(id=str(index), prompt=""), responses=(response,))


def test_no_more_tasks_are_open_than_a_synchronous_step_can_use() -> None:
    """With staleness 2, three batches were open. What step 6 opened for later steps would be too old for them."""
    admission = Admission(batch=2, steps=10)
    admission.restore(version=5, next_task=20, open_tasks=[12, 14, 15, 17, 19])
    steps: list[list[int]] = []
    for version in range(5, 8):
        opened = admit(admission)
        assert admit(admission) == []
        admission.check()
        for index in opened:
            admission.finish(group(index, version))
        while admission.take() is not None:
            pass
        assert admission.complete
        steps.append(list(admission.taken))
        assert admission.dropped.responses == 0
        admission.publish()
    assert steps == [[12, 14], [15, 17], [19, 20]]
    assert admission.open_tasks == ()
