"""Turns graded groups into training samples: one Sample for each segment of each response that has a reward, with the
advantage of the response. Nearly every response has one segment; those of agents may have more."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import compress

import numpy as np

from windfall.algorithms.base import Algorithm, Outcome
from windfall.training import Sample
from windfall.types import Group, Response

MAX_LAG = np.iinfo(np.uint16).max
"""Larger lags are stored as this one, so that they cannot wrap around to 0."""


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
            for sample in _samples(response, advantage, limit, version)
        ]
        for group, row in zip(groups, advantages, strict=True)
    ]


def _samples(r: Response, advantage: float, limit: int, version: int | None) -> list[Sample]:
    """One sample for each segment."""
    whole = r.sampled_count if r.more else 0
    return [_sample(segment, advantage, limit, version, whole) for segment in r.segments]


def _sample(r: Response, advantage: float, limit: int, version: int | None, whole: int) -> Sample:
    first = len(r.prompt)
    return Sample(
        ids=r.prompt + r.tokens,
        targets=tuple(compress(range(first, first + len(r.tokens)), r.sampled)),
        behavior=np.fromiter(compress(r.logprobs, r.sampled), dtype=float),
        advantage=advantage,
        limit=limit,
        lag=None if version is None else _lag(r, version),
        engines=r.engines,
        whole=whole,
    )


def _lag(r: Response, version: int) -> np.ndarray | None:
    lag = version - np.fromiter(compress(r.versions, r.sampled), dtype=np.int64)
    if not lag.any():
        return None
    if lag.min() < 0:
        newest = version - int(lag.min())
        raise ValueError(f"response {r.id}: a token is from version {newest}, but the trainer is at version {version}")
    return np.minimum(lag, MAX_LAG).astype(np.uint16)
