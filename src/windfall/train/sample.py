"""From graded groups to what a trainer takes: one Sample per response that counts, with its advantage."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from windfall.algorithms.base import Algorithm, Floats, Outcome
from windfall.types import Group, Response


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Sample:
    """`ids` is prompt and response; `targets` are the indices in `ids` of the tokens the policy made (never 0)."""

    ids: tuple[int, ...]
    targets: tuple[int, ...]
    behaviour: Floats
    """Log-probs that the engine reported for the targets."""
    advantage: float
    limit: int
    old: Floats | None = None
    """Log-probs of the trainer before the step's first update; None: those it computes now."""


def outcomes(group: Group, limit: int) -> list[Outcome]:
    """Those of the responses that have a reward."""
    return [Outcome(reward=r.reward, length=r.made, limit=limit) for r in group.responses if r.reward is not None]


def credit(groups: Sequence[Group], algorithm: Algorithm, limit: int) -> list[list[Sample]]:
    """The samples of each group. A response without a reward is left out; its siblings are judged without it."""
    advantages = algorithm.advantages([outcomes(g, limit) for g in groups])
    return [
        [
            _sample(response, advantage, limit)
            for response, advantage in zip((r for r in group.responses if r.reward is not None), row, strict=True)
        ]
        for group, row in zip(groups, advantages, strict=True)
    ]


def _sample(r: Response, advantage: float, limit: int) -> Sample:
    at = [i for i, made in enumerate(r.sampled) if made]
    return Sample(
        ids=(*r.prompt, *r.tokens),
        targets=tuple(len(r.prompt) + i for i in at),
        behaviour=np.array([r.logprobs[i] for i in at]),
        advantage=advantage,
        limit=limit,
    )


def packs(samples: Sequence[Sample], tokens: int) -> list[list[Sample]]:
    """Micro-batches of at most `tokens` cells each, counted as rows times the longest row, longest samples first. A
    sample longer than that goes alone. The same samples in the same order give the same packs."""
    out: list[list[Sample]] = []
    room = 0
    for s in sorted(samples, key=lambda s: -len(s.ids)):
        if not out or room < len(out[-1][0].ids):
            out.append([])
            room = max(tokens, len(s.ids))
        out[-1].append(s)
        room -= len(out[-1][0].ids)
    return out
