"""What the GPU engine keeps on the device: the KV pool, and the state of every running response.

A response has a slot from the step that admits it until it ends. Everything that changes with every token is here, and
the device itself updates it, so the host can launch step after step without waiting for tokens. The only input of a
step is `rows`: the slots that take part.

Rules:
- the last slot is the padding slot: rows that only pad a batch refer to it. It is always inactive;
- a slot with `left` 0 is inactive: its rows compute, but write only to the scratch page and sample nothing;
- `table` is valid for all tokens up to `length`, and for one more token per launched step.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from windfall.engine.cuda.host_state import STOPS, HostState
from windfall.engine.cuda.splits import spans_size
from windfall.engine.cuda.texts import FAMILY, TextRows
from windfall.engine.drafts import RUNS

if TYPE_CHECKING:
    from windfall.engine.torch.arena import TenantKV

DTYPES = {"seed": torch.int64, "temperature": torch.float32, "top_p": torch.float32, "match": torch.int64}
"""The dtypes of the tensors of a DeviceState that are not int32."""


class KVPool:
    """Keys and values of all layers in one tensor (layers, 2, pages + 1, kv_heads, page_size, head). The last page is
    the scratch page. Kernels read the address from `base`, so captured graphs survive a reallocation of the pool.

    Kernels find keys by three distances, in elements: `page_stride` from a page number to the next, `value_offset` from
    the keys of a layer to its values, and twice that from a layer to the next. Within a page of a layer, keys are
    (kv_heads, page_size, head). In memory that other tenants share (engine/torch/arena.py), a page holds all layers, so
    only the distances differ; that memory is neither allocated nor freed here."""

    def __init__(
        self,
        *,
        layers: int,
        pages: int,
        page_size: int,
        kv_heads: int,
        head: int,
        dtype: torch.dtype,
        device: str,
        kv: TenantKV | None = None,
    ) -> None:
        self.page_size = page_size
        self.kv_heads = kv_heads
        self.head = head
        self.dtype = dtype
        self.device = device
        self.base = torch.zeros(1, dtype=torch.int64, device=device)
        self.shared = kv is not None
        if kv is None:
            self.scratch = pages
            self.shape = (layers, 2, pages + 1, kv_heads, page_size, head)
            self.page_stride = kv_heads * page_size * head
            self.value_offset = (pages + 1) * self.page_stride
            self.data: Tensor | None = None
            self.allocate()
        else:
            self.scratch = kv.scratch
            self.data = kv.layers_view(layers, kv_heads, head, dtype)
            self.shape = tuple(self.data.shape)
            self.page_stride = self.data.stride(2)
            self.value_offset = self.data.stride(1)
            self.base.fill_(self.data.data_ptr())

    @property
    def page_bytes(self) -> int:
        """Bytes of a page, over all layers."""
        layers, pair, _, *page = self.shape
        return layers * pair * math.prod(page) * self.dtype.itemsize

    def allocate(self) -> None:
        """Allocate the memory, filled with zeros, unless it is allocated already."""
        if self.data is None:
            self.data = torch.zeros(self.shape, dtype=self.dtype, device=self.device)
            self.base.fill_(self.data.data_ptr())

    def free(self) -> None:
        """Return the memory to the device. The contents are lost."""
        if self.data is not None and not self.shared:
            self.data = None
            self.base.zero_()
            if self.device.startswith("cuda"):
                torch.cuda.empty_cache()


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceState:
    """One row per slot (S). The last slot is the padding slot."""

    last: Tensor  # (S,) int32: the newest token, whose keys and values are not in the pool yet
    length: Tensor  # (S,) int32: tokens whose keys and values are in the pool; also the index of `last`
    left: Tensor  # (S,) int32: number of tokens that may still be generated; 0: the slot is inactive
    position: Tensor  # (S,) int32: index of the next token within the response
    seed: Tensor  # (S,) int64: the request's seed, as 64 bits
    temperature: Tensor  # (S,) float32; 0: greedy
    top_k: Tensor  # (S,) int32; 0: no limit
    top_p: Tensor  # (S,) float32; 1: no limit
    stop: Tensor  # (S, STOPS) int32: stop tokens, padded with -1
    text_row: Tensor  # (S,) int32: the row of its text; -1: it has none
    text_family: Tensor  # (S,) int32: the family whose rows are searched
    match: Tensor  # (S,) int64: the place in the texts that the response follows (kernels/drafts.py); 0: none
    run: Tensor  # (S,) int32: tokens for which it has followed that place
    search: Tensor  # (S,) int32: 1: find another place
    adapter: Tensor  # (S,) int32: the adapter that the response uses; -1: none
    table: Tensor  # (S, pages per response) int32: page table, the pages of every slot in order

    @staticmethod
    def of(buffer: Tensor, host_state: HostState) -> DeviceState:
        """Views of the device's copy of the host state."""
        parts = {
            field.name: section(buffer, host_state, field.name, DTYPES.get(field.name, torch.int32))
            for field in fields(DeviceState)
        }
        parts["stop"] = parts["stop"].view(-1, STOPS)
        parts["table"] = parts["table"].view(-1, host_state.pages_each)
        return DeviceState(**parts)

    @staticmethod
    def new(slots: int, pages_each: int, device: str) -> DeviceState:
        """Initial state for `slots` responses, each of at most `pages_each` pages."""
        host_state = HostState(slots=slots, pages_each=pages_each, batch=1)
        return DeviceState.of(torch.from_numpy(host_state.data).to(device), host_state)


def section(buffer: Tensor, host_state: HostState, name: str, dtype: torch.dtype = torch.int32) -> Tensor:
    """A view of one section of the device's copy of the host state."""
    return buffer[host_state.offsets[name] : host_state.offsets[name] + host_state.sizes[name]].view(dtype)


@dataclass(frozen=True, kw_only=True, slots=True)
class Texts:
    """The texts from which tokens are drafted (texts.py)."""

    data: Tensor  # the whole array
    length: Tensor  # (rows,) int32: known tokens of every row
    families: Tensor  # (rows, FAMILY) int32: the rows of every family, padded with -1
    tokens: Tensor  # (rows, length of a row) int32
    runs: Tensor  # (RUNS + 1,) int32: how often a place was followed for 0, 1, 2, ... tokens; then the tokens drafted

    @staticmethod
    def new(rows: TextRows, device: torch.device) -> Texts:
        data = torch.zeros(rows.size, dtype=torch.int32, device=device)
        length, families, tokens = data.split([rows.rows, rows.rows * FAMILY, rows.rows * rows.length])
        return Texts(
            data=data,
            length=length,
            families=families.view(-1, FAMILY),
            tokens=tokens.view(-1, rows.length),
            runs=torch.zeros(RUNS + 1, dtype=torch.int32, device=device),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Spans:
    """A prefill: chunks of several responses concatenated, T rows in total. Attention handles them in tiles: some
    consecutive rows of one chunk."""

    ids: Tensor  # (T,) int32: the token of every row
    slot: Tensor  # (T,) int32: the slot of every row; rows that only pad the batch have the padding slot
    position: Tensor  # (T,) int32: the index of every row in its sequence
    tiles: Tensor  # (N, 4) int32: slot, first row, number of rows (0: an unused entry), position of the first row
    tile: int  # upper limit for the queries of a tile: rows times query heads of a kv head

    @staticmethod
    def of(buffer: Tensor, rows: int, tiles: int, tile: int) -> Spans:
        """Views of a buffer that holds what `splits.pack_spans` returns."""
        ids, slot, position, list_ = buffer[: spans_size(rows, tiles)].split([rows, rows, rows, 4 * tiles])
        return Spans(ids=ids, slot=slot, position=position, tiles=list_.view(-1, 4), tile=tile)


@dataclass(frozen=True, kw_only=True, slots=True)
class PrefixGroups:
    """Rows of a decode step that read a shared prefix together. Group n consists of rows `first[n]` to `first[n] +
    count[n] - 1`. Their page tables start with the same pages: `tokens[n]` tokens, all before the newest token of every
    row."""

    first: Tensor  # (G,) int32: first row of every group
    count: Tensor  # (G,) int32: number of rows; 0: an unused entry
    tokens: Tensor  # (G,) int32: length of the shared prefix in tokens, a multiple of the page size; 0: an unused entry
    shared_tokens: Tensor  # (B,) int32: tokens of the prefix that a row shares with its group; 0: it is in no group
    splits: int  # upper limit for the splits of a shared prefix
