# pyright: reportMissingImports=false, reportIndexIssue=false
"""Attention of prefix groups over their shared prefix: its pages are read once for the queries of all rows.

A prefix group is a set of rows whose sequences start with the same pages. A program handles one split of the shared
prefix of one group, for one kv head. A row of its tile is one (row of the step, query head) pair; a single row of the
step would fill little of the tile. The program stores a partial result for every (row, kv head). The rows' own
programs, launched later, merge these in a fixed order, so no counters of finished programs are needed.

Rules:
- pages are looked up in the page table of the group's first row, active or not: the host has checked that all rows of
  the group have the same pages;
- only partial results of the group's own rows are written.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_wait

from windfall.engine.cuda.kernels import launch
from windfall.engine.cuda.kernels.attention_common import attend_block, norm_and_rotate, split_range, tiling
from windfall.engine.cuda.splits import TILE, min_split_tokens
from windfall.engine.cuda.state import DeviceState, KVPool, PrefixGroups

PREFIX_SPLIT_STEP = 128  # tokens; shared splits are multiples of it whatever the block size, so each row can count them
_UNSPECIALIZED = ["layer", "prefix_splits", "min_tokens", "table_stride"]
_UNALIGNED = ["FIRST", "COUNT", "TOKENS", "ROWS", "POSITIONS", "TABLE", "BASE"]


@triton.jit(do_not_specialize=_UNSPECIALIZED, do_not_specialize_on_alignment=_UNALIGNED)
def _attend_shared_prefix(
    Q, PARTIALS, FIRST, COUNT, TOKENS, ROWS, POSITIONS, TABLE, BASE, COS, SIN, QW, layer, half, table_stride, scale,
    prefix_splits, min_tokens, eps,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, TILE_P: tl.constexpr, HEAD: tl.constexpr, HEAD_P: tl.constexpr,
    PAGE: tl.constexpr, PAGE_STRIDE: tl.constexpr, BLOCK: tl.constexpr, SPLIT_STEP: tl.constexpr,
    FUSED: tl.constexpr, NORM: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_wait()
    group_index, kv, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    begin, count, tokens = (
        tl.load(FIRST + group_index).to(tl.int64), tl.load(COUNT + group_index), tl.load(TOKENS + group_index)
    )  # fmt: skip
    pool = tl.multiple_of(tl.load(BASE).to(tl.pointer_type(Q.dtype.element_ty)), 16)
    split_count, first, last = split_range(0, tokens, split, prefix_splits, min_tokens, SPLIT_STEP, True)
    if split >= split_count:  # also true where there is no group: zero tokens have zero splits
        return
    table = TABLE + tl.load(ROWS + begin).to(tl.int64) * table_stride
    m, d, n = tl.arange(0, TILE_P), tl.arange(0, HEAD_P), tl.arange(0, BLOCK)
    member, head = m // GROUP, m % GROUP
    real = member < count
    row = begin + member
    valid = real[:, None] & (d < HEAD)[None, :]
    if FUSED:
        at = (row * ((GROUP + 2) * KV_HEADS) + kv * GROUP + head)[:, None] * HEAD + d[None, :]
        position = tl.load(POSITIONS + row, mask=real, other=0)[:, None]
        q = norm_and_rotate(Q, QW, COS, SIN, at, d, valid, position, eps, HEAD, HEAD_P, NORM)
    else:
        at = ((row * KV_HEADS + kv) * GROUP + head)[:, None] * HEAD + d[None, :]
        q = tl.load(Q + at, mask=valid, other=0.0)

    page = tl.load(table + (first + n) // PAGE, mask=first + n < last, other=0)
    keys = pool + layer.to(tl.int64) * 2 * half + kv * (PAGE * HEAD)
    top = tl.full([TILE_P], -1e30, tl.float32)
    total = tl.zeros([TILE_P], tl.float32)
    acc = tl.zeros([TILE_P, HEAD_P], tl.float32)
    for start in range(first, last, BLOCK):
        t = start + n
        ok = t < last
        where = (page.to(tl.int64) * PAGE_STRIDE + (t % PAGE) * HEAD)[:, None] + d[None, :]
        page = tl.load(table + (t + BLOCK) // PAGE, mask=t + BLOCK < last, other=0)  # for the next iteration
        wanted = ok[:, None] & (d < HEAD)[None, :]
        k = tl.load(keys + where, mask=wanted, other=0.0)
        v = tl.load(keys + half + where, mask=wanted, other=0.0)
        acc, top, total = attend_block(q, k, v, ok[None, :], acc, top, total, scale)

    own = ((row * KV_HEADS + kv) * prefix_splits + split) * (GROUP * (HEAD + 2))
    tl.store(PARTIALS + (own + head * HEAD)[:, None] + d[None, :], acc, mask=valid)
    tl.store(PARTIALS + own + GROUP * HEAD + head, top, mask=real)
    tl.store(PARTIALS + own + GROUP * (HEAD + 1) + head, total, mask=real)


def min_prefix_split(prefix_groups: PrefixGroups, kv_heads: int) -> int:
    """Minimum number of tokens of a shared split."""
    return min_split_tokens(prefix_groups.first.numel() * kv_heads)


def attend_shared_prefix(
    q: Tensor, heads: int, rows: Tensor, state: DeviceState, pool: KVPool, layer: int, scale: float,
    prefix_groups: PrefixGroups, positions: Tensor, cos: Tensor, sin: Tensor, weight: Tensor | None, eps: float,
    fused: bool,
) -> Tensor:  # fmt: skip
    """Partial results of every (row, kv head): room for `prefix_groups.splits` of each; those of actual splits are set.
    `fused`: `q` holds all projections of a row, and queries are normalized and rotated here. `scale` is for exp2."""
    kv_heads, head = pool.kv_heads, pool.head
    group, count = heads // kv_heads, prefix_groups.first.numel()
    splits = prefix_groups.splits
    partials = torch.empty(len(rows) * heads * splits * (head + 2), dtype=torch.float32, device=q.device)
    block, warps, stages = tiling(count * kv_heads * splits, q.dtype.itemsize, triton.next_power_of_2(head))
    _attend_shared_prefix[(count, kv_heads, splits)](
        q, partials, prefix_groups.first, prefix_groups.count, prefix_groups.tokens, rows, positions, state.table,
        pool.base, cos, sin, cos if weight is None else weight, layer, pool.value_offset,
        state.table.stride(0), scale, splits, min_prefix_split(prefix_groups, kv_heads), eps,
        KV_HEADS=kv_heads, GROUP=group, TILE_P=TILE, HEAD=head, HEAD_P=triton.next_power_of_2(head),
        PAGE=pool.page_size, PAGE_STRIDE=pool.page_stride, BLOCK=block, SPLIT_STEP=PREFIX_SPLIT_STEP, FUSED=fused,
        NORM=weight is not None,
        num_warps=warps, num_stages=stages, **launch.options(),
    )  # fmt: skip
    return partials
