"""What the GPU engine keeps on the device: the KV pool, and a row of figures for every response that runs.

A response has a slot from the step that lets it in until it ends. Everything that changes with every token is here and
is changed by the device itself, so that the host can ask for step after step without waiting for the tokens of any.
The one thing a step is given is `rows`: which slots take part.

Rules:
- the last slot is nobody's: rows that only fill up a batch name it. It is inactive, and stays so;
- a slot with `left` 0 is inactive: a row of it computes, but writes to the scratch page only and draws nothing;
- `table` is valid for all tokens up to `length`, and for as many more as steps were asked for.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

STOPS = 8
"""Stop tokens a response may have."""


class Pool:
    """Keys and values of all layers in one tensor (layers, 2, pages + 1, kv_heads, page_size, head). The last page is
    scratch. Kernels read its address from `base`, so that a captured graph goes on working when it was given up and
    taken anew elsewhere."""

    def __init__(
        self, *, layers: int, pages: int, page_size: int, kv_heads: int, head: int, dtype: torch.dtype, device: str
    ) -> None:
        self.shape = (layers, 2, pages + 1, kv_heads, page_size, head)
        self.page_size, self.scratch, self.dtype, self.device = page_size, pages, dtype, device
        self.base = torch.zeros(1, dtype=torch.int64, device=device)
        self.data: Tensor | None = None
        self.take()

    @property
    def nbytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize

    def take(self) -> None:
        """Have the memory, with nothing in it."""
        if self.data is None:
            self.data = torch.zeros(self.shape, dtype=self.dtype, device=self.device)
            self.base.fill_(self.data.data_ptr())

    def give_up(self) -> None:
        """The memory is free for others; what it held is lost."""
        if self.data is not None:
            self.data = None
            self.base.zero_()
            if self.device.startswith("cuda"):
                torch.cuda.empty_cache()


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceState:
    """One row per slot (S), the last of which is nobody's."""

    last: Tensor
    """(S,) int32: the newest token, whose keys and values are not in the pool yet."""
    length: Tensor
    """(S,) int32: tokens whose keys and values are in the pool; the place of `last` in the sequence."""
    left: Tensor
    """(S,) int32: tokens it may still make; 0: inactive."""
    position: Tensor
    """(S,) int32: index within the response of the next token to make."""
    seed: Tensor
    """(S,) int64: the request's seed, as 64 bits."""
    temperature: Tensor
    """(S,) float32; 0: the likeliest token."""
    top_k: Tensor
    """(S,) int32; 0: all."""
    top_p: Tensor
    """(S,) float32; 1: all."""
    stop: Tensor
    """(S, STOPS) int32: stop tokens, filled up with -1."""
    table: Tensor
    """(S, pages per response) int32: which pages hold it."""

    @staticmethod
    def new(slots: int, pages_each: int, device: str) -> DeviceState:
        """For `slots` responses, each of at most `pages_each` pages."""

        def full(value: float, dtype: torch.dtype, *more: int) -> Tensor:
            return torch.full((slots + 1, *more), value, dtype=dtype, device=device)

        i32 = torch.int32
        return DeviceState(
            last=full(0, i32), length=full(0, i32), left=full(0, i32), position=full(0, i32),
            seed=full(0, torch.int64), temperature=full(1.0, torch.float32), top_k=full(0, i32),
            top_p=full(1.0, torch.float32), stop=full(-1, i32, STOPS), table=full(0, i32, pages_each),
        )  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class Spans:
    """A prefill: chunks of several responses laid end to end, T rows in all. Chunk n is of slot `slot[n]`, its rows are
    `first[n]` to `first[n] + count[n] - 1` of the flat batch, and its first row is token `start[n]` of the sequence."""

    slot: Tensor
    """(N,) int32."""
    first: Tensor
    count: Tensor
    start: Tensor
    row_slot: Tensor
    """(T,) int32: the slot of every row."""
    row_position: Tensor
    """(T,) int32: its place in the sequence."""
    longest: int
    """The most rows of a chunk."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Families:
    """Rows of a decode step that read their first tokens together. Family n is rows `first[n]` to `first[n] + count[n]
    - 1`, whose tables begin with the same pages: `tokens[n]` tokens, before the newest token of every one of them."""

    first: Tensor
    """(F,) int32."""
    count: Tensor
    """(F,) int32; 0: there is none."""
    tokens: Tensor
    """(F,) int32: whole pages; 0: there is none."""
    shared: Tensor
    """(B,) int32: the tokens of every row that its family reads; 0: it has none."""
    parts: int
    """Into how many parts these are cut, at most."""
