"""How a decode step shares out what it has to read: contexts cut into parts, and prompts that rows read together.

Parts: so that every multiprocessor has something to do. Families: rows side by side whose tables begin with the same
pages; those are read once for all of them, and the rows then read only what is their own. Pure.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

TILE = 16
"""Queries (rows times query heads of a kv head) that read the pages of a family together: a tile of attention has at
least so many rows, whether they are filled or not."""


def part_tokens(pairs: int) -> int:
    """The fewest tokens of context that are worth a part of their own, with so many (row, kv head) pairs: where there
    are few, parts are cut to have enough of them; where there are many, only so that none takes very long."""
    return 256 if pairs < 512 else 1024


def splits_for(batch: int, kv_heads: int, longest: int, multiprocessors: int) -> int:
    """Into how many parts `decode` should cut a context of `longest` tokens. Shorter ones are cut into fewer.

    >>> splits_for(256, 8, 2048, 132), splits_for(16, 8, 2048, 132), splits_for(1, 8, 2048, 132)
    (2, 2, 8)
    """
    pairs = batch * kv_heads
    least, splits = part_tokens(pairs), 1
    while splits * 2 * least <= longest and splits < 32 and (pairs >= 512 or pairs * splits * 2 <= 3 * multiprocessors):
        splits *= 2
    return splits


def fitted(
    block: int, stages: int, *, tile: int, head: int, itemsize: int, most_bytes: int
) -> tuple[int, int]:  # fmt: skip
    """(keys of a block, stages) with which attention needs at most so much shared memory: stages go first, down to two.
    The tile of queries stays as it is.

    >>> fitted(128, 3, tile=16, head=128, itemsize=2, most_bytes=232_448)
    (128, 3)
    >>> fitted(128, 3, tile=16, head=128, itemsize=2, most_bytes=101_376)
    (128, 2)
    >>> fitted(64, 3, tile=128, head=256, itemsize=2, most_bytes=101_376)
    (16, 2)
    """

    def wanted(block: int, stages: int) -> int:
        """By compiling for several cards: keys and values of all stages but one, and what a tile needs besides."""
        return 2 * block * head * itemsize * (stages - 1) + max(tile * (head + block) * itemsize, 96 * head)

    while wanted(block, stages) > most_bytes and (stages > 2 or block > 16):
        block, stages = (block, stages - 1) if stages > 2 else (block // 2, stages)
    return block, stages


@dataclass(frozen=True, kw_only=True, slots=True)
class Sharing:
    """Which rows become a family."""

    rows: int
    """The most rows of one; 0 or 1: there are none."""
    least_tokens: int = 64
    """The fewest shared tokens that are worth a family."""
    worth_tokens: int = 49_152
    """The fewest tokens that families must save a step in all: they cost a launch more in every layer, and rows that
    read the same pages at about the same time find some of them in the L2 anyway. By measurement on an H200, with
    prompts of 512 tokens: even at 30,000 to 60,000, a sixth faster at 120,000, a third at 200,000."""

    @staticmethod
    def of(heads: int, kv_heads: int) -> Sharing:
        """What a tile has room for.

        >>> Sharing.of(16, 8).rows, Sharing.of(32, 8).rows, Sharing.of(9, 3).rows
        (8, 4, 5)
        """
        return Sharing(rows=TILE // (heads // kv_heads))

    def families(self, kin: np.ndarray, pages: np.ndarray, table: np.ndarray, size: int) -> np.ndarray:
        """Families among the rows of a step: (first row, rows, shared tokens) of each, (F, 3).

        Rows are one family if they stand side by side, have the same `kin` (a hint: it may be wrong) and if their
        tables agree from the first page on: in as many pages as all of them do, at most `pages` (each row's full pages
        of its prompt, all before its newest token). Larger families are cut.

        >>> table = np.array([[5, 6, 1], [5, 6, 2], [5, 7, 3], [8, 9, 4]])
        >>> Sharing(rows=4, least_tokens=16, worth_tokens=1).families(np.zeros(4), np.full(4, 2), table, 16).tolist()
        []
        >>> Sharing(rows=3, least_tokens=16, worth_tokens=1).families(np.zeros(4), np.full(4, 2), table, 16).tolist()
        [[0, 3, 16]]
        """
        none = np.zeros((0, 3), np.int32)
        if len(kin) < 2 or self.rows < 2:
            return none
        index = np.arange(len(kin))
        run = np.maximum.accumulate(np.where(np.r_[True, kin[1:] != kin[:-1]], index, 0))  # where each row's begins
        leader = index - (index - run) % self.rows
        first = np.flatnonzero(leader == index)
        count = np.diff(np.r_[first, len(kin)])
        agree = np.minimum(_prefix(table, leader), pages)
        tokens = np.minimum.reduceat(agree, first) * size
        worth = (count > 1) & (tokens >= max(self.least_tokens, 1))
        if ((count - 1) * tokens)[worth].sum() < self.worth_tokens:
            return none
        return np.stack([first, count, tokens], 1)[worth].astype(np.int32)


def _prefix(table: np.ndarray, leader: np.ndarray) -> np.ndarray:
    """In how many entries each row agrees with its leader, from the first one on."""
    other = np.ones((len(table), table.shape[1] + 1), bool)
    np.not_equal(table, table[leader], out=other[:, :-1])
    return other.argmax(1)
