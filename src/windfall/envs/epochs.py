"""The order in which rows are used: every epoch has each row once, in an order of its own."""

from __future__ import annotations

import functools
import hashlib


class EpochOrder:
    """The row of every task number. The order of every epoch is derived from `seed`."""

    def __init__(self, seed: int, count: int) -> None:
        self._seed, self._count = seed, count
        # Two epochs, because responses of the last epoch may still be running when the next one begins.
        self._order = functools.lru_cache(maxsize=2)(self._compute)

    def row(self, index: int) -> int:
        epoch, position = divmod(index, self._count)
        return self._order(epoch)[position]

    def _compute(self, epoch: int) -> list[int]:
        def key(row: int) -> bytes:
            return hashlib.blake2b(f"{self._seed}/{epoch}/{row}".encode(), digest_size=8).digest()

        return sorted(range(self._count), key=key)
