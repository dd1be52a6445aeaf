"""AstraFlow's autoscaling rule (arXiv 2605.15565). It computes how many workers asynchronous training needs from w, the
share of the time in which the trainer waits for data. It uses neither speeds nor prices. For simulated runs: set
`Scenario.rules` to RULES.

    w is above MORE_ABOVE     generation is the bottleneck: workers / (1 - w) workers would keep the trainer busy
    w is below FEWER_BELOW    training is the bottleneck: keep SPARE times the workers whose work is used
    otherwise                 no change

AstraFlow computes the surplus from the numbers of samples that entered its buffer and that were consumed. With an
admission gate both are equal, because the gate holds generation back instead. So here the surplus is the share of the
time in which it did (`held_s` of a step).
"""

from __future__ import annotations

import math

from windfall.controller.assembly import Rules
from windfall.controller.rollout.advisor import Advisor
from windfall.controller.workers.worker_value import NOT_YET, RunMeasurements, WorkerAdvice, WorkerKind

MORE_ABOVE = 0.10
FEWER_BELOW = 0.05
SPARE = 1.10


def wanted_workers(workers: int, *, wait_share: float, held_share: float) -> int:
    """The number of workers to have instead of `workers`.

    >>> [wanted_workers(8, wait_share=w, held_share=0.0) for w in (0.0, 0.07, 0.2, 0.5)]
    [8, 8, 10, 16]
    >>> [wanted_workers(8, wait_share=0.0, held_share=h) for h in (0.05, 0.25, 0.5, 1.0)]
    [8, 7, 5, 1]
    """
    workers = max(1, workers)
    if wait_share > MORE_ABOVE:
        return math.ceil(workers / (1 - min(wait_share, 0.99)) - 1e-9)
    if wait_share < FEWER_BELOW:
        used = workers * (1 - min(1.0, held_share)) * SPARE
        return max(1, min(workers, math.ceil(used - 1e-9)))
    return workers


class WaitShareAdvisor(Advisor):
    """The rule does not distinguish kinds: the advice for a kind assumes that it makes up the whole difference."""

    def advise(
        self, run: RunMeasurements, kinds: dict[str, WorkerKind], *, wait_s: float, held_s: float, step_s: float
    ) -> dict[str, WorkerAdvice]:
        del run
        if step_s <= 0:
            return {name: WorkerAdvice(count=kind.now, now=kind.now, why=NOT_YET) for name, kind in kinds.items()}
        workers = sum(kind.now for kind in kinds.values())
        wait, held = min(1.0, wait_s / step_s), min(1.0, held_s / step_s)
        more = wanted_workers(workers, wait_share=wait, held_share=held) - workers
        why = f"the trainer waited for {wait:.0%} of the step, and the gate was closed for {held:.0%}"
        return {
            name: WorkerAdvice(count=min(kind.max_count, max(0, kind.now + more)), now=kind.now, why=why)
            for name, kind in kinds.items()
        }


RULES = Rules(advisor=WaitShareAdvisor)
