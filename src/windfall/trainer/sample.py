"""Turns graded groups into training samples: one Sample for each segment of each response that has a reward, with the
advantage of the response. Nearly every response has one segment; those of agents may have more."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import compress

import numpy as np

from windfall.algorithms.base import Algorithm, Floats, Outcome
from windfall.types import Group, Response

MAX_LAG = np.iinfo(np.uint16).max
"""Larger lags are stored as this one, so that they cannot wrap around to 0."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Sample:
    """One sequence to train on: a prompt and what follows it, that is a response or one segment of it. `targets`:
    indices in `ids` of the sampled tokens (never 0)."""

    ids: tuple[int, ...]
    targets: tuple[int, ...]
    behavior: Floats
    """Log-probs of the targets, as reported by the engine."""
    advantage: float
    limit: int
    """Maximum number of tokens of a response (rollout.max_tokens)."""
    old: Floats | None = None
    """Log-probs of the proximal policy: those of the trainer before the first update of the step. None: use those
    computed now, which are the same until the first update."""
    lag: np.ndarray | None = None
    """Age of each target: the trainer's version minus the one that sampled the token (uint16). None: all 0."""
    engines: tuple[tuple[str, int], ...] = ()
    """(engine, number of targets) of consecutive stretches; an empty name if it is unknown. Empty: all unknown."""
    whole: int = 0
    """Number of sampled tokens of the whole response, of which this is one segment. 0: it is the whole response."""

    @property
    def length(self) -> int:
        """Number of sampled tokens of the whole response."""
        return self.whole or len(self.targets)

    @property
    def share(self) -> float:
        """The share of the response's sampled tokens that are in this sequence. Shares of a response add up to 1."""
        return len(self.targets) / self.whole if self.whole else 1.0


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


def packs(samples: Sequence[Sample], tokens: int, *, padded: bool = True) -> list[list[Sample]]:
    """Micro-batches of at most `tokens` each, longest samples first. With padding, the size of a pack is its number of
    samples times the longest one; without, its number of tokens. A longer sample is a pack alone. Deterministic."""
    ordered = sorted(samples, key=lambda s: -len(s.ids))
    if not padded:
        return [pack for pack in _even(ordered, tokens, padded=False) if pack]
    out: list[list[Sample]] = []
    room = 0
    for s in ordered:
        if not out or room < len(out[-1][0].ids):
            out.append([])
            room = max(tokens, len(s.ids))
        out[-1].append(s)
        room -= len(out[-1][0].ids)
    return out


def packs_of_ranks(samples: Sequence[Sample], tokens: int, ranks: int, *, padded: bool) -> list[list[list[Sample]]]:
    """The packs of every rank: the same number for each, about equally full, with empty ones where there are too few
    samples. All ranks make a pass together, so a pass takes as long as its largest pack."""
    if ranks == 1:
        return [packs(samples, tokens, padded=padded)]
    ordered = sorted(samples, key=lambda s: -len(s.ids))
    made = _even(ordered, tokens, padded=padded, multiple=ranks)
    made.sort(key=lambda pack: -sum(len(s.ids) for s in pack))
    return [made[rank::ranks] for rank in range(ranks)]


def _even(samples: Sequence[Sample], tokens: int, *, padded: bool, multiple: int = 1) -> list[list[Sample]]:
    """As few packs as possible (a multiple of `multiple`), about equally full: each sample goes to the emptiest; packs
    are added until all fit. The samples are ordered, longest first."""
    count = -(-sum(len(s.ids) for s in samples) // tokens)
    while True:
        count = -(-count // multiple) * multiple
        out: list[list[Sample]] = [[] for _ in range(count)]
        heap = [(0, i) for i in range(count)]
        for s in samples:
            full, i = heapq.heappop(heap)
            out[i].append(s)
            heapq.heappush(heap, (full + len(s.ids), i))
        if all(len(pack) < 2 or _size(pack, padded) <= tokens for pack in out):
            return out
        count += 1


def _size(pack: Sequence[Sample], padded: bool) -> int:
    return len(pack) * len(pack[0].ids) if padded else sum(len(s.ids) for s in pack)
