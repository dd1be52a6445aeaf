# pyright: reportMissingImports=false, reportIndexIssue=false
"""Attention of a decode step: the newest token of a response, and the tokens drafted after it, over the pages of its
sequence.

A program handles one split of the context of one (response, kv head), for all query heads that share that kv head and
for all `width` rows of the response: its queries are the (row, query head) pairs, and the context is read once for all.
Responses are the first grid dimension: siblings are next to each other, so the pages they share are read from the L2.
Where a context has several splits, the program that finishes last combines them: there is no second launch.

A prefix group is a set of responses whose sequences start with the same pages. An earlier launch reads these once for
the queries of all: a program handles one split of the shared prefix of one group, for one kv head. A row of its tile is
one query; those of a single response would fill little of the tile. It stores a partial result for every (response, kv
head), which the first split of each response merges into its own, in a fixed order.

Rules:
- `_finished` is zero between launches: the program that combines the splits resets its counter;
- for an inactive row, only its output is written, as zeros;
- the pages of a shared prefix are looked up in the page table of the group's first row, active or not: the host has
  checked that all rows of the group have the same pages. Only partial results of the group's own rows are written.
"""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_wait

from windfall.engine.cuda.kernels import launch
from windfall.engine.cuda.kernels.attention_common import (
    attend_block,
    load_partial,
    merge_partials,
    norm_and_rotate,
    split_range,
    store_and_combine,
    store_kv,
    sum_partials,
    tiling,
)
from windfall.engine.cuda.kernels.layers import rope_and_store
from windfall.engine.cuda.splits import TILE, min_split_tokens
from windfall.engine.cuda.state import DeviceState, KVPool, PrefixGroups

_LOG2E = 1.4426950408889634
_MAX_PAIRS = 1 << 17  # upper limit for the (row, kv head) pairs of a step
_MAX_FUSED_PAIRS = 1024  # up to this many pairs, one fused launch is faster than `rope_and_store` + `decode_attention`
_finished: WeakKeyDictionary[KVPool, Tensor] = WeakKeyDictionary()
_UNSPECIALIZED = ["layer", "window", "splits", "min_tokens", "prefix_splits", "prefix_min_tokens", "table_stride"]
_UNALIGNED = ["FINISHED", "SHARED_TOKENS", "ROWS", "POSITIONS", "LENGTH", "LEFT", "TABLE", "BASE"]
PREFIX_SPLIT_STEP = 128  # tokens; shared splits are multiples of it whatever the block size, so each row can count them
_PREFIX_UNSPECIALIZED = ["layer", "prefix_splits", "min_tokens", "table_stride"]
_PREFIX_UNALIGNED = ["FIRST", "COUNT", "TOKENS", "ROWS", "POSITIONS", "TABLE", "BASE"]


@triton.jit(do_not_specialize=_PREFIX_UNSPECIALIZED, do_not_specialize_on_alignment=_PREFIX_UNALIGNED)
def _attend_shared_prefix(
    Q, PARTIALS, FIRST, COUNT, TOKENS, ROWS, POSITIONS, TABLE, BASE, COS, SIN, QW, layer, half, table_stride, scale,
    prefix_splits, min_tokens, eps,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, QUERIES: tl.constexpr, TILE_P: tl.constexpr, HEAD: tl.constexpr,
    HEAD_P: tl.constexpr, PAGE: tl.constexpr, PAGE_STRIDE: tl.constexpr, BLOCK: tl.constexpr,
    SPLIT_STEP: tl.constexpr, FUSED: tl.constexpr, NORM: tl.constexpr, KV: tl.constexpr, COMPUTE: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_wait()
    group_index, kv, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    begin, count, tokens = (
        tl.load(FIRST + group_index).to(tl.int64), tl.load(COUNT + group_index), tl.load(TOKENS + group_index)
    )  # fmt: skip
    pool = tl.multiple_of(tl.load(BASE).to(tl.pointer_type(KV)), 16)
    split_count, first, last = split_range(0, tokens, split, prefix_splits, min_tokens, SPLIT_STEP, True)
    if split >= split_count:  # also true where there is no group: zero tokens have zero splits
        return
    table = TABLE + tl.load(ROWS + begin).to(tl.int64) * table_stride
    m, d, n = tl.arange(0, TILE_P), tl.arange(0, HEAD_P), tl.arange(0, BLOCK)
    member, query = m // QUERIES, m % QUERIES
    real = member < count
    row = begin + member
    valid = real[:, None] & (d < HEAD)[None, :]
    if FUSED:
        at = (row * ((GROUP + 2) * KV_HEADS) + kv * GROUP + query)[:, None] * HEAD + d[None, :]
        position = tl.load(POSITIONS + row, mask=real, other=0)[:, None]
        q = norm_and_rotate(Q, QW, COS, SIN, at, d, valid, position, eps, HEAD, HEAD_P, NORM)
    else:
        at = (row * (QUERIES // GROUP) + query // GROUP) * (KV_HEADS * GROUP) + kv * GROUP + query % GROUP
        q = tl.load(Q + at[:, None] * HEAD + d[None, :], mask=valid, other=0.0)
    q = q.to(COMPUTE)

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
        k = tl.load(keys + where, mask=wanted, other=0.0).to(COMPUTE)
        v = tl.load(keys + half + where, mask=wanted, other=0.0).to(COMPUTE)
        acc, top, total = attend_block(q, k, v, ok[None, :], acc, top, total, scale)

    own = ((row * KV_HEADS + kv) * prefix_splits + split) * (QUERIES * (HEAD + 2))
    tl.store(PARTIALS + (own + query * HEAD)[:, None] + d[None, :], acc, mask=valid)
    tl.store(PARTIALS + own + QUERIES * HEAD + query, top, mask=real)
    tl.store(PARTIALS + own + QUERIES * (HEAD + 1) + query, total, mask=real)


def min_prefix_split(prefix_groups: PrefixGroups, kv_heads: int) -> int:
    """Minimum number of tokens of a shared split."""
    return min_split_tokens(prefix_groups.first.numel() * kv_heads)


def attend_shared_prefix(
    q: Tensor, heads: int, rows: Tensor, state: DeviceState, pool: KVPool, layer: int, scale: float,
    prefix_groups: PrefixGroups, positions: Tensor, cos: Tensor, sin: Tensor, weight: Tensor | None, eps: float,
    fused: bool, width: int,
) -> Tensor:  # fmt: skip
    """Partial results of every (response, kv head): room for `prefix_groups.splits` of each; those of actual splits are
    set. `fused`: `q` holds all projections of a row, and queries are normalized and rotated here. `scale` is for
    exp2."""
    kv_heads, head = pool.kv_heads, pool.head
    group, count = heads // kv_heads, prefix_groups.first.numel()
    splits = prefix_groups.splits
    partials = torch.empty(len(rows) * heads * width * splits * (head + 2), dtype=torch.float32, device=q.device)
    tile = TILE * triton.next_power_of_2(width)
    block, warps, stages = tiling(count * kv_heads * splits, pool.dtype.itemsize, triton.next_power_of_2(head), tile)
    _attend_shared_prefix[(count, kv_heads, splits)](
        q, partials, prefix_groups.first, prefix_groups.count, prefix_groups.tokens, rows, positions, state.table,
        pool.base, cos, sin, cos if weight is None else weight, layer, pool.value_offset,
        state.table.stride(0), scale, splits, min_prefix_split(prefix_groups, kv_heads), eps,
        KV_HEADS=kv_heads, GROUP=group, QUERIES=group * width, TILE_P=tile, HEAD=head,
        HEAD_P=triton.next_power_of_2(head), PAGE=pool.page_size, PAGE_STRIDE=pool.page_stride, BLOCK=block,
        SPLIT_STEP=PREFIX_SPLIT_STEP, FUSED=fused, NORM=weight is not None, **launch.kv_types(q.dtype, pool.dtype),
        num_warps=warps, num_stages=stages, **launch.options(),
    )  # fmt: skip
    return partials


@triton.jit(do_not_specialize=_UNSPECIALIZED, do_not_specialize_on_alignment=_UNALIGNED)
def _decode_attention(
    Q, OUT, PARTIALS, FINISHED, ROWS, POSITIONS, LENGTH, LEFT, TABLE, BASE, COS, SIN, QW, KW, SHARED_TOKENS,
    PREFIX_PARTIALS, layer, half, table_stride, window, scale, splits, min_tokens, prefix_splits, prefix_min_tokens,
    eps,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, WIDTH: tl.constexpr, QUERIES: tl.constexpr, QUERIES_P: tl.constexpr,
    HEAD: tl.constexpr, HEAD_P: tl.constexpr, PAGE: tl.constexpr, PAGE_STRIDE: tl.constexpr, BLOCK: tl.constexpr,
    WINDOWED: tl.constexpr, SPLIT_KV: tl.constexpr, FUSED: tl.constexpr, NORM: tl.constexpr,
    PREFIX_GROUPS: tl.constexpr, SPLIT_STEP: tl.constexpr, KV: tl.constexpr, COMPUTE: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """`PREFIX_GROUPS` is 0 without prefix groups, 1 if a shared prefix is one split, and 2 if it may be several. Query
    w * GROUP + h is that of row w of the response and of its query head h."""
    if PDL:
        gdc_wait()
    row, kv, split = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    slot = tl.load(ROWS + row)
    # Loads that depend on nothing, or on the slot alone, are issued together: one wait instead of three.
    pool = tl.multiple_of(tl.load(BASE).to(tl.pointer_type(KV)), 16)
    end = (tl.load(POSITIONS + row) if FUSED else tl.load(LENGTH + slot)) + 1
    active = tl.load(LEFT + slot) > 0
    table = TABLE + slot.to(tl.int64) * table_stride
    g, d, n = tl.arange(0, QUERIES_P), tl.arange(0, HEAD_P), tl.arange(0, BLOCK)
    valid = (g < QUERIES)[:, None] & (d < HEAD)[None, :]
    inner = g[:, None] * HEAD + d[None, :]
    if WIDTH == 1:
        at = (row * KV_HEADS + kv) * (GROUP * HEAD) + inner
    else:
        at = (row * WIDTH + g // GROUP) * (KV_HEADS * GROUP) + kv * GROUP + g % GROUP
        at = at[:, None] * HEAD + d[None, :]
    if FUSED:
        q = norm_and_rotate(Q + (row * (GROUP + 2) * KV_HEADS + kv * GROUP) * HEAD, QW, COS, SIN, inner, d, valid,
                            end - 1, eps, HEAD, HEAD_P, NORM)  # fmt: skip
    else:
        q = tl.load(Q + at, mask=valid, other=0.0)
    q = q.to(COMPUTE)

    lowest = tl.maximum(end - window, 0) if WINDOWED else 0
    begin = tl.load(SHARED_TOKENS + row) if PREFIX_GROUPS else lowest // BLOCK * BLOCK
    split_count, first, last = split_range(
        begin, tl.minimum(end + WIDTH - 1, table_stride * PAGE), split, splits, min_tokens, BLOCK, SPLIT_KV
    )
    page = tl.load(table + (first + n) // PAGE, mask=(first + n) // PAGE < table_stride, other=0)
    if not active:
        if split == 0:
            tl.store(OUT + at, tl.zeros([QUERIES_P, HEAD_P], OUT.dtype.element_ty), mask=valid)
        return
    if split >= split_count:
        return

    keys = pool + layer.to(tl.int64) * 2 * half + kv * (PAGE * HEAD)
    if FUSED and split == split_count - 1:
        new = Q + (row * (GROUP + 2) + GROUP) * (KV_HEADS * HEAD) + kv * HEAD
        to = keys + tl.load(table + (end - 1) // PAGE).to(tl.int64) * PAGE_STRIDE
        store_kv(
            new, KV_HEADS * HEAD, to + (end - 1) % PAGE * HEAD, half, KW, COS, SIN, end - 1, eps, HEAD, HEAD_P, NORM
        )
        tl.debug_barrier()  # other threads of this program read it below
    m = tl.full([QUERIES_P], -1e30, tl.float32)
    total = tl.zeros([QUERIES_P], tl.float32)
    acc = tl.zeros([QUERIES_P, HEAD_P], tl.float32)
    if PREFIX_GROUPS:
        prefix_count, _first, _last = split_range(0, begin, 0, prefix_splits, prefix_min_tokens, SPLIT_STEP, True)
        prefix_count = tl.where(split == 0, prefix_count, 0)
        prefix_first = (row * KV_HEADS + kv) * prefix_splits
        if PREFIX_GROUPS == 1:  # loaded now and needed at the end, so nothing waits for it
            a, b, c = load_partial(PREFIX_PARTIALS, prefix_first, 0, prefix_count, inner, valid, g, QUERIES, HEAD)
    for start in range(first, last, BLOCK):
        t = start + n
        ok = t < last
        if WINDOWED:
            ok = ok & (t >= lowest)
        where = (page.to(tl.int64) * PAGE_STRIDE + (t % PAGE) * HEAD)[:, None] + d[None, :]
        page = tl.load(table + (t + BLOCK) // PAGE, mask=t + BLOCK < last, other=0)  # for the next iteration
        wanted = ok[:, None] & (d < HEAD)[None, :]
        k = tl.load(keys + where, mask=wanted, other=0.0).to(COMPUTE)
        v = tl.load(keys + half + where, mask=wanted, other=0.0).to(COMPUTE)
        visible = ok[None, :]
        if WIDTH > 1:
            own = end - 1 + g // GROUP
            visible = visible & (t[None, :] <= own[:, None])
            if WINDOWED:
                visible = visible & (t[None, :] > own[:, None] - window)
        acc, m, total = attend_block(q, k, v, visible, acc, m, total, scale)

    if PREFIX_GROUPS:
        if PREFIX_GROUPS == 2:
            a, b, c = sum_partials(
                PREFIX_PARTIALS, prefix_first, prefix_count, inner, valid, QUERIES, QUERIES_P, HEAD, HEAD_P
            )
        acc, m, total = merge_partials(acc, m, total, a, b, c)
    if SPLIT_KV and split_count > 1:
        store_and_combine(acc, m, total, PARTIALS, FINISHED, OUT, at, inner, valid, row * KV_HEADS + kv, split,
                          split_count, splits, QUERIES, QUERIES_P, HEAD, HEAD_P)  # fmt: skip
    else:
        tl.store(OUT + at, (acc / total[:, None]).to(OUT.dtype.element_ty), mask=valid)


def _finished_for(pool: KVPool) -> Tensor:
    """Zeroed counters of finished splits. They are never freed, because captured graphs hold their address."""
    if pool not in _finished:
        capturing = pool.device.startswith("cuda") and torch.cuda.is_current_stream_capturing()
        assert not capturing, "decode_attention must have run once with this pool before it is captured"
        _finished[pool] = torch.zeros(_MAX_PAIRS, dtype=torch.int32, device=pool.device)
    return _finished[pool]


def _run(
    q: Tensor, heads: int, rows: Tensor, state: DeviceState, pool: KVPool, layer: int, scale: float, window: int | None,
    splits: int, positions: Tensor, cos: Tensor, sin: Tensor, weights: tuple[Tensor, Tensor] | None, eps: float,
    fused: bool, prefix_groups: PrefixGroups | None, width: int,
) -> Tensor:  # fmt: skip
    batch, kv_heads, head = len(rows), pool.kv_heads, pool.head
    assert batch * kv_heads <= _MAX_PAIRS, "too many rows for one step"
    group = heads // kv_heads
    out = torch.empty((batch * width, heads * head), dtype=q.dtype, device=q.device)
    count = batch * heads * width * splits * (head + 2) if splits > 1 else 0
    partials = torch.empty(count, dtype=torch.float32, device=q.device) if count else out
    tile = max(TILE, triton.next_power_of_2(group * width))
    block, warps, stages = tiling(batch * kv_heads * splits, pool.dtype.itemsize, triton.next_power_of_2(head), tile)
    prefix_groups = None if window is not None else prefix_groups
    prefix, group_mode = (rows, out), 0
    if prefix_groups is not None:
        weight = weights[0] if weights else None
        prefix_partials = attend_shared_prefix(
            q, heads, rows, state, pool, layer, scale * _LOG2E, prefix_groups, positions, cos, sin, weight, eps, fused,
            width,
        )  # fmt: skip
        prefix, group_mode = (prefix_groups.shared_tokens, prefix_partials), 1 if prefix_groups.splits == 1 else 2
    how: dict[str, Any] = {"num_warps": warps, "num_stages": stages, **launch.options()}
    _decode_attention[(batch, kv_heads, splits)](
        q, out, partials, _finished_for(pool) if splits > 1 else rows, rows, positions, state.length, state.left,
        state.table, pool.base, cos, sin, *(weights or (cos, cos)), *prefix, layer,
        pool.value_offset, state.table.stride(0), window or 0, scale * _LOG2E, splits,
        min_split_tokens(batch * kv_heads), prefix_groups.splits if prefix_groups else 1,
        min_prefix_split(prefix_groups, kv_heads) if prefix_groups else 1, eps, KV_HEADS=kv_heads, GROUP=group,
        WIDTH=width, QUERIES=group * width, QUERIES_P=tile, HEAD=head, HEAD_P=triton.next_power_of_2(head),
        PAGE=pool.page_size, PAGE_STRIDE=pool.page_stride, BLOCK=block, WINDOWED=window is not None,
        SPLIT_KV=splits > 1, FUSED=fused, NORM=weights is not None, PREFIX_GROUPS=group_mode,
        SPLIT_STEP=PREFIX_SPLIT_STEP, **launch.kv_types(q.dtype, pool.dtype), **how,
    )  # fmt: skip
    return out


def decode_attention(
    q: Tensor, rows: Tensor, state: DeviceState, pool: KVPool, layer: int, scale: float, window: int | None,
    splits: int, prefix_groups: PrefixGroups | None = None, width: int = 1,
) -> Tensor:  # fmt: skip
    """With several splits, this must have run once with a pool before it is captured in a graph."""
    return _run(
        q, q.shape[1], rows, state, pool, layer, scale, window, splits, rows, q, q, None, 0.0, False, prefix_groups,
        width,
    )  # fmt: skip


def rope_store_and_decode(
    qkv: Tensor, rows: Tensor, positions: Tensor, state: DeviceState, pool: KVPool, layer: int, cos: Tensor,
    sin: Tensor, q_weight: Tensor | None, k_weight: Tensor | None, eps: float, heads: int, scale: float,
    window: int | None, splits: int, prefix_groups: PrefixGroups | None = None, width: int = 1,
) -> Tensor:  # fmt: skip
    """`rope_and_store`, then `decode_attention`, fused where that is faster. `positions`: from `decode_inputs`. Several
    rows of a response are never fused: one split would read what another writes."""
    if width > 1 or len(rows) * pool.kv_heads > _MAX_FUSED_PAIRS:
        q = rope_and_store(
            qkv, rows, positions, state, pool, layer, cos, sin, q_weight, k_weight, eps, heads, pool.kv_heads, width
        )
        return decode_attention(q, rows, state, pool, layer, scale, window, splits, prefix_groups, width)
    weights = None if q_weight is None or k_weight is None else (q_weight, k_weight)
    return _run(
        qkv, heads, rows, state, pool, layer, scale, window, splits, positions, cos, sin, weights, eps, True,
        prefix_groups, 1,
    )  # fmt: skip
