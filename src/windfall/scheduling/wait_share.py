"""AstraFlow's autoscaling rule (arXiv 2605.15565): how many workers asynchronous training needs, from the share of the
time in which the trainer waits for data. Pure. It knows neither speeds nor prices.

    the trainer waits more than MORE_ABOVE    generation is the bottleneck: G / (1 - w) workers would keep it busy
    the trainer waits less than FEWER_BELOW   training is the bottleneck: keep the workers whose work is used, and SPARE
    otherwise                                 no change

AstraFlow takes the surplus from the samples that entered its buffer and the samples that were consumed. With an
admission gate both are equal: the gate holds generation back instead. So the surplus is the share of the time in which
it did (`held_s` of a step).
"""

from __future__ import annotations

import math

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
