# pyright: reportMissingImports=false, reportIndexIssue=false
"""Adapters of several policies in one batch: grouped matrix products that add to the output of a projection.

    group_rows      once per pass: which rows use which adapter
    shrink          h = scale * x @ A.T, for all parts of a joined projection
    expand_add      y += h @ B.T

A program handles some rows of one adapter (a tile). The inputs of `shrink` are divided into splits, because a batch has
few tiles; `expand_add` adds their results up, in a fixed order. The lists of rows and tiles are data: a captured graph
serves every mix of adapters.
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

SHRINK_BLOCK, EXPAND_BLOCK = 128, 128
"""Inputs, and outputs, that a program computes at once."""
SPLIT_INPUTS, MAX_SPLITS = 512, 16
"""Inputs of a split, unless that would be too many splits."""


@triton.jit(do_not_specialize=["rows", "width", "tiles"], do_not_specialize_on_alignment=["SLOTS", "ADAPTERS"])
def _group_rows(
    SLOTS, ADAPTERS, ORDER, TILES, rows, width, tiles,
    ROWS_P: tl.constexpr, TILES_P: tl.constexpr, TILE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program for each adapter. Its tiles begin at entry `first // TILE + adapter`: so the entries of all adapters
    are disjoint, and no program needs to know how many tiles others have."""
    if PDL:
        gdc_wait()
    adapter = tl.program_id(0)
    i = tl.arange(0, ROWS_P)
    slot = tl.load(SLOTS + i // width, mask=i < rows, other=0)
    number = tl.load(ADAPTERS + slot, mask=i < rows, other=-1)
    own = number == adapter
    first = tl.sum(((number >= 0) & (number < adapter)).to(tl.int32), 0)
    count = tl.sum(own.to(tl.int32), 0)
    tl.store(ORDER + first + tl.cumsum(own.to(tl.int32), 0) - 1, i, mask=own)
    begin = first // TILE + adapter
    end = (first + count) // TILE + adapter + 1
    end = tl.where(adapter == tl.num_programs(0) - 1, tiles, end)
    t = tl.arange(0, TILES_P)
    listed, before = (t >= begin) & (t < end), (t - begin) * TILE
    tl.store(TILES + t * 3, tl.zeros_like(t) + adapter, mask=listed)
    tl.store(TILES + t * 3 + 1, first + before, mask=listed)
    tl.store(TILES + t * 3 + 2, tl.minimum(tl.maximum(count - before, 0), TILE), mask=listed)


def group_rows(slots: Tensor, state: DeviceState, adapters: int, width: int = 1) -> RowGroups:
    """The rows of a pass by adapter, `width` rows for each of these slots. `adapters`: how many there are."""
    rows = len(slots) * width
    tile = rows_of_tile(rows)
    tiles = rows // tile + adapters
    order = torch.empty(rows, dtype=torch.int32, device=slots.device)
    table = torch.empty(tiles, 3, dtype=torch.int32, device=slots.device)
    _group_rows[(adapters,)](
        slots, state.adapter, order, table, rows, width, tiles, ROWS_P=triton.next_power_of_2(rows),
        TILES_P=triton.next_power_of_2(tiles), TILE=tile, num_warps=4 if rows <= 1024 else 8, **launch.options(),
    )  # fmt: skip
    return RowGroups(order=order, tiles=table, tile=tile)


@triton.jit(do_not_specialize=["rows"])
def _shrink(
    X, A, SCALE, TILES, ORDER, H, rows,
    SIZE: tl.constexpr, PARTS: tl.constexpr, RANK: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr,
    SPLITS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_wait()
    entry = TILES + tl.program_id(0) * 3
    count = tl.load(entry + 2)
    if count == 0:
        return
    adapter, first = tl.load(entry).to(tl.int64), tl.load(entry + 1)
    part, split = tl.program_id(1), tl.program_id(2)
    m, r, c = tl.arange(0, TILE), tl.arange(0, RANK), tl.arange(0, BLOCK)
    real = m < count
    row = tl.load(ORDER + first + m, mask=real, other=0).to(tl.int64)
    a_rows = A + ((adapter * PARTS + part) * RANK + r)[:, None] * SIZE
    acc = tl.zeros([TILE, RANK], tl.float32)
    for start in range(split * BLOCK, SIZE, SPLITS * BLOCK):
        col = start + c
        x = tl.load(X + row[:, None] * SIZE + col[None, :], mask=real[:, None] & (col < SIZE)[None, :], other=0.0)
        a = tl.load(a_rows + col[None, :], mask=(col < SIZE)[None, :], other=0.0)
        acc = tl.dot(x, tl.trans(a), acc, input_precision="ieee")
    at = (split * rows + row)[:, None] * (PARTS * RANK) + part * RANK + r[None, :]
    tl.store(H + at, acc * tl.load(SCALE + adapter), mask=real[:, None])


@triton.jit(do_not_specialize=["rows"])
def _expand_add(
    Y, H, B, TILES, ORDER, rows,
    SIZE_0: tl.constexpr, SIZE_1: tl.constexpr, SIZE_2: tl.constexpr, PARTS: tl.constexpr, RANK: tl.constexpr,
    TILE: tl.constexpr, BLOCK: tl.constexpr, SPLITS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A program computes some outputs of one part: those of part 0 come first."""
    if PDL:
        gdc_wait()
    entry = TILES + tl.program_id(0) * 3
    count = tl.load(entry + 2)
    if count == 0:
        return
    adapter, first = tl.load(entry).to(tl.int64), tl.load(entry + 1)
    BLOCKS_0: tl.constexpr = (SIZE_0 + BLOCK - 1) // BLOCK
    BLOCKS_1: tl.constexpr = (SIZE_1 + BLOCK - 1) // BLOCK
    OUT: tl.constexpr = SIZE_0 + SIZE_1 + SIZE_2
    block = tl.program_id(1)
    second, third = block >= BLOCKS_0, block >= BLOCKS_0 + BLOCKS_1
    part = second.to(tl.int32) + third.to(tl.int32)
    begin = tl.where(third, SIZE_0 + SIZE_1, tl.where(second, SIZE_0, 0))
    size = tl.where(third, SIZE_2, tl.where(second, SIZE_1, SIZE_0))
    block -= tl.where(third, BLOCKS_0 + BLOCKS_1, tl.where(second, BLOCKS_0, 0))
    m, r, c = tl.arange(0, TILE), tl.arange(0, RANK), tl.arange(0, BLOCK)
    real = m < count
    row = tl.load(ORDER + first + m, mask=real, other=0).to(tl.int64)
    h = tl.zeros([TILE, RANK], tl.float32)
    for split in range(SPLITS):
        at = (split * rows + row)[:, None] * (PARTS * RANK) + part * RANK + r[None, :]
        h += tl.load(H + at, mask=real[:, None], other=0.0)
    col = block * BLOCK + c
    out = begin + col
    b = tl.load(B + (adapter * OUT + out)[:, None] * RANK + r[None, :], mask=(col < size)[:, None], other=0.0)
    added = tl.dot(h.to(B.dtype.element_ty), tl.trans(b), input_precision="ieee")
    place, valid = Y + row[:, None] * OUT + out[None, :], real[:, None] & (col < size)[None, :]
    y = tl.load(place, mask=valid, other=0.0).to(tl.float32)
    tl.store(place, (y + added).to(Y.dtype.element_ty), mask=valid)


def add_adapters(y: Tensor, x: Tensor, adapters: ProjectionAdapters, groups: RowGroups) -> None:
    """Add to every row of `y` (rows, outputs) what its adapter makes of its row of `x` (rows, inputs)."""
    rows, size = x.shape
    parts, rank = len(adapters.outputs), adapters.rank
    splits = min(MAX_SPLITS, triton.cdiv(size, SPLIT_INPUTS))
    h = torch.empty(splits, rows, parts * rank, dtype=torch.float32, device=x.device)
    tiles = len(groups.tiles)
    _shrink[(tiles, parts, splits)](
        x, adapters.a, adapters.scale, groups.tiles, groups.order, h, rows, SIZE=size, PARTS=parts, RANK=rank,
        TILE=groups.tile, BLOCK=SHRINK_BLOCK, SPLITS=splits, num_warps=4, num_stages=3, **launch.options(),
    )  # fmt: skip
    sizes = (*adapters.outputs, 0, 0)[:3]
    blocks = sum(triton.cdiv(n, EXPAND_BLOCK) for n in sizes)
    _expand_add[(tiles, blocks)](
        y, h, adapters.b, groups.tiles, groups.order, rows, SIZE_0=sizes[0], SIZE_1=sizes[1], SIZE_2=sizes[2],
        PARTS=parts, RANK=rank, TILE=groups.tile, BLOCK=EXPAND_BLOCK, SPLITS=splits, num_warps=4, **launch.options(),
    )  # fmt: skip
