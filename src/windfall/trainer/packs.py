"""Packs samples into micro-batches of about equal size, for one rank or several."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from windfall.training import Sample


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
