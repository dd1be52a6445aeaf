"""Turns graded groups into training samples: one Sample for each segment of each response that has a reward, with the
advantage of the response among those of its task and role. Nearly every response has one segment; those of agents may
have more."""

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


def informative(group: Group, algorithm: Algorithm, limit: int) -> bool:
    """Whether anything can be learned from the responses of some role."""
    return any(algorithm.informative(outcomes(role, limit)) for role in group.by_role().values())


def credit(groups: Sequence[Group], algorithm: Algorithm, limit: int, version: int | None = None) -> list[list[Sample]]:
    """The samples of each group. Responses without a reward are left out, also from the advantages of their group. The
    lags are those at the trainer's `version`; None: all tokens count as fresh. Raises ValueError if one is newer."""
    roles = [group.by_role().values() for group in groups]  # only responses of the same role are compared
    advantages = iter(algorithm.advantages([outcomes(role, limit) for row in roles for role in row]))
    return [
        [
            sample
            for role in row
            for response, advantage in zip(
                (r for r in role.responses if r.reward is not None), next(advantages), strict=True
            )
            for sample in samples_of(response, advantage, limit, version)
        ]
        for row in roles
    ]
