# pyright: reportMissingImports=false, reportIndexIssue=false
"""The building blocks of the attention kernels: which tokens a split covers, preparing queries, storing a new key and
value, one block of online softmax, and combining the partial results of several splits.

A split is a contiguous range of a context. Its partial result for one (row, kv head) holds, for every query head, the
values weighted by exp2 (HEAD floats), then the maximum score, then the sum of the weights.
"""

from __future__ import annotations

import triton
import triton.language as tl

from windfall.engine.cuda.kernels import launch
from windfall.engine.cuda.splits import TILE


@triton.jit
def split_range(begin, end, split, splits, min_tokens, BLOCK: tl.constexpr, SPLIT_KV: tl.constexpr):
    """Number of splits of tokens `begin` to `end - 1`, and where this split begins and ends. Splits have equal sizes of
    at least `min_tokens` tokens: a shorter one would cost as much as it saves."""
    each = end - begin
    if SPLIT_KV:
        wanted = tl.maximum(tl.minimum(each // min_tokens, splits), 1)
        each = tl.maximum(tl.cdiv(tl.cdiv(each, wanted), BLOCK) * BLOCK, 1)
    return tl.cdiv(end - begin, each), begin + split * each, tl.minimum(begin + split * each + each, end)


@triton.jit
def attend_block(q, k, v, visible, acc, m, total, scale):
    """Weighted values, maximum and sum after one more block of keys and values. `scale` is for exp2, not exp."""
    s = tl.where(visible, tl.dot(q, tl.trans(k), input_precision="ieee") * scale, -1e30)
    m_new = tl.maximum(m, tl.max(s, 1))
    p = tl.where(visible, tl.exp2(s - m_new[:, None]), 0.0)  # if a row sees no key at all, s equals m_new
    rescale = tl.exp2(m - m_new)
    acc = tl.dot(p.to(v.dtype), v, acc * rescale[:, None], input_precision="ieee")
    return acc, m_new, total * rescale + tl.sum(p, 1)


@triton.jit
def norm_and_rotate(
    X, WEIGHT, COS, SIN, inner, d, valid, position, eps, HEAD: tl.constexpr, HEAD_P: tl.constexpr, NORM: tl.constexpr
):
    """The heads at X + inner, normalized and rotated as in `rope_and_store`."""
    dtype: tl.constexpr = X.dtype.element_ty
    lower = (d < HEAD // 2)[None, :]
    across = tl.where(d < HEAD // 2, HEAD // 2, -(HEAD // 2))[None, :]  # to the other half of the head
    column = position * HEAD + tl.broadcast_to(d[None, :], inner.shape)
    a = tl.load(X + inner, mask=valid, other=0.0).to(tl.float32)
    b = tl.load(X + inner + across, mask=valid, other=0.0).to(tl.float32)
    cos = tl.load(COS + column, mask=valid, other=0.0).to(tl.float32)
    sin = tl.load(SIN + column, mask=valid, other=0.0).to(tl.float32)
    if NORM:
        i = tl.broadcast_to(d[None, :], inner.shape)
        factor = tl.rsqrt(tl.sum(a * a, 1) / HEAD + eps)[:, None]
        wa = tl.load(WEIGHT + i, mask=valid, other=0.0).to(tl.float32)
        wb = tl.load(WEIGHT + i + across, mask=valid, other=0.0).to(tl.float32)
        a = ((a * factor).to(dtype).to(tl.float32) * wa).to(dtype).to(tl.float32)
        b = ((b * factor).to(dtype).to(tl.float32) * wb).to(dtype).to(tl.float32)
    b = tl.where(lower, -b, b)
    return ((a * cos).to(dtype).to(tl.float32) + (b * sin).to(dtype).to(tl.float32)).to(dtype)


@triton.jit
def load_partial(PARTIALS, first, i, split_count, inner, valid, g, GROUP: tl.constexpr, HEAD: tl.constexpr):
    """The partial result of split `i`: weighted values, maximum, sum; neutral values if there is no such split. Reads
    from the L2, because other programs wrote it."""
    present = (g < GROUP) & (g * 0 + i < split_count)
    own = PARTIALS + (first + i) * (GROUP * (HEAD + 2))
    a = tl.load(own + inner, mask=valid & present[:, None], other=0.0, cache_modifier=".cg")
    b = tl.load(own + GROUP * HEAD + g, mask=present, other=-1e30, cache_modifier=".cg")
    c = tl.load(own + GROUP * (HEAD + 1) + g, mask=present, other=0.0, cache_modifier=".cg")
    return a, b, c


@triton.jit
def sum_partials(
    PARTIALS, first, split_count, inner, valid, GROUP: tl.constexpr, GROUP_P: tl.constexpr, HEAD: tl.constexpr,
    HEAD_P: tl.constexpr,
):  # fmt: skip
    """The sum of the `split_count` partial results that start at `first`. The order is fixed, so every program gets the
    same sum. Four are loaded at a time, so their latencies overlap."""
    g = tl.arange(0, GROUP_P)
    m = tl.full([GROUP_P], -1e30, tl.float32)
    total = tl.zeros([GROUP_P], tl.float32)
    acc = tl.zeros([GROUP_P, HEAD_P], tl.float32)
    for i in range(0, split_count, 4):
        a0, b0, c0 = load_partial(PARTIALS, first, i, split_count, inner, valid, g, GROUP, HEAD)
        a1, b1, c1 = load_partial(PARTIALS, first, i + 1, split_count, inner, valid, g, GROUP, HEAD)
        a2, b2, c2 = load_partial(PARTIALS, first, i + 2, split_count, inner, valid, g, GROUP, HEAD)
        a3, b3, c3 = load_partial(PARTIALS, first, i + 3, split_count, inner, valid, g, GROUP, HEAD)
        m_new = tl.maximum(tl.maximum(tl.maximum(b0, b1), tl.maximum(b2, b3)), m)
        rescale, w0, w1 = tl.exp2(m - m_new), tl.exp2(b0 - m_new), tl.exp2(b1 - m_new)
        w2, w3 = tl.exp2(b2 - m_new), tl.exp2(b3 - m_new)
        total = total * rescale + c0 * w0 + c1 * w1 + c2 * w2 + c3 * w3
        acc = acc * rescale[:, None] + a0 * w0[:, None] + a1 * w1[:, None] + a2 * w2[:, None] + a3 * w3[:, None]
        m = m_new
    return acc, m, total


@triton.jit
def merge_partials(acc, m, total, a, b, c):
    """Two partial results combined into one."""
    m_new = tl.maximum(m, b)
    rescale, weight = tl.exp2(m - m_new), tl.exp2(b - m_new)
    return acc * rescale[:, None] + a * weight[:, None], m_new, total * rescale + c * weight


@triton.jit
def store_kv(
    NEW, value_offset, TO, half, WEIGHT, COS, SIN, position, eps, HEAD: tl.constexpr, HEAD_P: tl.constexpr,
    NORM: tl.constexpr,
):  # fmt: skip
    """Write the row's own key and value (at NEW and NEW + value_offset) to the pool."""
    d = tl.arange(0, HEAD_P)
    inner = tl.arange(0, 1)[:, None] + d[None, :]
    valid = inner < HEAD
    k = norm_and_rotate(NEW, WEIGHT, COS, SIN, inner, d, valid, position, eps, HEAD, HEAD_P, NORM)
    kind: tl.constexpr = TO.dtype.element_ty
    tl.store(TO + inner, k.to(kind), mask=valid)
    tl.store(TO + half + inner, tl.load(NEW + value_offset + inner, mask=valid).to(kind), mask=valid)


@triton.jit
def store_and_combine(
    acc, m, total, PARTIALS, FINISHED, OUT, at, inner, valid, pair, split, split_count, splits,
    GROUP: tl.constexpr, GROUP_P: tl.constexpr, HEAD: tl.constexpr, HEAD_P: tl.constexpr,
):  # fmt: skip
    """Store the partial result of this split. The program that finishes last combines all splits."""
    g = tl.arange(0, GROUP_P)
    own = PARTIALS + (pair * splits + split) * (GROUP * (HEAD + 2))
    tl.store(own + inner, acc, mask=valid)
    tl.store(own + GROUP * HEAD + g, m, mask=g < GROUP)
    tl.store(own + GROUP * (HEAD + 1) + g, total, mask=g < GROUP)
    tl.debug_barrier()  # the stores of all threads must come before the atomic add of one thread
    if tl.atomic_add(FINISHED + pair, 1, sem="acq_rel") == split_count - 1:
        acc, m, total = sum_partials(PARTIALS, pair * splits, split_count, inner, valid, GROUP, GROUP_P, HEAD, HEAD_P)
        tl.store(FINISHED + pair, 0)
        tl.store(OUT + at, (acc / total[:, None]).to(OUT.dtype.element_ty), mask=valid)


def tiling(programs: int, itemsize: int, head: int, tile: int = TILE) -> tuple[int, int, int]:
    """(keys of a block, warps, stages) for tiles of `tile` queries, chosen by measurement. A program alone on a
    multiprocessor should prefetch far ahead; a few hundred should all be resident at once; with more, the longest one
    should not be the last to finish."""
    warps = 4
    if itemsize > 2:
        block, stages = 32, 2
    elif itemsize == 1:  # two warps convert a block while others load: 1.25 times as fast as four
        block, stages, warps = 64, 3, 2
    else:
        block, stages = (128, 3) if programs <= 132 else (64, 2) if programs < 1024 else (64, 3)
    block, stages = launch.fit_tiling(block, stages, tile=tile, head=head, itemsize=max(itemsize, 2))
    return block, warps, stages
