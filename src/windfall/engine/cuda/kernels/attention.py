# pyright: reportMissingImports=false, reportIndexIssue=false
"""Attention of a decode step: one query per row over the pages of its sequence.

A program takes one part of the context of one (row, kv head), for all query heads that share that kv head. Rows go
first in the grid: siblings sit next to each other, so that the pages they share are read from the L2.
Where a context is cut into several parts, the program that finishes last adds them up: no second launch.
Where there are families, what they share was read before (`families.py`): the first part takes that in.

Rules:
- `_counts` is zero between launches: whoever adds the parts up sets its counter back;
- of an inactive row nothing is written but its output, which is zero.
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
from windfall.engine.cuda.kernels.layers import place
from windfall.engine.cuda.kernels.parts import absorb, combine, extent, gathered, keep, merged, part_of, tiling, turned
from windfall.engine.cuda.kernels.shared_prefix import WHOLE, least_of, share
from windfall.engine.cuda.splits import part_tokens
from windfall.engine.cuda.state import DeviceState, Families, Pool

_LOG2E = 1.4426950408889634
_PAIRS = 1 << 17
"""The most (row, kv head) pairs of a step."""
_FUSED_PAIRS = 1024
"""Up to so many of them a launch less is worth more than what it costs to do both in one."""
_counts: WeakKeyDictionary[Pool, Tensor] = WeakKeyDictionary()
_INTEGERS = ["layer", "window", "splits", "least", "shares", "shared_least", "table_stride"]
_ANYWHERE = ["COUNTS", "SHARED", "ROWS", "POSITIONS", "LENGTH", "LEFT", "TABLE", "BASE"]


@triton.jit(do_not_specialize=_INTEGERS, do_not_specialize_on_alignment=_ANYWHERE)
def _decode(
    Q, OUT, PARTS, COUNTS, ROWS, POSITIONS, LENGTH, LEFT, TABLE, BASE, COS, SIN, QW, KW, SHARED, SHARED_PARTS, layer,
    half, table_stride, window, scale, splits, least, shares, shared_least, eps,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, GROUP_P: tl.constexpr, HEAD: tl.constexpr, HEAD_P: tl.constexpr,
    PAGE: tl.constexpr, BLOCK: tl.constexpr, WINDOWED: tl.constexpr, CUT: tl.constexpr, FUSED: tl.constexpr,
    NORM: tl.constexpr, FAMILIES: tl.constexpr, WHOLE_P: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """`FAMILIES`: 0: there are none; 1: what they share is one part; 2: it may be several."""
    if EARLY:
        gdc_wait()
    row, kv, part = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    slot = tl.load(ROWS + row)
    # What does not depend on the slot, or on nothing else, is asked for at once: one wait instead of three.
    pool = tl.multiple_of(tl.load(BASE).to(tl.pointer_type(Q.dtype.element_ty)), 16)
    end = (tl.load(POSITIONS + row) if FUSED else tl.load(LENGTH + slot)) + 1
    active = tl.load(LEFT + slot) > 0
    table = TABLE + slot.to(tl.int64) * table_stride
    g, d, n = tl.arange(0, GROUP_P), tl.arange(0, HEAD_P), tl.arange(0, BLOCK)
    here = (g < GROUP)[:, None] & (d < HEAD)[None, :]
    inner = g[:, None] * HEAD + d[None, :]
    at = (row * KV_HEADS + kv) * (GROUP * HEAD) + inner
    if FUSED:
        q = turned(Q + (row * (GROUP + 2) * KV_HEADS + kv * GROUP) * HEAD, QW, COS, SIN, inner, d, here, end - 1,
                   eps, HEAD, HEAD_P, NORM)  # fmt: skip
    else:
        q = tl.load(Q + at, mask=here, other=0.0)

    lowest = tl.maximum(end - window, 0) if WINDOWED else 0
    begin = tl.load(SHARED + row) if FAMILIES else lowest // BLOCK * BLOCK
    parts, first, last = extent(begin, end, part, splits, least, BLOCK, CUT)
    page = tl.load(table + (first + n) // PAGE, mask=(first + n) // PAGE < table_stride, other=0)
    if not active:
        if part == 0:
            tl.store(OUT + at, tl.zeros([GROUP_P, HEAD_P], OUT.dtype.element_ty), mask=here)
        return
    if part >= parts:
        return

    keys = pool + layer.to(tl.int64) * 2 * half + kv * (PAGE * HEAD)
    if FUSED and part == parts - 1:
        new = Q + (row * (GROUP + 2) + GROUP) * (KV_HEADS * HEAD) + kv * HEAD
        to = keys + tl.load(table + (end - 1) // PAGE).to(tl.int64) * (KV_HEADS * PAGE * HEAD)
        keep(new, KV_HEADS * HEAD, to + (end - 1) % PAGE * HEAD, half, KW, COS, SIN, end - 1, eps, HEAD, HEAD_P, NORM)
        tl.debug_barrier()  # other threads of this program read it below
    m = tl.full([GROUP_P], -1e30, tl.float32)
    total = tl.zeros([GROUP_P], tl.float32)
    acc = tl.zeros([GROUP_P, HEAD_P], tl.float32)
    if FAMILIES:
        before, _first, _last = extent(0, begin, 0, shares, shared_least, WHOLE_P, True)
        before = tl.where(part == 0, before, 0)
        begun = (row * KV_HEADS + kv) * shares
        if FAMILIES == 1:  # asked for now, needed at the end: nobody waits for it
            a, b, c = part_of(SHARED_PARTS, begun, 0, before, inner, here, g, GROUP, HEAD)
    for start in range(first, last, BLOCK):
        t = start + n
        ok = t < last
        if WINDOWED:
            ok = ok & (t >= lowest)
        where = (page.to(tl.int64) * (KV_HEADS * PAGE * HEAD) + (t % PAGE) * HEAD)[:, None] + d[None, :]
        page = tl.load(table + (t + BLOCK) // PAGE, mask=t + BLOCK < last, other=0)  # for the next time round
        wanted = ok[:, None] & (d < HEAD)[None, :]
        k = tl.load(keys + where, mask=wanted, other=0.0)
        v = tl.load(keys + half + where, mask=wanted, other=0.0)
        acc, m, total = absorb(q, k, v, ok[None, :], acc, m, total, scale)

    if FAMILIES:
        if FAMILIES == 2:
            a, b, c = gathered(SHARED_PARTS, begun, before, inner, here, GROUP, GROUP_P, HEAD, HEAD_P)
        acc, m, total = merged(acc, m, total, a, b, c)
    if CUT and parts > 1:
        combine(acc, m, total, PARTS, COUNTS, OUT, at, inner, here, row * KV_HEADS + kv, part, parts, splits,
                GROUP, GROUP_P, HEAD, HEAD_P)  # fmt: skip
    else:
        tl.store(OUT + at, (acc / total[:, None]).to(OUT.dtype.element_ty), mask=here)


def _counts_of(pool: Pool) -> Tensor:
    """Zeros to count finished parts with, never given up: captured graphs hold their address."""
    if pool not in _counts:
        capturing = pool.device.startswith("cuda") and torch.cuda.is_current_stream_capturing()
        assert not capturing, "decode must have run once with this pool before it is captured"
        _counts[pool] = torch.zeros(_PAIRS, dtype=torch.int32, device=pool.device)
    return _counts[pool]


def _run(
    q: Tensor, heads: int, rows: Tensor, state: DeviceState, pool: Pool, layer: int, scale: float, window: int | None,
    splits: int, positions: Tensor, cos: Tensor, sin: Tensor, weights: tuple[Tensor, Tensor] | None, eps: float,
    fused: bool, families: Families | None,
) -> Tensor:  # fmt: skip
    batch, kv_heads, head = len(rows), pool.shape[3], pool.shape[5]
    assert batch * kv_heads <= _PAIRS, "too many rows for one step"
    group = heads // kv_heads
    out = torch.empty((batch, heads * head), dtype=q.dtype, device=q.device)
    parts = (
        torch.empty(batch * heads * splits * (head + 2), dtype=torch.float32, device=q.device) if splits > 1 else out
    )
    block, warps, stages = tiling(batch * kv_heads * splits, q.dtype.itemsize, triton.next_power_of_2(head))
    families = None if window is not None else families
    shared, kind = (rows, out), 0
    if families is not None:
        weight = weights[0] if weights else None
        left = share(
            q, heads, rows, state, pool, layer, scale * _LOG2E, families, positions, cos, sin, weight, eps, fused
        )
        shared, kind = (families.shared, left), 1 if families.parts == 1 else 2
    how: dict[str, Any] = {"num_warps": warps, "num_stages": stages, **launch.options()}
    _decode[(batch, kv_heads, splits)](
        q, out, parts, _counts_of(pool) if splits > 1 else rows, rows, positions, state.length, state.left,
        state.table, pool.base, cos, sin, *(weights or (cos, cos)), *shared, layer,
        pool.shape[2] * kv_heads * pool.page_size * head, state.table.stride(0), window or 0, scale * _LOG2E, splits,
        part_tokens(batch * kv_heads), families.parts if families else 1,
        least_of(families, kv_heads) if families else 1, eps, KV_HEADS=kv_heads, GROUP=group,
        GROUP_P=max(16, triton.next_power_of_2(group)), HEAD=head, HEAD_P=triton.next_power_of_2(head),
        PAGE=pool.page_size, BLOCK=block, WINDOWED=window is not None, CUT=splits > 1, FUSED=fused,
        NORM=weights is not None, FAMILIES=kind, WHOLE_P=WHOLE, **how,
    )  # fmt: skip
    return out


def decode(
    q: Tensor, rows: Tensor, state: DeviceState, pool: Pool, layer: int, scale: float, window: int | None, splits: int,
    families: Families | None = None,
) -> Tensor:  # fmt: skip
    """One query per row, over tokens 0 to `length` of its slot. Rows of inactive slots: zero. Families read what they
    share once; not where there is a window. Must have run once with a pool and several splits before that is captured
    in a graph."""
    return _run(q, q.shape[1], rows, state, pool, layer, scale, window, splits, rows, q, q, None, 0.0, False, families)


def place_and_decode(
    qkv: Tensor, rows: Tensor, positions: Tensor, state: DeviceState, pool: Pool, layer: int, cos: Tensor, sin: Tensor,
    q_weight: Tensor | None, k_weight: Tensor | None, eps: float, heads: int, scale: float, window: int | None,
    splits: int, families: Families | None = None,
) -> Tensor:  # fmt: skip
    """`place`, then `decode`; in one launch where that is faster. `positions` are those of `begin`."""
    if len(rows) * pool.shape[3] > _FUSED_PAIRS:
        q = place(qkv, rows, positions, state, pool, layer, cos, sin, q_weight, k_weight, eps, heads, pool.shape[3])
        return decode(q, rows, state, pool, layer, scale, window, splits, families)
    weights = None if q_weight is None or k_weight is None else (q_weight, k_weight)
    return _run(
        qkv, heads, rows, state, pool, layer, scale, window, splits, positions, cos, sin, weights, eps, True, families
    )
