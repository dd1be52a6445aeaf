# pyright: reportMissingImports=false, reportIndexIssue=false
"""Attention of families of rows over the pages they share: read once, for the queries of all of them.

A program takes one part of what a family shares, for one kv head. A row of its tile is one (row of the step, query
head); a row of the step alone would fill little of it. It leaves a part for every (row, kv head). The rows' own
programs, launched after it, add these to theirs: always in one order, and nobody counts who has finished.

Rules:
- pages are found in the table of the family's first row, active or not: the host has seen that all have the same;
- of no other row is anything written, and of these nothing but parts.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_wait

from windfall.engine.cuda.kernels import launch
from windfall.engine.cuda.kernels.parts import absorb, extent, tiling, turned
from windfall.engine.cuda.splits import TILE, part_tokens
from windfall.engine.cuda.state import DeviceState, Families, Pool

WHOLE = 128
"""Shared parts have a multiple of so many tokens, whatever the blocks used here: the rows' programs count them, too."""
_INTEGERS = ["layer", "shares", "least", "table_stride"]
_ANYWHERE = ["FIRST", "COUNT", "TOKENS", "ROWS", "POSITIONS", "TABLE", "BASE"]


@triton.jit(do_not_specialize=_INTEGERS, do_not_specialize_on_alignment=_ANYWHERE)
def _share(
    Q, PARTS, FIRST, COUNT, TOKENS, ROWS, POSITIONS, TABLE, BASE, COS, SIN, QW, layer, half, table_stride, scale,
    shares, least, eps,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, TILE_P: tl.constexpr, HEAD: tl.constexpr, HEAD_P: tl.constexpr,
    PAGE: tl.constexpr, BLOCK: tl.constexpr, WHOLE_P: tl.constexpr, FUSED: tl.constexpr, NORM: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    if EARLY:
        gdc_wait()
    family, kv, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    begin, count, tokens = tl.load(FIRST + family).to(tl.int64), tl.load(COUNT + family), tl.load(TOKENS + family)
    pool = tl.multiple_of(tl.load(BASE).to(tl.pointer_type(Q.dtype.element_ty)), 16)
    parts, first, last = extent(0, tokens, part, shares, least, WHOLE_P, True)
    if part >= parts:  # also where there is no family: no tokens have no parts
        return
    table = TABLE + tl.load(ROWS + begin).to(tl.int64) * table_stride
    m, d, n = tl.arange(0, TILE_P), tl.arange(0, HEAD_P), tl.arange(0, BLOCK)
    member, head = m // GROUP, m % GROUP
    real = member < count
    row = begin + member
    here = real[:, None] & (d < HEAD)[None, :]
    if FUSED:
        at = (row * ((GROUP + 2) * KV_HEADS) + kv * GROUP + head)[:, None] * HEAD + d[None, :]
        position = tl.load(POSITIONS + row, mask=real, other=0)[:, None]
        q = turned(Q, QW, COS, SIN, at, d, here, position, eps, HEAD, HEAD_P, NORM)
    else:
        at = ((row * KV_HEADS + kv) * GROUP + head)[:, None] * HEAD + d[None, :]
        q = tl.load(Q + at, mask=here, other=0.0)

    page = tl.load(table + (first + n) // PAGE, mask=first + n < last, other=0)
    keys = pool + layer.to(tl.int64) * 2 * half + kv * (PAGE * HEAD)
    top = tl.full([TILE_P], -1e30, tl.float32)
    total = tl.zeros([TILE_P], tl.float32)
    acc = tl.zeros([TILE_P, HEAD_P], tl.float32)
    for start in range(first, last, BLOCK):
        t = start + n
        ok = t < last
        where = (page.to(tl.int64) * (KV_HEADS * PAGE * HEAD) + (t % PAGE) * HEAD)[:, None] + d[None, :]
        page = tl.load(table + (t + BLOCK) // PAGE, mask=t + BLOCK < last, other=0)  # for the next time round
        wanted = ok[:, None] & (d < HEAD)[None, :]
        k = tl.load(keys + where, mask=wanted, other=0.0)
        v = tl.load(keys + half + where, mask=wanted, other=0.0)
        acc, top, total = absorb(q, k, v, ok[None, :], acc, top, total, scale)

    own = ((row * KV_HEADS + kv) * shares + part) * (GROUP * (HEAD + 2))
    tl.store(PARTS + (own + head * HEAD)[:, None] + d[None, :], acc, mask=here)
    tl.store(PARTS + own + GROUP * HEAD + head, top, mask=real)
    tl.store(PARTS + own + GROUP * (HEAD + 1) + head, total, mask=real)


def least_of(families: Families, kv_heads: int) -> int:
    """The fewest tokens of a shared part."""
    return part_tokens(families.first.numel() * kv_heads)


def share(
    q: Tensor, heads: int, rows: Tensor, state: DeviceState, pool: Pool, layer: int, scale: float, families: Families,
    positions: Tensor, cos: Tensor, sin: Tensor, weight: Tensor | None, eps: float, fused: bool,
) -> Tensor:  # fmt: skip
    """Parts of (row, kv head): `families.parts` of each, as many written as there are. `fused`: `q` is the row of all
    projections, and queries are normed and turned here. The scale is one of exp2."""
    kv_heads, head = pool.shape[3], pool.shape[5]
    group, count = heads // kv_heads, families.first.numel()
    parts = torch.empty(len(rows) * heads * families.parts * (head + 2), dtype=torch.float32, device=q.device)
    block, warps, stages = tiling(count * kv_heads * families.parts, q.dtype.itemsize, triton.next_power_of_2(head))
    _share[(count, kv_heads, families.parts)](
        q, parts, families.first, families.count, families.tokens, rows, positions, state.table, pool.base, cos, sin,
        cos if weight is None else weight, layer, pool.shape[2] * kv_heads * pool.page_size * head,
        state.table.stride(0), scale, families.parts, least_of(families, kv_heads), eps,
        KV_HEADS=kv_heads, GROUP=group, TILE_P=TILE, HEAD=head, HEAD_P=triton.next_power_of_2(head),
        PAGE=pool.page_size, BLOCK=block, WHOLE_P=WHOLE, FUSED=fused, NORM=weight is not None, num_warps=warps,
        num_stages=stages, **launch.options(),
    )  # fmt: skip
    return parts
