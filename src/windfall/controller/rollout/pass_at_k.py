"""pass@k: the probability that at least one of k responses to a task passes. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence


def pass_at_k(responses: int, passed: int, k: int) -> float:
    """The unbiased estimate for one task from `responses` responses, of which `passed` passed: the share of all
    selections of k responses that contain one that passed (Chen et al., 2021).

    >>> pass_at_k(4, 1, 1), pass_at_k(4, 1, 2), pass_at_k(4, 3, 2)
    (0.25, 0.5, 1.0)
    """
    if not 1 <= k <= responses or not 0 <= passed <= responses:
        raise ValueError(f"pass@{k} of {responses} responses, {passed} of them passed")
    return 1.0 - math.comb(responses - passed, k) / math.comb(responses, k)


def mean_pass_at(rewards: Sequence[Sequence[float]], k: int, least: float) -> tuple[float, int]:
    """The mean of pass@k over tasks, and the number of tasks. `rewards`: those of each task. `least`: smallest reward
    that passes. Tasks with fewer than k rewards, because some are missing, are left out."""
    tasks = [pass_at_k(len(r), sum(x >= least for x in r), k) for r in rewards if len(r) >= k]
    return (sum(tasks) / len(tasks) if tasks else math.nan), len(tasks)
