"""Blocks of memory that several tenants share, each for its own KV cache. Pure bookkeeping, no tensors.

Rules that always hold (`check()`):
- a block is free or belongs to exactly one tenant;
- a block that a tenant gets after another tenant had it is *dirty* until its memory is cleared;
- a tenant with priority is refused a block only if it holds all of them itself.

A tenant with priority may make others give up blocks in use (`TenantPages.yield_blocks`). The tenant that is called
must not be in the middle of a step.

`TenantPages` are the pages of one tenant's KV cache, carved from its blocks. A page's number is that of its first
granule in the memory, so the pages of a tenant are not consecutive.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from windfall.engine.pages import Key, Pages

GRANULES_PER_PAGE = 16
"""Granules of a page of the tenant for which the layout was made."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockLayout:
    """How memory is divided: `count` blocks of `granules` granules of `granule_bytes` each."""

    count: int
    granules: int
    granule_bytes: int

    @property
    def block_bytes(self) -> int:
        return self.granules * self.granule_bytes

    def page_granules(self, page_bytes: int) -> int:
        """Granules of one page."""
        return -(-page_bytes // self.granule_bytes)

    def pages(self, page_bytes: int) -> int:
        """Pages in one block; 0 if a page does not fit."""
        return self.granules // self.page_granules(page_bytes)


def layout(total_bytes: int, page_bytes: int, *, block_bytes: int = 64 << 20, least_blocks: int = 64) -> BlockLayout:
    """Divide `total_bytes` for a tenant with pages of `page_bytes`, which fit with little or no remainder. Blocks are
    about `block_bytes` large, but smaller if there would be fewer than `least_blocks`.

    >>> layout(1 << 20, 4096, block_bytes=1 << 16)
    BlockLayout(count=64, granules=64, granule_bytes=256)
    """
    granule = -(-max(page_bytes, 1) // (GRANULES_PER_PAGE * 16)) * 16  # a multiple of 16 bytes: every dtype is aligned
    per_page = -(-page_bytes // granule)
    wanted = min(block_bytes, total_bytes // least_blocks)
    pages = max(1, wanted // (per_page * granule))
    granules = pages * per_page
    return BlockLayout(count=max(1, total_bytes // (granules * granule)), granules=granules, granule_bytes=granule)


class MemoryBlocks:
    def __init__(self, layout: BlockLayout) -> None:
        self.layout = layout
        self._free = set(range(layout.count))
        self._tenants: dict[str, TenantPages] = {}
        self._owned: dict[str, set[int]] = {}
        self._last_owner: list[str] = [""] * layout.count
        self.dirty: set[int] = set()
        """Blocks that hold another tenant's data. The owner of the memory clears them before the next step."""
        self.moves = 0
        """Number of blocks that went from one tenant to another."""

    def join(self, tenant: TenantPages) -> None:
        assert tenant.tenant not in self._tenants, f"{tenant.tenant} is a tenant already"
        self._tenants[tenant.tenant] = tenant
        self._owned[tenant.tenant] = set()

    def leave(self, tenant: str) -> None:
        """The tenant is gone, and all its blocks are free."""
        self._free |= self._owned.pop(tenant)
        del self._tenants[tenant]

    @property
    def free(self) -> int:
        return len(self._free)

    def available(self, tenant: str) -> int:
        """Blocks that `claim` could return, one after another."""
        return self.free + sum(other.idle_blocks() for other in self._others(tenant))

    def held(self, tenant: str) -> int:
        return len(self._owned.get(tenant, ()))

    def of(self, tenant: str) -> frozenset[int]:
        return frozenset(self._owned[tenant])

    def claim(self, tenant: str) -> int | None:
        """A free block, or one that another tenant does not use. None if there is none."""
        if not self._free:
            any(other.trim(1) for other in self._others(tenant))
        return self._own(tenant, min(self._free)) if self._free else None

    def take(self, tenant: str) -> int | None:
        """A block at any price: other tenants give up what they use. None if they have none."""
        assert self._tenants[tenant].priority, f"{tenant} has no priority"
        if not self._free:
            any(other.yield_blocks(1) for other in self._others(tenant))
        return self._own(tenant, min(self._free)) if self._free else None

    def _others(self, tenant: str) -> list[TenantPages]:
        return [other for name, other in self._tenants.items() if name != tenant]

    def _own(self, tenant: str, block: int) -> int:
        self._free.remove(block)
        self._owned[tenant].add(block)
        if self._last_owner[block] not in ("", tenant):
            self.dirty.add(block)
            self.moves += 1
        self._last_owner[block] = tenant
        return block

    def give_back(self, tenant: str, block: int) -> None:
        self._owned[tenant].remove(block)
        self._free.add(block)

    def check(self) -> None:
        """Raise AssertionError unless the rules above hold."""
        held = [b for own in self._owned.values() for b in own]
        assert sorted([*held, *self._free]) == list(range(self.layout.count)), "a block has two owners or none"
        for name, own in self._owned.items():
            assert all(self._last_owner[b] == name for b in own), f"a block of {name} has another owner"


class TenantPages(Pages):
    """As `Pages`, with these additions:

    - `allocate` first uses the tenant's own free pages, then claims a block, within `limit`, then evicts a cached page.
      A tenant with priority at last takes a block that another tenant uses;
    - a block of which no page is held may be given back at any time: its cached pages are forgotten (`trim`);
    - a tenant without priority can be made to give up blocks in use (`yield_blocks`): `evict` is called with the pages
      of such a block, and must release all of them."""

    def __init__(
        self, blocks: MemoryBlocks, tenant: str, *, page_bytes: int, size: int, priority: bool = False
    ) -> None:
        """`page_bytes`: bytes of a page of `size` tokens over all layers."""
        layout = blocks.layout
        super().__init__(layout.count * layout.granules, size)
        self._blocks = blocks
        self.tenant = tenant
        self.priority = priority
        self._page_granules = layout.page_granules(page_bytes)
        self.per_block = layout.pages(page_bytes)
        self._unused = []
        self._held_in = [0] * layout.count  # held pages in each block
        self.limit = layout.count
        """Upper limit for the blocks that this tenant may own."""
        self.evict: Callable[[frozenset[int]], None] = lambda pages: None
        blocks.join(self)

    @property
    def capacity(self) -> int:
        """Pages in all blocks together."""
        return self._blocks.layout.count * self.per_block

    @property
    def free(self) -> int:
        """Pages that can be allocated now, without preempting a sequence of this tenant."""
        owned, layout = self._blocks.held(self.tenant), self._blocks.layout
        more = layout.count - owned if self.priority else min(self._blocks.available(self.tenant), self.limit - owned)
        return super().free + max(0, more) * self.per_block

    @property
    def held_blocks(self) -> int:
        """Blocks with at least one held page."""
        return sum(count > 0 for count in self._held_in)

    @property
    def owned_blocks(self) -> int:
        return self._blocks.held(self.tenant)

    def idle_blocks(self) -> int:
        """Number of its blocks that hold nothing in use."""
        return self.owned_blocks - self.held_blocks

    def pages_of(self, block: int) -> range:
        first, step = block * self._blocks.layout.granules, self._page_granules
        return range(first, first + self.per_block * step, step)

    def allocate(self) -> int | None:
        if not self._unused and self.per_block and self.owned_blocks < self.limit:
            self._grant(self._blocks.claim(self.tenant))
        page = super().allocate()
        if page is None and self.priority and self.per_block:
            self._grant(self._blocks.take(self.tenant))
            page = super().allocate()
        if page is not None:
            self._hold(page, 1)
        return page

    def _grant(self, block: int | None) -> None:
        if block is not None:
            self._unused.extend(reversed(self.pages_of(block)))

    def _hold(self, page: int, count: int) -> None:
        self._held_in[page // self._blocks.layout.granules] += count

    def find(self, key: Key) -> int | None:
        page = super().find(key)
        if page is not None and self._references[page] == 1:
            self._hold(page, 1)
        return page

    def release(self, pages: Iterable[int]) -> None:
        pages = list(pages)
        super().release(pages)
        for page in pages:
            if self._references[page] == 0:
                self._hold(page, -1)

    def clear_cache(self) -> None:
        super().clear_cache()
        self.trim(self._blocks.layout.count)

    def trim(self, count: int) -> int:
        """Give back up to `count` idle blocks. Returns how many."""
        idle = [b for b in sorted(self._blocks.of(self.tenant)) if not self._held_in[b]][:count]
        if idle:
            self._drop(idle)
        return len(idle)

    def _drop(self, blocks: Sequence[int]) -> None:
        gone = {page for block in blocks for page in self.pages_of(block)}
        for page in gone & self._cached.keys():
            del self._by_key[self._cached.pop(page)]
            self._key[page] = None
        self._unused = [page for page in self._unused if page not in gone]
        for block in blocks:
            self._blocks.give_back(self.tenant, block)

    def yield_blocks(self, count: int) -> int:
        """Give back `count` blocks at any price, or all. Returns how many. Idle blocks come first, then those with the
        fewest held pages, whose holders are evicted."""
        before = self.owned_blocks
        wanted = min(count, before)
        self.trim(wanted)
        while before - self.owned_blocks < wanted:
            block = min(self._blocks.of(self.tenant), key=lambda b: (self._held_in[b], b))
            self.evict(frozenset(page for page in self.pages_of(block) if self._references[page]))
            assert not self._held_in[block], f"{self.tenant} did not release the pages of block {block}"
            self.trim(wanted - (before - self.owned_blocks))
        return before - self.owned_blocks

    def _owned(self) -> set[int]:
        return {page for block in self._blocks.of(self.tenant) for page in self.pages_of(block)}

    def check(self, held: Iterable[Sequence[int]]) -> None:
        super().check(held)
        held_in = [sum(self._references[p] > 0 for p in self.pages_of(b)) for b in range(self._blocks.layout.count)]
        assert held_in == self._held_in, "the counts of held pages are wrong"
