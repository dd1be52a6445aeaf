"""How the reads of a decode step are divided: contexts are split, and rows read a shared prefix together.

Splits keep every multiprocessor busy. A prefix group is a set of adjacent rows whose page tables start with the same
pages: these are read once for the group, and then every row reads only the rest of its own context. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

TILE = 16  # queries (rows * query heads of a kv head) that read a shared prefix together: the smallest tile


def min_split_tokens(pairs: int) -> int:
    """Minimum number of tokens of a split, given the number of (row, kv head) pairs. With few pairs, contexts are split
    to create enough programs; with many pairs, only so that no program takes very long."""
    return 256 if pairs < 512 else 1024


def splits_for(batch: int, kv_heads: int, longest: int, multiprocessors: int) -> int:
    """Number of splits for a context of `longest` tokens. Shorter contexts of the step have fewer splits.

    >>> splits_for(256, 8, 2048, 132), splits_for(16, 8, 2048, 132), splits_for(1, 8, 2048, 132)
    (2, 2, 8)
    """
    pairs = batch * kv_heads
    least, splits = min_split_tokens(pairs), 1
    while splits * 2 * least <= longest and splits < 32 and (pairs >= 512 or pairs * splits * 2 <= 3 * multiprocessors):
        splits *= 2
    return splits


def prefill_tile(longest: int, itemsize: int) -> int:
    """Queries (rows * query heads of a kv head) of a tile of a prefill whose longest chunk has this many rows. Chosen
    by measurement."""
    return 64 if itemsize > 2 or longest <= 1024 else 128


def spans_size(rows: int, tiles: int) -> int:
    """Length of what `pack_spans` returns."""
    return 3 * rows + 4 * tiles


def pack_spans(
    ids: Sequence[int],
    slot: np.ndarray,
    count: np.ndarray,
    start: np.ndarray,
    *,
    rows: int,
    tiles: int,
    rows_each: int,
    padding: int,
) -> np.ndarray:
    """A prefill of chunks, one after the other, as one array: the token, slot and position of every row, padded to
    `rows` with the slot `padding`; and of every tile its slot, first row, number of rows and first position, padded to
    `tiles`. Chunk n has `count[n]` rows, from position `start[n]` on; a tile has at most `rows_each`.

    >>> pack_spans([7, 8, 9], *np.array([[4, 5], [2, 1], [0, 30]]), rows=4, tiles=3, rows_each=2, padding=6).tolist()
    [7, 8, 9, 0, 4, 4, 5, 6, 0, 1, 30, 0, 5, 2, 1, 30, 4, 0, 2, 0, 0, 0, 0, 0]
    """
    out, total = np.zeros(spans_size(rows, tiles), np.int32), len(ids)
    tokens, row_slot, position, tile_list = np.split(out, [rows, 2 * rows, 3 * rows])
    first = np.cumsum(count) - count
    tokens[:total] = ids
    row_slot[:total], row_slot[total:] = np.repeat(slot, count), padding
    position[:total] = np.arange(total) - np.repeat(first - start, count)
    parts = -(-count // rows_each)
    before = (np.arange(parts.sum()) - np.repeat(np.cumsum(parts) - parts, parts)) * rows_each
    slot, first, count, start = (np.repeat(a, parts) for a in (slot, first, count, start))
    entries = np.stack([slot, first + before, np.minimum(count - before, rows_each), start + before], 1)
    longest_first = np.argsort(-(entries[:, 2] + entries[:, 3]), kind="stable")  # the last to begin should end soon
    tile_list.reshape(-1, 4)[: len(entries)] = entries[longest_first]
    return out


def fit_tiling(block: int, stages: int, *, tile: int, head: int, itemsize: int, max_bytes: int) -> tuple[int, int]:
    """(keys of a block, stages) with which attention needs at most `max_bytes` of shared memory: stages are reduced
    first, down to two. The tile of queries keeps its size.

    >>> fit_tiling(128, 3, tile=16, head=128, itemsize=2, max_bytes=232_448)
    (128, 3)
    >>> fit_tiling(128, 3, tile=16, head=128, itemsize=2, max_bytes=101_376)
    (128, 2)
    >>> fit_tiling(64, 3, tile=128, head=256, itemsize=2, max_bytes=101_376)
    (16, 2)
    """

    def needed(block: int, stages: int) -> int:
        """Bytes, as found by compiling for several GPUs: keys and values of all stages but one, plus the tile."""
        return 2 * block * head * itemsize * (stages - 1) + max(tile * (head + block) * itemsize, 96 * head)

    while needed(block, stages) > max_bytes and (stages > 2 or block > 16):
        block, stages = (block, stages - 1) if stages > 2 else (block // 2, stages)
    return block, stages


@dataclass(frozen=True, kw_only=True, slots=True)
class PrefixSharing:
    """Which rows form prefix groups."""

    max_rows: int  # upper limit for the rows of a group; 0 or 1 disables groups
    min_tokens: int = 64  # minimum length of a shared prefix, in tokens
    min_saved_tokens: int = 49_152
    """Minimum number of tokens that all groups together must save in a step. Groups cost one more launch per layer, and
    rows that read the same pages at about the same time find some of them in the L2 anyway. Measured on an H200 with
    prompts of 512 tokens: equally fast if 30,000 to 60,000 tokens are saved, a sixth faster at 120,000, a third at
    200,000."""

    @staticmethod
    def for_heads(heads: int, kv_heads: int) -> PrefixSharing:
        """Groups of as many rows as a tile has room for.

        >>> [PrefixSharing.for_heads(*heads).max_rows for heads in ((16, 8), (32, 8), (9, 3))]
        [8, 4, 5]
        """
        return PrefixSharing(max_rows=TILE // (heads // kv_heads))

    def find_groups(self, prefix_id: np.ndarray, pages: np.ndarray, table: np.ndarray, size: int) -> np.ndarray:
        """The prefix groups among the rows of a step: (first row, rows, shared tokens) of each, (G, 3).

        Rows form a group if they are adjacent, have the same `prefix_id` (a hint: it may be wrong) and have page tables
        that start with the same pages. The shared prefix has as many pages as all rows have in common, but at most
        `pages` (the full pages of each row's prompt, all before its newest token). Larger groups are divided.

        >>> table = np.array([[5, 6, 1], [5, 6, 2], [5, 7, 3], [8, 9, 4]])
        >>> sharing = PrefixSharing(max_rows=4, min_tokens=16, min_saved_tokens=1)
        >>> sharing.find_groups(np.zeros(4), np.full(4, 2), table, 16).tolist()
        []
        >>> sharing = PrefixSharing(max_rows=3, min_tokens=16, min_saved_tokens=1)
        >>> sharing.find_groups(np.zeros(4), np.full(4, 2), table, 16).tolist()
        [[0, 3, 16]]
        """
        none = np.zeros((0, 3), np.int32)
        if len(prefix_id) < 2 or self.max_rows < 2:
            return none
        index = np.arange(len(prefix_id))
        run_start = np.maximum.accumulate(np.where(np.r_[True, prefix_id[1:] != prefix_id[:-1]], index, 0))
        leader = index - (index - run_start) % self.max_rows
        first = np.flatnonzero(leader == index)
        count = np.diff(np.r_[first, len(prefix_id)])
        shared_pages = np.minimum(_common_prefix(table, leader), pages)
        tokens = np.minimum.reduceat(shared_pages, first) * size
        worthwhile = (count > 1) & (tokens >= max(self.min_tokens, 1))
        if ((count - 1) * tokens)[worthwhile].sum() < self.min_saved_tokens:
            return none
        return np.stack([first, count, tokens], 1)[worthwhile].astype(np.int32)


def _common_prefix(table: np.ndarray, leader: np.ndarray) -> np.ndarray:
    """Number of leading entries that each row has in common with its leader."""
    other = np.ones((len(table), table.shape[1] + 1), bool)
    np.not_equal(table, table[leader], out=other[:, :-1])
    return other.argmax(1)
