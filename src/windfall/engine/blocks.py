"""Blocks of memory that several tenants share, each for its own KV cache. Pure bookkeeping, no tensors.

Rules that always hold (`check()`):
- a block is free or belongs to exactly one tenant;
- a block that a tenant gets after another tenant had it is *dirty* until its memory is cleared;
- a tenant with priority is refused a block only if it holds all of them itself.

A tenant registers three functions: `idle` counts its blocks that hold nothing in use; `trim` gives back up to n of
these; `yield_blocks` gives back n blocks at any price, or all. The last is only called on behalf of a tenant with
priority, and of tenants that join as a last resort only when the others have nothing left. The tenant that is called
must not be in the middle of a step.

Low blocks are used first. So the last ones are often free, and a tenant can `reserve` them as one range; `vacate` gives
back the blocks of a range that hold nothing in use.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass, field

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


@dataclass(kw_only=True, slots=True)
class _Tenant:
    priority: bool
    last_resort: bool
    idle: Callable[[], int]
    trim: Callable[[int], int]
    yield_blocks: Callable[[int], int]
    vacate: Callable[[frozenset[int], bool], bool]
    blocks: set[int] = field(default_factory=set)


class Blocks:
    def __init__(self, layout: BlockLayout) -> None:
        self.layout = layout
        self._free = list(range(layout.count))  # a heap
        self._tenants: dict[str, _Tenant] = {}
        self._last_owner: list[str] = [""] * layout.count
        self.dirty: set[int] = set()
        """Blocks that hold another tenant's data. The owner of the memory clears them before the next step."""
        self.moves = 0
        """Number of blocks that went from one tenant to another."""

    def join(
        self, tenant: str, *, priority: bool = False, last_resort: bool = False, idle: Callable[[], int] = lambda: 0,
        trim: Callable[[int], int] = lambda n: 0, yield_blocks: Callable[[int], int] = lambda n: 0,
        vacate: Callable[[frozenset[int], bool], bool] = lambda blocks, dry: False,
    ) -> None:  # fmt: skip
        """`vacate(blocks, dry)` gives these blocks back unless one is in use, and says whether it did; `dry`: whether
        it would."""
        assert tenant not in self._tenants, f"{tenant} is a tenant already"
        self._tenants[tenant] = _Tenant(
            priority=priority, last_resort=last_resort, idle=idle, trim=trim, yield_blocks=yield_blocks, vacate=vacate
        )

    def leave(self, tenant: str) -> None:
        """The tenant is gone, and all its blocks are free."""
        for block in sorted(self._tenants[tenant].blocks):
            self.give_back(tenant, block)
        del self._tenants[tenant]

    @property
    def free(self) -> int:
        return len(self._free)

    def available(self, tenant: str) -> int:
        """Blocks that `claim` could return, one after another."""
        return self.free + sum(other.idle() for name, other in self._tenants.items() if name != tenant)

    def held(self, tenant: str) -> int:
        return len(self._tenants[tenant].blocks) if tenant in self._tenants else 0

    def of(self, tenant: str) -> frozenset[int]:
        return frozenset(self._tenants[tenant].blocks)

    def claim(self, tenant: str) -> int | None:
        """A free block, or one that another tenant does not use. None if there is none."""
        if not self._free:
            for name, other in self._tenants.items():
                if name != tenant and other.trim(1):
                    break
        return self._assign(tenant)

    def take(self, tenant: str) -> int | None:
        """A block at any price: other tenants give up what they use. None if they have none."""
        assert self._tenants[tenant].priority, f"{tenant} has no priority"
        if not self._free:
            for name, other in sorted(self._tenants.items(), key=lambda item: item[1].last_resort):
                if name != tenant and other.yield_blocks(1):
                    break
        return self._assign(tenant)

    def reserve(self, tenant: str, count: int) -> bool:
        """Take the last `count` blocks: all of them, or none if one is in use."""
        wanted = frozenset(range(self.layout.count - count, self.layout.count))
        owners = [(t, wanted & t.blocks) for t in self._tenants.values() if wanted & t.blocks]
        if count > self.layout.count or not all(t.vacate(held, True) for t, held in owners):
            return False
        for t, held in owners:
            t.vacate(held, False)
        self._free = [b for b in self._free if b not in wanted]
        heapq.heapify(self._free)
        for block in wanted:
            self._own(tenant, block)
        return True

    def _assign(self, tenant: str) -> int | None:
        if not self._free:
            return None
        return self._own(tenant, heapq.heappop(self._free))

    def _own(self, tenant: str, block: int) -> int:
        self._tenants[tenant].blocks.add(block)
        if self._last_owner[block] not in ("", tenant):
            self.dirty.add(block)
            self.moves += 1
        self._last_owner[block] = tenant
        return block

    def give_back(self, tenant: str, block: int) -> None:
        self._tenants[tenant].blocks.remove(block)
        heapq.heappush(self._free, block)

    def check(self) -> None:
        """Raise AssertionError unless the rules above hold."""
        held = [b for t in self._tenants.values() for b in t.blocks]
        assert sorted([*held, *self._free]) == list(range(self.layout.count)), "a block has two owners or none"
        for name, tenant in self._tenants.items():
            assert all(self._last_owner[b] == name for b in tenant.blocks), f"a block of {name} has another owner"
