"""The pages of the KV cache: who holds which, and which can be used again. Pure bookkeeping, no tensors.

Rules that always hold (`check()`):
- a page is either free or held by at least one sequence; the counts of holders match what sequences hold;
- a page with a key holds exactly the tokens that the key names, and no two pages have the same key;
- a held page is never handed out; free pages with a key keep their contents until they are needed for something else.

A key names a page by all tokens from the start of the sequence to its end. So the siblings of a group find their
prompt's pages, a second turn finds the first, and a response that comes back finds what is left of it.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence

import xxhash

Key = int
ROOT: Key = 0


def key_of(parent: Key, tokens: Sequence[int]) -> Key:
    """The key of a full page, given the key of the page before it."""
    return xxhash.xxh3_128_intdigest(parent.to_bytes(16, "little") + array("q", tokens).tobytes())


class Pages:
    def __init__(self, count: int, size: int) -> None:
        self.count, self.size = count, size
        self._holders = [0] * count
        self._key: list[Key | None] = [None] * count
        self._by_key: dict[Key, int] = {}
        self._blank = list(range(count - 1, -1, -1))
        self._kept: OrderedDict[int, None] = OrderedDict()  # free, with a key; least recently freed first

    @property
    def free(self) -> int:
        return len(self._blank) + len(self._kept)

    def take(self) -> int | None:
        """A page to write to, or None when all are held."""
        if self._blank:
            page = self._blank.pop()
        elif self._kept:
            page, _ = self._kept.popitem(last=False)
            self._forget(page)
        else:
            return None
        self._holders[page] = 1
        return page

    def find(self, key: Key) -> int | None:
        """The page that holds these tokens, now also held by the caller."""
        page = self._by_key.get(key)
        if page is None:
            return None
        if self._holders[page] == 0:
            del self._kept[page]
        self._holders[page] += 1
        return page

    def name(self, page: int, key: Key) -> None:
        """Say what a full page holds. When another page has the same key already, this one stays nameless."""
        if key not in self._by_key:
            self._by_key[key] = page
            self._key[page] = key

    def release(self, pages: Iterable[int]) -> None:
        """Give pages back. Later pages of a sequence are forgotten before earlier ones, which more others can use."""
        for page in reversed(list(pages)):
            self._holders[page] -= 1
            if self._holders[page] == 0:
                if self._key[page] is None:
                    self._blank.append(page)
                else:
                    self._kept[page] = None

    def forget_all(self) -> None:
        """New weights: what the pages hold is of no further use. Held ones only lose their name."""
        self._blank.extend(self._kept)
        self._kept.clear()
        self._by_key.clear()
        self._key = [None] * self.count

    def _forget(self, page: int) -> None:
        key = self._key[page]
        if key is not None:
            del self._by_key[key]
            self._key[page] = None

    def check(self, held: Iterable[Sequence[int]]) -> None:
        """Raise AssertionError unless the rules above hold, given the pages of every live sequence."""
        count = [0] * self.count
        for pages in held:
            assert len(set(pages)) == len(pages), f"a sequence holds a page twice: {pages}"
            for page in pages:
                count[page] += 1
        assert count == self._holders, "holders do not match what sequences hold: a page leaked or was freed early"
        unheld = {p for p in range(self.count) if count[p] == 0}
        free = [*self._blank, *self._kept]
        assert len(free) == len(set(free)), "a page is free twice"
        assert set(free) == unheld, "free pages are not exactly those nobody holds"
        assert {k: p for p, k in enumerate(self._key) if k is not None} == self._by_key, "keys and pages disagree"
        assert all(self._key[p] is not None for p in self._kept) and all(self._key[p] is None for p in self._blank)
