"""Turns graded groups into training samples: one Sample for each segment of each response that has a reward, with the
advantage of the response. Nearly every response has one segment; those of agents may have more."""

from __future__ import annotations

from collections.abc import Sequence

from windfall.algorithms.base import Algorithm, Outcome
from windfall.training import Sample, samples_of
from windfall.types import Group


def outcomes(group: Group, limit: int) -> list[Outcome]:
    """The outcomes of all responses that have a reward."""
    return [
        Outcome(
            reward=r.reward,
            length=r.sampled_count,
            limit=limit,
            observed=0 if r.agent else len(r.tokens) - r.sampled_count,
        )
        for r in group.responses
        if r.reward is not None
    ]


def credit(groups: Sequence[Group], algorithm: Algorithm, limit: int, version: int | None = None) -> list[list[Sample]]:
    """The samples of each group. Responses without a reward are left out, also from the advantages of their group. The
    lags are those at the trainer's `version`; None: all tokens count as fresh. Raises ValueError if one is newer."""
    advantages = algorithm.advantages([outcomes(g, limit) for g in groups])
    return [
        [
            sample
            for response, advantage in zip((r for r in group.responses if r.reward is not None), row, strict=True)
            for sample in samples_of(response, advantage, limit, version)
        ]
        for group, row in zip(groups, advantages, strict=True)
    ]
