# pyright: reportMissingImports=false, reportIndexIssue=false
"""Attention of a decode step: one query per row over the pages of its sequence.

A program takes one part of the context of one (row, kv head), for all query heads that share that kv head. Rows go
first in the grid: siblings sit next to each other, so that the pages they share are read from the L2.
Where a context is cut into several parts, the program that finishes last adds them up: no second launch.

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

from windfall.engine.gpu.kernels import launch
from windfall.engine.gpu.kernels.layers import place
from windfall.engine.gpu.splits import part_tokens
from windfall.engine.gpu.state import Pool, State

_LOG2E = 1.4426950408889634
_PAIRS = 1 << 17
"""The most (row, kv head) pairs of a step."""
_FUSED_PAIRS = 1024
"""Up to so many of them a launch less is worth more than what it costs to do both in one."""
_counts: WeakKeyDictionary[Pool, Tensor] = WeakKeyDictionary()
_INTEGERS = ["layer", "window", "splits", "least", "table_stride"]
_ANYWHERE = ["COUNTS", "ROWS", "POSITIONS", "LENGTH", "LEFT", "TABLE", "BASE"]


@triton.jit(do_not_specialize=_INTEGERS, do_not_specialize_on_alignment=_ANYWHERE)
def _decode(
    Q, OUT, PARTS, COUNTS, ROWS, POSITIONS, LENGTH, LEFT, TABLE, BASE, COS, SIN, QW, KW, layer, half, table_stride,
    window, scale, splits, least, eps,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, GROUP_P: tl.constexpr, HEAD: tl.constexpr, HEAD_P: tl.constexpr,
    PAGE: tl.constexpr, BLOCK: tl.constexpr, WINDOWED: tl.constexpr, CUT: tl.constexpr, FUSED: tl.constexpr,
    NORM: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
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
        q = _turned(Q + (row * (GROUP + 2) * KV_HEADS + kv * GROUP) * HEAD, QW, COS, SIN, inner, d, here, end - 1,
                    eps, HEAD, HEAD_P, NORM)  # fmt: skip
    else:
        q = tl.load(Q + at, mask=here, other=0.0)

    lowest = tl.maximum(end - window, 0) if WINDOWED else 0
    parts, first, last = _extent(lowest // BLOCK * BLOCK, end, part, splits, least, BLOCK, CUT)
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
        _keep(new, KV_HEADS * HEAD, to + (end - 1) % PAGE * HEAD, half, KW, COS, SIN, end - 1, eps, HEAD, HEAD_P, NORM)
        tl.debug_barrier()  # other threads of this program read it below
    m = tl.full([GROUP_P], -1e30, tl.float32)
    total = tl.zeros([GROUP_P], tl.float32)
    acc = tl.zeros([GROUP_P, HEAD_P], tl.float32)
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

    if CUT and parts > 1:
        _combine(acc, m, total, PARTS, COUNTS, OUT, at, inner, here, row * KV_HEADS + kv, part, parts, splits,
                 GROUP, GROUP_P, HEAD, HEAD_P)  # fmt: skip
    else:
        tl.store(OUT + at, (acc / total[:, None]).to(OUT.dtype.element_ty), mask=here)


@triton.jit
def _extent(begin, end, part, splits, least, BLOCK: tl.constexpr, CUT: tl.constexpr):
    """How many parts there are of tokens `begin` to `end - 1`, and where this one begins and ends."""
    each = end - begin
    if CUT:
        each = tl.maximum(tl.cdiv(tl.cdiv(each, splits), BLOCK) * BLOCK, least)
    return tl.cdiv(end - begin, each), begin + part * each, tl.minimum(begin + part * each + each, end)


@triton.jit
def absorb(q, k, v, seen, acc, m, total, scale):
    """Weighted values, maximum and sum after a block of keys and values more. The scale is one of exp2."""
    s = tl.where(seen, tl.dot(q, tl.trans(k), input_precision="ieee") * scale, -1e30)
    m_new = tl.maximum(m, tl.max(s, 1))
    p = tl.where(seen, tl.exp2(s - m_new[:, None]), 0.0)  # a row may have seen nothing so far: then s is m_new
    fade = tl.exp2(m - m_new)
    acc = tl.dot(p.to(v.dtype), v, acc * fade[:, None], input_precision="ieee")
    return acc, m_new, total * fade + tl.sum(p, 1)


@triton.jit
def _turned(
    X, WEIGHT, COS, SIN, inner, d, here, position, eps, HEAD: tl.constexpr, HEAD_P: tl.constexpr, NORM: tl.constexpr
):
    """Heads at X + inner, normed and rotated as `place` does."""
    dtype: tl.constexpr = X.dtype.element_ty
    lower = (d < HEAD // 2)[None, :]
    across = tl.where(d < HEAD // 2, HEAD // 2, -(HEAD // 2))[None, :]  # to the other half of the head
    column = position * HEAD + tl.broadcast_to(d[None, :], inner.shape)
    a = tl.load(X + inner, mask=here, other=0.0).to(tl.float32)
    b = tl.load(X + inner + across, mask=here, other=0.0).to(tl.float32)
    cos = tl.load(COS + column, mask=here, other=0.0).to(tl.float32)
    sin = tl.load(SIN + column, mask=here, other=0.0).to(tl.float32)
    if NORM:
        i = tl.broadcast_to(d[None, :], inner.shape)
        factor = tl.rsqrt(tl.sum(a * a, 1) / HEAD + eps)[:, None]
        wa = tl.load(WEIGHT + i, mask=here, other=0.0).to(tl.float32)
        wb = tl.load(WEIGHT + i + across, mask=here, other=0.0).to(tl.float32)
        a = ((a * factor).to(dtype).to(tl.float32) * wa).to(dtype).to(tl.float32)
        b = ((b * factor).to(dtype).to(tl.float32) * wb).to(dtype).to(tl.float32)
    b = tl.where(lower, -b, b)
    return ((a * cos).to(dtype).to(tl.float32) + (b * sin).to(dtype).to(tl.float32)).to(dtype)


@triton.jit
def _keep(
    NEW, apart, TO, half, WEIGHT, COS, SIN, position, eps, HEAD: tl.constexpr, HEAD_P: tl.constexpr, NORM: tl.constexpr
):
    """The row's own key and value (at NEW and NEW + apart) go into the pool."""
    d = tl.arange(0, HEAD_P)
    inner = tl.arange(0, 1)[:, None] + d[None, :]
    here = inner < HEAD
    k = _turned(NEW, WEIGHT, COS, SIN, inner, d, here, position, eps, HEAD, HEAD_P, NORM)
    tl.store(TO + inner, k, mask=here)
    tl.store(TO + half + inner, tl.load(NEW + apart + inner, mask=here), mask=here)


@triton.jit
def _part(PARTS, first, i, parts, inner, here, g, GROUP: tl.constexpr, HEAD: tl.constexpr):
    """What part `i` left: weighted values, maximum, sum; nothing if there is none. From the L2: others wrote it."""
    there = (g < GROUP) & (g * 0 + i < parts)
    own = PARTS + (first + i) * (GROUP * (HEAD + 2))
    a = tl.load(own + inner, mask=here & there[:, None], other=0.0, cache_modifier=".cg")
    b = tl.load(own + GROUP * HEAD + g, mask=there, other=-1e30, cache_modifier=".cg")
    c = tl.load(own + GROUP * (HEAD + 1) + g, mask=there, other=0.0, cache_modifier=".cg")
    return a, b, c


@triton.jit
def _combine(
    acc, m, total, PARTS, COUNTS, OUT, at, inner, here, pair, part, parts, splits,
    GROUP: tl.constexpr, GROUP_P: tl.constexpr, HEAD: tl.constexpr, HEAD_P: tl.constexpr,
):  # fmt: skip
    """Leave this part's sum, maximum and weighted values; whoever comes last adds them all up."""
    g = tl.arange(0, GROUP_P)
    own = PARTS + (pair * splits + part) * (GROUP * (HEAD + 2))
    tl.store(own + inner, acc, mask=here)
    tl.store(own + GROUP * HEAD + g, m, mask=g < GROUP)
    tl.store(own + GROUP * (HEAD + 1) + g, total, mask=g < GROUP)
    tl.debug_barrier()  # every thread's stores come before the one thread's count
    if tl.atomic_add(COUNTS + pair, 1, sem="acq_rel") == parts - 1:
        m = tl.full([GROUP_P], -1e30, tl.float32)
        total = tl.zeros([GROUP_P], tl.float32)
        acc = tl.zeros([GROUP_P, HEAD_P], tl.float32)
        # Always in this order, whoever comes last: the same sum every time. Four at a time: one wait for all of them.
        for i in range(0, parts, 4):
            a0, b0, c0 = _part(PARTS, pair * splits, i, parts, inner, here, g, GROUP, HEAD)
            a1, b1, c1 = _part(PARTS, pair * splits, i + 1, parts, inner, here, g, GROUP, HEAD)
            a2, b2, c2 = _part(PARTS, pair * splits, i + 2, parts, inner, here, g, GROUP, HEAD)
            a3, b3, c3 = _part(PARTS, pair * splits, i + 3, parts, inner, here, g, GROUP, HEAD)
            m_new = tl.maximum(tl.maximum(tl.maximum(b0, b1), tl.maximum(b2, b3)), m)
            fade, w0, w1 = tl.exp2(m - m_new), tl.exp2(b0 - m_new), tl.exp2(b1 - m_new)
            w2, w3 = tl.exp2(b2 - m_new), tl.exp2(b3 - m_new)
            total = total * fade + c0 * w0 + c1 * w1 + c2 * w2 + c3 * w3
            acc = acc * fade[:, None] + a0 * w0[:, None] + a1 * w1[:, None] + a2 * w2[:, None] + a3 * w3[:, None]
            m = m_new
        tl.store(COUNTS + pair, 0)
        tl.store(OUT + at, (acc / total[:, None]).to(OUT.dtype.element_ty), mask=here)


def tiling(programs: int, itemsize: int) -> tuple[int, int, int]:
    """(keys of a block, warps, stages), by measurement. A program that has a multiprocessor to itself wants to read far
    ahead; of some hundreds, all should be there at once; beyond, the longest should not be the last to finish."""
    if itemsize > 2:
        return 32, 4, 2
    return (128, 4, 3) if programs <= 132 else (64, 4, 2) if programs < 1024 else (64, 4, 3)


def _counts_of(pool: Pool) -> Tensor:
    """Zeros to count finished parts with, never given up: captured graphs hold their address."""
    if pool not in _counts:
        capturing = pool.device.startswith("cuda") and torch.cuda.is_current_stream_capturing()
        assert not capturing, "decode must have run once with this pool before it is captured"
        _counts[pool] = torch.zeros(_PAIRS, dtype=torch.int32, device=pool.device)
    return _counts[pool]


def _run(
    q: Tensor, heads: int, rows: Tensor, state: State, pool: Pool, layer: int, scale: float, window: int | None,
    splits: int, positions: Tensor, cos: Tensor, sin: Tensor, weights: tuple[Tensor, Tensor] | None, eps: float,
    fused: bool,
) -> Tensor:  # fmt: skip
    batch, kv_heads, head = len(rows), pool.shape[3], pool.shape[5]
    assert batch * kv_heads <= _PAIRS, "too many rows for one step"
    group = heads // kv_heads
    out = torch.empty((batch, heads * head), dtype=q.dtype, device=q.device)
    parts = (
        torch.empty(batch * heads * splits * (head + 2), dtype=torch.float32, device=q.device) if splits > 1 else out
    )
    block, warps, stages = tiling(batch * kv_heads * splits, q.dtype.itemsize)
    how: dict[str, Any] = {"num_warps": warps, "num_stages": stages, **launch.options()}
    _decode[(batch, kv_heads, splits)](
        q, out, parts, _counts_of(pool) if splits > 1 else rows, rows, positions, state.length, state.left,
        state.table, pool.base, cos, sin, *(weights or (cos, cos)), layer,
        pool.shape[2] * kv_heads * pool.page_size * head, state.table.stride(0), window or 0, scale * _LOG2E, splits,
        part_tokens(batch * kv_heads), eps, KV_HEADS=kv_heads, GROUP=group,
        GROUP_P=max(16, triton.next_power_of_2(group)), HEAD=head, HEAD_P=triton.next_power_of_2(head),
        PAGE=pool.page_size, BLOCK=block, WINDOWED=window is not None, CUT=splits > 1, FUSED=fused,
        NORM=weights is not None, **how,
    )  # fmt: skip
    return out


def decode(
    q: Tensor, rows: Tensor, state: State, pool: Pool, layer: int, scale: float, window: int | None, splits: int
) -> Tensor:
    """One query per row, over tokens 0 to `length` of its slot. Rows of inactive slots: zero. Must have run once with a
    pool and several splits before that is captured in a graph."""
    return _run(q, q.shape[1], rows, state, pool, layer, scale, window, splits, rows, q, q, None, 0.0, False)


def place_and_decode(
    qkv: Tensor, rows: Tensor, positions: Tensor, state: State, pool: Pool, layer: int, cos: Tensor, sin: Tensor,
    q_weight: Tensor | None, k_weight: Tensor | None, eps: float, heads: int, scale: float, window: int | None,
    splits: int,
) -> Tensor:  # fmt: skip
    """`place`, then `decode`; in one launch where that is faster. `positions` are those of `begin`."""
    if len(rows) * pool.shape[3] > _FUSED_PAIRS:
        q = place(qkv, rows, positions, state, pool, layer, cos, sin, q_weight, k_weight, eps, heads, pool.shape[3])
        return decode(q, rows, state, pool, layer, scale, window, splits)
    weights = None if q_weight is None or k_weight is None else (q_weight, k_weight)
    return _run(qkv, heads, rows, state, pool, layer, scale, window, splits, positions, cos, sin, weights, eps, True)
