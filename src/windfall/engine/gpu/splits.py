"""Into how many parts a decode step cuts the contexts it reads, so that every multiprocessor has something to do."""

from __future__ import annotations


def part_tokens(pairs: int) -> int:
    """The fewest tokens of context that are worth a part of their own, with so many (row, kv head) pairs: where there
    are few, parts are cut to have enough of them; where there are many, only so that none takes very long."""
    return 256 if pairs < 512 else 1024


def splits_for(batch: int, kv_heads: int, longest: int, multiprocessors: int) -> int:
    """Into how many parts `decode` should cut a context of `longest` tokens. Shorter ones are cut into fewer.

    >>> splits_for(256, 8, 2048, 132), splits_for(16, 8, 2048, 132), splits_for(1, 8, 2048, 132)
    (2, 4, 8)
    """
    pairs = batch * kv_heads
    least, splits = part_tokens(pairs), 1
    while splits * 2 * least <= longest and splits < 32 and (pairs >= 512 or pairs * splits * 2 <= 4 * multiprocessors):
        splits *= 2
    return splits
