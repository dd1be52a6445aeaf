# pyright: reportMissingImports=false, reportIndexIssue=false
"""Adapters of several policies in one batch: grouped matrix products that add to the output of a projection.

    group_rows              once per pass: which rows use which adapter
    add_adapters            y + (scale * h) @ B.T, where y and h are the product with the weight (cuda/adapters.py)
    add_adapters_in_place   the same for the logits
    add_adapters_swiglu     the same for gate and up, and then silu(gate) * up: no launch more than without adapters

A program handles some rows of one adapter (a tile). The lists of rows and tiles are data: a captured graph serves every
mix of adapters. Values are rounded to the model's dtype where the layers round them.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_wait

from windfall.engine.cuda.adapters import ProjectionAdapters, RowGroups, rows_of_tile
from windfall.engine.cuda.kernels import launch
from windfall.engine.cuda.state import DeviceState

BLOCK = 128
"""Outputs that a program computes."""


@triton.jit(do_not_specialize=["rows", "width", "tiles"], do_not_specialize_on_alignment=["SLOTS", "ADAPTERS"])
def _group_rows(
    SLOTS, ADAPTERS, ORDER, TILES, rows, width, tiles,
    ROWS_P: tl.constexpr, TILES_P: tl.constexpr, TILE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program for each adapter, and the last one for the rows without. The tiles of an adapter begin at entry
    `first // TILE + adapter`: so entries are disjoint, and no program needs to know how many tiles others have."""
    if PDL:
        gdc_wait()
    adapter, last = tl.program_id(0), tl.num_programs(0) - 1
    i = tl.arange(0, ROWS_P)
    slot = tl.load(SLOTS + i // width, mask=i < rows, other=0)
    number = tl.load(ADAPTERS + slot, mask=i < rows, other=0)
    number = tl.where(i < rows, tl.where(number < 0, last, number), last + 1)
    own = number == adapter
    first = tl.sum((number < adapter).to(tl.int32), 0)
    count = tl.sum(own.to(tl.int32), 0)
    tl.store(ORDER + first + tl.cumsum(own.to(tl.int32), 0) - 1, i, mask=own)
    begin = first // TILE + adapter
    end = tl.where(adapter == last, tiles, (first + count) // TILE + adapter + 1)
    t = tl.arange(0, TILES_P)
    listed, before = (t >= begin) & (t < end), (t - begin) * TILE
    tl.store(TILES + t * 3, tl.zeros_like(t) + adapter, mask=listed)
    tl.store(TILES + t * 3 + 1, first + before, mask=listed)
    tl.store(TILES + t * 3 + 2, tl.minimum(tl.maximum(count - before, 0), TILE), mask=listed)


def group_rows(slots: Tensor, state: DeviceState, adapters: int, width: int = 1) -> RowGroups:
    """The rows of a pass by adapter, `width` rows for each of these slots. `adapters`: how many there are."""
    rows = len(slots) * width
    tile = rows_of_tile(rows)
    tiles = rows // tile + adapters + 1
    order = torch.empty(rows, dtype=torch.int32, device=slots.device)
    table = torch.empty(tiles, 3, dtype=torch.int32, device=slots.device)
    _group_rows[(adapters + 1,)](
        slots, state.adapter, order, table, rows, width, tiles, ROWS_P=triton.next_power_of_2(rows),
        TILES_P=triton.next_power_of_2(tiles), TILE=tile, num_warps=4 if rows <= 1024 else 8, **launch.options(),
    )  # fmt: skip
    return RowGroups(order=order, tiles=table, tile=tile)


@triton.jit
def _added(
    Y, B, SCALE, row, real, adapter, part, out, valid,
    OUT: tl.constexpr, WIDE: tl.constexpr, ADAPTERS: tl.constexpr, PARTS: tl.constexpr, RANK: tl.constexpr,
):  # fmt: skip
    """Some outputs of some rows with the same adapter, rounded."""
    r = tl.arange(0, RANK)
    at = row[:, None] * WIDE
    y = tl.load(Y + at + out[None, :], mask=real[:, None] & valid[None, :], other=0.0).to(tl.float32)
    if adapter < ADAPTERS:
        h = tl.load(Y + at + (OUT + (adapter * PARTS + part) * RANK + r)[None, :], mask=real[:, None], other=0.0)
        h = (h.to(tl.float32) * tl.load(SCALE + adapter)).to(Y.dtype.element_ty)
        b = tl.load(B + (adapter * OUT + out)[:, None] * RANK + r[None, :], mask=valid[:, None], other=0.0)
        y = tl.dot(h, tl.trans(b), y, input_precision="ieee")
    return y.to(Y.dtype.element_ty).to(tl.float32)


@triton.jit
def _add_adapters(
    Y, B, SCALE, TILES, ORDER, TO,
    SIZE_0: tl.constexpr, SIZE_1: tl.constexpr, SIZE_2: tl.constexpr, ADAPTERS: tl.constexpr, PARTS: tl.constexpr,
    RANK: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr, IN_PLACE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A program computes some outputs of one part: those of part 0 come first. IN_PLACE: TO is Y."""
    if PDL:
        gdc_wait()
    entry = TILES + tl.program_id(1) * 3
    count = tl.load(entry + 2)
    if count == 0:
        return
    adapter, first = tl.load(entry).to(tl.int64), tl.load(entry + 1)
    if IN_PLACE:  # noqa: SIM102  # known when this is compiled
        if tl.load(SCALE + adapter, mask=adapter < ADAPTERS, other=0.0) == 0.0:
            return
    BLOCKS_0: tl.constexpr = (SIZE_0 + BLOCK - 1) // BLOCK
    BLOCKS_1: tl.constexpr = (SIZE_1 + BLOCK - 1) // BLOCK
    OUT: tl.constexpr = SIZE_0 + SIZE_1 + SIZE_2
    block = tl.program_id(0)
    second, third = block >= BLOCKS_0, block >= BLOCKS_0 + BLOCKS_1
    part = second.to(tl.int32) + third.to(tl.int32)
    begin = tl.where(third, SIZE_0 + SIZE_1, tl.where(second, SIZE_0, 0))
    end = tl.where(third, OUT, tl.where(second, SIZE_0 + SIZE_1, SIZE_0))
    block -= tl.where(third, BLOCKS_0 + BLOCKS_1, tl.where(second, BLOCKS_0, 0))
    m = tl.arange(0, TILE)
    real = m < count
    row = tl.load(ORDER + first + m, mask=real, other=0).to(tl.int64)
    out = begin + block * BLOCK + tl.arange(0, BLOCK)
    valid = out < end
    WIDE: tl.constexpr = OUT + ADAPTERS * PARTS * RANK
    y = _added(Y, B, SCALE, row, real, adapter, part, out, valid, OUT, WIDE, ADAPTERS, PARTS, RANK)
    to = TO + row[:, None] * (WIDE if IN_PLACE else OUT) + out[None, :]
    tl.store(to, y.to(TO.dtype.element_ty), mask=real[:, None] & valid[None, :])


def add_adapters(y: Tensor, adapters: ProjectionAdapters, groups: RowGroups) -> Tensor:
    """The outputs of a projection (rows, outputs). `y`: the product with `adapters.weight`."""
    return _launch(y, torch.empty(len(y), sum(adapters.outputs), dtype=y.dtype, device=y.device), adapters, groups)


def add_adapters_in_place(y: Tensor, adapters: ProjectionAdapters, groups: RowGroups) -> Tensor:
    """As `add_adapters`, but returns a part of `y`. Rows without an adapter, and with one of scale 0, are not read."""
    _launch(y, y, adapters, groups)
    return y[:, : sum(adapters.outputs)]


def _launch(y: Tensor, to: Tensor, adapters: ProjectionAdapters, groups: RowGroups) -> Tensor:
    sizes = (*adapters.outputs, 0, 0)[:3]
    _add_adapters[(sum(triton.cdiv(n, BLOCK) for n in sizes), len(groups.tiles))](
        y, adapters.b, adapters.scale, groups.tiles, groups.order, to, SIZE_0=sizes[0], SIZE_1=sizes[1],
        SIZE_2=sizes[2], ADAPTERS=len(adapters.b), PARTS=len(adapters.outputs), RANK=adapters.rank, TILE=groups.tile,
        BLOCK=BLOCK, IN_PLACE=to is y, num_warps=4, **launch.options(),
    )  # fmt: skip
    return to


@triton.jit
def _add_adapters_swiglu(
    Y, B, SCALE, TILES, ORDER, TO,
    SIZE: tl.constexpr, ADAPTERS: tl.constexpr, RANK: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_wait()
    entry = TILES + tl.program_id(1) * 3
    count = tl.load(entry + 2)
    if count == 0:
        return
    adapter, first = tl.load(entry).to(tl.int64), tl.load(entry + 1)
    m = tl.arange(0, TILE)
    real = m < count
    row = tl.load(ORDER + first + m, mask=real, other=0).to(tl.int64)
    out = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    valid = out < SIZE
    OUT: tl.constexpr = 2 * SIZE
    WIDE: tl.constexpr = OUT + ADAPTERS * 2 * RANK
    gate = _added(Y, B, SCALE, row, real, adapter, 0, out, valid, OUT, WIDE, ADAPTERS, 2, RANK)
    up = _added(Y, B, SCALE, row, real, adapter, 1, SIZE + out, valid, OUT, WIDE, ADAPTERS, 2, RANK)
    silu = (gate / (1.0 + tl.exp(-gate))).to(TO.dtype.element_ty).to(tl.float32)
    to = TO + row[:, None] * SIZE + out[None, :]
    tl.store(to, (silu * up).to(TO.dtype.element_ty), mask=real[:, None] & valid[None, :])


def add_adapters_swiglu(y: Tensor, adapters: ProjectionAdapters, groups: RowGroups) -> Tensor:
    """As `swiglu` after `add_adapters`."""
    size = adapters.outputs[0]
    to = torch.empty(len(y), size, dtype=y.dtype, device=y.device)
    _add_adapters_swiglu[(triton.cdiv(size, BLOCK), len(groups.tiles))](
        y, adapters.b, adapters.scale, groups.tiles, groups.order, to, SIZE=size, ADAPTERS=len(adapters.b),
        RANK=adapters.rank, TILE=groups.tile, BLOCK=BLOCK, num_warps=4, **launch.options(),
    )  # fmt: skip
    return to
