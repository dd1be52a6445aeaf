"""The pages of one tenant's KV cache, carved from blocks that it shares with other tenants. Pure bookkeeping.

A page's number is that of its first granule in the memory, so the pages of a tenant are not consecutive. Everything
else is as in `pages.py`, with these additions:

- `allocate` first uses the tenant's own free pages, then claims a block, within `limit`, then evicts a cached page. A
  tenant with priority at last takes a block that another tenant uses;
- a block of which no page is held may be given back at any time: its cached pages are forgotten (`trim`);
- a tenant without priority can be made to give up blocks in use (`yield_blocks`): `evict` is called with the pages of
  such a block, and must release all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from windfall.engine.blocks import Blocks
from windfall.engine.pages import Key, Pages


class TenantPages(Pages):
    def __init__(self, blocks: Blocks, tenant: str, *, page_bytes: int, size: int, priority: bool = False) -> None:
        """`page_bytes`: bytes of a page of `size` tokens over all layers."""
        layout = blocks.layout
        super().__init__(layout.count * layout.granules, size)
        self._blocks, self.tenant, self._priority = blocks, tenant, priority
        self._page_granules, self.per_block = layout.page_granules(page_bytes), layout.pages(page_bytes)
        self._unused = []
        self._held_in = [0] * layout.count  # held pages in each block
        self._held_blocks = 0
        self.limit = layout.count
        """Upper limit for the blocks that this tenant may own."""
        self.waste = 1.0 - self.per_block * page_bytes / layout.block_bytes
        """Share of a block that no page uses."""
        self.evict: Callable[[frozenset[int]], None] = lambda pages: None
        blocks.join(
            tenant, priority=priority, trim=self.trim, yield_blocks=self.yield_blocks,
            idle=lambda: self.owned_blocks - self.held_blocks, vacate=self.vacate,
        )  # fmt: skip

    # Amounts.

    @property
    def capacity(self) -> int:
        """Pages in all blocks together."""
        return self._blocks.layout.count * self.per_block

    @property
    def free(self) -> int:
        """Pages that can be allocated now, without preempting a sequence of this tenant."""
        owned, layout = self._blocks.held(self.tenant), self._blocks.layout
        more = layout.count - owned if self._priority else min(self._blocks.available(self.tenant), self.limit - owned)
        return super().free + max(0, more) * self.per_block

    @property
    def held_blocks(self) -> int:
        """Blocks with at least one held page."""
        return self._held_blocks

    @property
    def owned_blocks(self) -> int:
        return self._blocks.held(self.tenant)

    def block_of(self, page: int) -> int:
        return page // self._blocks.layout.granules

    def pages_of(self, block: int) -> range:
        first, step = block * self._blocks.layout.granules, self._page_granules
        return range(first, first + self.per_block * step, step)

    # Allocation.

    def allocate(self) -> int | None:
        page = self._allocate()
        if page is not None:
            self._hold(page)
        return page

    def _hold(self, page: int) -> None:
        block = self.block_of(page)
        self._held_blocks += self._held_in[block] == 0
        self._held_in[block] += 1

    def _allocate(self) -> int | None:
        if not self._unused and self.per_block and self.owned_blocks < self.limit:
            self._grant(self._blocks.claim(self.tenant))
        page = super().allocate()
        if page is None and self._priority and self.per_block:
            self._grant(self._blocks.take(self.tenant))
            page = super().allocate()
        return page

    def _grant(self, block: int | None) -> None:
        if block is not None:
            self._unused.extend(reversed(self.pages_of(block)))

    def find(self, key: Key) -> int | None:
        page = super().find(key)
        if page is not None and self._references[page] == 1:
            self._hold(page)
        return page

    def release(self, pages: Iterable[int]) -> None:
        pages = list(pages)
        super().release(pages)
        for page in pages:
            if self._references[page] == 0:
                block = self.block_of(page)
                self._held_in[block] -= 1
                self._held_blocks -= self._held_in[block] == 0

    def clear_cache(self) -> None:
        super().clear_cache()
        self.trim(self._blocks.layout.count)

    # Giving back.

    def trim(self, count: int) -> int:
        """Give back up to `count` blocks of which no page is held. Returns how many."""
        idle = [b for b in sorted(self._blocks.of(self.tenant)) if not self._held_in[b]][:count]
        if idle:
            self._drop(idle)
        return len(idle)

    def vacate(self, blocks: frozenset[int], dry: bool) -> bool:
        """Give these blocks back, unless a page of one is held."""
        if any(self._held_in[b] for b in blocks):
            return False
        if not dry:
            self._drop(sorted(blocks))
        return True

    def _drop(self, blocks: Sequence[int]) -> None:
        gone = {page for block in blocks for page in self.pages_of(block)}
        for page in gone & self._cached.keys():
            del self._by_key[self._cached.pop(page)]
            self._key[page] = None
        self._unused = [page for page in self._unused if page not in gone]
        for block in blocks:
            self._blocks.give_back(self.tenant, block)

    def yield_blocks(self, count: int) -> int:
        """Give back `count` blocks, or all: idle ones first, then those with the fewest held pages, whose holders are
        evicted. Returns how many were given back."""
        before = self.owned_blocks
        wanted = min(count, before)
        self.trim(wanted)
        while before - self.owned_blocks < wanted:
            block = min(self._blocks.of(self.tenant), key=lambda b: (self._held_in[b], b))
            self.evict(frozenset(page for page in self.pages_of(block) if self._references[page]))
            assert not self._held_in[block], f"{self.tenant} did not release the pages of block {block}"
            self.trim(wanted - (before - self.owned_blocks))
        return before - self.owned_blocks

    def leave(self) -> None:
        """Give back everything at once. This object is useless after that."""
        self._blocks.leave(self.tenant)

    def check(self, held: Iterable[Sequence[int]]) -> None:
        count = [0] * self.count
        for pages in held:
            assert len(set(pages)) == len(pages), f"a sequence holds a page twice: {pages}"
            for page in pages:
                count[page] += 1
        assert count == self._references, "reference counts are wrong: a page leaked or was freed early"
        owned = {page for block in self._blocks.of(self.tenant) for page in self.pages_of(block)}
        free = [*self._unused, *self._cached]
        assert len(free) == len(set(free)), "a page is in the free lists twice"
        assert set(free) == {page for page in owned if not count[page]}, "free pages are not those that none holds"
        assert not {page for page in range(self.count) if count[page]} - owned, "a held page is in a foreign block"
        held_in = [sum(count[p] > 0 for p in self.pages_of(b)) for b in range(self._blocks.layout.count)]
        assert held_in == self._held_in, "the counts of held pages are wrong"
        assert self._held_blocks == sum(n > 0 for n in held_in), "the count of held blocks is wrong"
        assert {k: p for p, k in enumerate(self._key) if k is not None} == self._by_key, "keys and pages disagree"
