"""From graded groups to what a trainer takes: one Sample per response that counts, with its advantage."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import compress

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
    return [
        Outcome(reward=r.reward, length=r.sampled_count, limit=limit, observed=len(r.tokens) - r.sampled_count)
        for r in group.responses
        if r.reward is not None
    ]


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
    first = len(r.prompt)
    return Sample(
        ids=r.prompt + r.tokens,
        targets=tuple(compress(range(first, first + len(r.tokens)), r.sampled)),
        behaviour=np.fromiter(compress(r.logprobs, r.sampled), dtype=float),
        advantage=advantage,
        limit=limit,
    )


def packs(samples: Sequence[Sample], tokens: int, *, padded: bool = True) -> list[list[Sample]]:
    """Micro-batches of at most `tokens` each, longest samples first: of cells, counted as rows times the longest row,
    where rows are padded; else of tokens. A sample longer than that goes alone. The same samples in the same order
    give the same packs."""
    inorder = sorted(samples, key=lambda s: -len(s.ids))
    if not padded:
        return _even(inorder, tokens)
    out: list[list[Sample]] = []
    room = 0
    for s in inorder:
        if not out or room < len(out[-1][0].ids):
            out.append([])
            room = max(tokens, len(s.ids))
        out[-1].append(s)
        room -= len(out[-1][0].ids)
    return out


def _even(samples: Sequence[Sample], tokens: int) -> list[list[Sample]]:
    """As few packs as can be, about equally full: each sample to the emptiest, with one pack more until all fit."""
    count = -(-sum(len(s.ids) for s in samples) // tokens)
    while True:
        out: list[list[Sample]] = [[] for _ in range(count)]
        heap = [(0, i) for i in range(count)]
        for s in samples:
            full, i = heapq.heappop(heap)
            out[i].append(s)
            heapq.heappush(heap, (full + len(s.ids), i))
        if all(full <= tokens or len(out[i]) == 1 for full, i in heap):
            return [pack for pack in out if pack]
        count += 1
