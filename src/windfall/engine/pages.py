"""The pages of the KV cache: reference counts, and the prefix cache. Pure bookkeeping, no tensors.

Rules that always hold (`check()`):
- a page is either free or held by at least one sequence; its reference count is the number of sequences that hold it;
- a page with a key contains exactly the tokens that the key stands for, and no two pages have the same key;
- a held page is never allocated; free pages with a key keep their contents until they are allocated again.

A key is a hash of all tokens from the start of the sequence to the end of the page. So the siblings of a group find the
pages of their prompt, a second turn finds those of the first, and a resumed response finds those that are still cached.
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
        self.count = count
        self.size = size
        self._references = [0] * count
        self._key: list[Key | None] = [None] * count
        self._by_key: dict[Key, int] = {}
        self._unused = list(range(count - 1, -1, -1))
        self._cached: OrderedDict[int, Key] = OrderedDict()  # free pages with a key; least recently freed first

    @property
    def capacity(self) -> int:
        """Pages that can be held at once."""
        return self.count

    @property
    def free(self) -> int:
        return len(self._unused) + len(self._cached)

    def allocate(self) -> int | None:
        """A page to write to, or None if all pages are held."""
        if self._unused:
            page = self._unused.pop()
        elif self._cached:
            page, key = self._cached.popitem(last=False)
            del self._by_key[key]
            self._key[page] = None
        else:
            return None
        self._references[page] = 1
        return page

    def find(self, key: Key) -> int | None:
        """The page with this key, or None. The caller becomes one of its holders."""
        page = self._by_key.get(key)
        if page is None:
            return None
        if self._references[page] == 0:
            del self._cached[page]
        self._references[page] += 1
        return page

    def is_shared(self, page: int) -> bool:
        """Whether several sequences hold this page."""
        return self._references[page] > 1

    def register(self, page: int, key: Key) -> None:
        """Set the key of a full page. If another page has this key already, the page stays without a key."""
        if key not in self._by_key:
            self._by_key[key] = page
            self._key[page] = key

    def release(self, pages: Iterable[int]) -> None:
        """Release pages. Later pages of a sequence are evicted before earlier ones, which more sequences can share."""
        for page in reversed(list(pages)):
            self._references[page] -= 1
            if self._references[page] == 0:
                if (key := self._key[page]) is None:
                    self._unused.append(page)
                else:
                    self._cached[page] = key

    def clear_cache(self) -> None:
        """Remove all keys, because new weights made the contents invalid. Held pages stay held."""
        self._unused.extend(self._cached)
        self._cached.clear()
        self._by_key.clear()
        self._key = [None] * self.count

    def _owned(self) -> set[int]:
        """The pages that can be held."""
        return set(range(self.count))

    def check(self, held: Iterable[Sequence[int]]) -> None:
        """Raise AssertionError unless the rules above hold, given the pages of every live sequence."""
        count = [0] * self.count
        for pages in held:
            assert len(set(pages)) == len(pages), f"a sequence holds a page twice: {pages}"
            for page in pages:
                count[page] += 1
        assert count == self._references, "reference counts are wrong: a page leaked or was freed early"
        held_pages = {page for page in range(self.count) if count[page]}
        free = [*self._unused, *self._cached]
        assert len(free) == len(set(free)), "a page is in the free lists twice"
        assert set(free) == self._owned() - held_pages, "the free pages are not exactly those that no sequence holds"
        assert held_pages <= self._owned(), "a held page belongs to another owner"
        assert {k: p for p, k in enumerate(self._key) if k is not None} == self._by_key, "keys and pages disagree"
        assert all(self._key[p] is not None for p in self._cached) and all(self._key[p] is None for p in self._unused)
