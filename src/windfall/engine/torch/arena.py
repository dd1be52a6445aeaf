"""The memory in which several engines keep their KV caches: a tensor of bytes, divided into blocks (engine/blocks.py).

    block 0                          block 1                       ...   scratch blocks, one per tenant
    ├ page ┼ page ┼ page ┼ rest ┤    ├ page of another model ┼ ... ┤     ├ ─ ┤ ├ ─ ┤

A page holds the keys and values of all layers, one after another. An engine reads layer n through a strided view whose
first index is a granule, so a page's number is the number of its first granule. The views of an engine never change:
blocks move between engines by bookkeeping alone. A block that was another tenant's is filled with zeros before its
first use, so no tenant can read what another wrote, and masked positions are finite numbers in every dtype.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from windfall.engine.blocks import BlockLayout, MemoryBlocks, TenantPages
from windfall.errors import WindfallError

TENANTS = 2
"""Upper limit for the tenants of one arena."""


class _Shape(Protocol):
    """What one attention module caches per token, as (heads, size)."""

    @property
    def keys(self) -> tuple[int, int]: ...
    @property
    def values(self) -> tuple[int, int]: ...


class Arena:
    def __init__(self, layout: BlockLayout, device: Any = "cpu") -> None:
        self.blocks = MemoryBlocks(layout)
        self._layout = layout
        self.memory = torch.zeros((layout.count + TENANTS) * layout.block_bytes, dtype=torch.uint8, device=device)
        self._scratch: list[str] = [""] * TENANTS

    def join(self, tenant: str, *, token_bytes: int, page_size: int, priority: bool = False) -> TenantKV:
        """The KV cache of a tenant whose tokens take `token_bytes` over all layers."""
        page_bytes = page_size * token_bytes
        if not self._layout.pages(page_bytes):
            what = f"a page of this model takes {page_bytes} bytes, and a block has {self._layout.block_bytes}"
            raise WindfallError(what, where=tenant, fix="Give serving more memory for its KV cache (--kv-tokens).")
        slot = self._scratch.index("")
        self._scratch[slot] = tenant
        pages = TenantPages(self.blocks, tenant, page_bytes=page_bytes, size=page_size, priority=priority)
        return TenantKV(self, pages, scratch=(self._layout.count + slot) * self._layout.granules)

    def leave(self, tenant: str) -> None:
        self.blocks.leave(tenant)
        slot = self._scratch.index(tenant)
        self._scratch[slot] = ""
        self._clear(self._layout.count + slot)

    def clear_moved(self) -> None:
        while self.blocks.dirty:
            self._clear(self.blocks.dirty.pop())

    def _clear(self, block: int) -> None:
        size = self._layout.block_bytes
        self.memory[block * size : (block + 1) * size].zero_()

    def use_device(self) -> None:
        """Make this GPU the current one of the calling thread: kernels run on the current GPU."""
        if self.memory.is_cuda:
            torch.cuda.set_device(self.memory.device)


class TenantKV:
    """What an engine needs to keep its KV cache in an arena."""

    def __init__(self, arena: Arena, pages: TenantPages, *, scratch: int) -> None:
        self._arena = arena
        self.pages = pages
        self.scratch = scratch

    def views(self, shapes: Sequence[_Shape], dtype: torch.dtype) -> list[tuple[Tensor, Tensor]]:
        """The keys and values of every attention module: (granules, page size, heads, size), indexed by page number."""
        size = self.pages.size
        page = sum(size * (s.keys[0] * s.keys[1] + s.values[0] * s.values[1]) for s in shapes)
        flat, granule, count = self._granules(dtype, page)
        offset, out = 0, list[tuple[Tensor, Tensor]]()
        for shape in shapes:
            pair: list[Tensor] = []
            for heads, width in (shape.keys, shape.values):
                strides = (granule, heads * width, width, 1)
                pair.append(flat.as_strided((count, size, heads, width), strides, offset))
                offset += size * heads * width
            out.append((pair[0], pair[1]))
        return out

    def layers_view(self, layers: int, kv_heads: int, head: int, dtype: torch.dtype) -> Tensor:
        """Keys and values of all layers as GPU kernels read them: (layers, 2, granules, kv_heads, page size, head). All
        attention modules have the same shape."""
        size = self.pages.size
        one = kv_heads * size * head
        flat, granule, count = self._granules(dtype, 2 * layers * one)
        return flat.as_strided((layers, 2, count, kv_heads, size, head), (2 * one, one, granule, size * head, head, 1))

    def _granules(self, dtype: torch.dtype, page: int) -> tuple[Tensor, int, int]:
        """The memory, the elements of a granule, and the granules at which a page of this many elements may begin."""
        flat, granule = self._arena.memory.view(dtype), self._arena.blocks.layout.granule_bytes // dtype.itemsize
        return flat, granule, (flat.numel() - page) // granule + 1

    def clear_moved(self) -> None:
        """Fill the blocks that were another tenant's with zeros. Call this after planning a step, before it runs."""
        self._arena.clear_moved()

    def leave(self) -> None:
        """Give everything back. The engine must not step again."""
        self._arena.leave(self.pages.tenant)
