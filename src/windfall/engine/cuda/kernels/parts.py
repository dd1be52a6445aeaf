# pyright: reportMissingImports=false, reportIndexIssue=false
"""What the kernels of attention are made of: where a part of a context begins, queries made ready, a new key and value
kept, a block of them more, and parts that others left.

A part is what some tokens of a context come to for one (row, kv head): for every query head the values weighted by
exp2 (HEAD floats), then their maximum, then their sum.
"""

from __future__ import annotations

import triton
import triton.language as tl

from windfall.engine.cuda.kernels import launch
from windfall.engine.cuda.splits import TILE


@triton.jit
def extent(begin, end, part, splits, least, BLOCK: tl.constexpr, CUT: tl.constexpr):
    """How many parts there are of tokens `begin` to `end - 1`, and where this one begins and ends. Parts are alike, and
    none is cut that would have fewer than `least` tokens: a short rest would cost as much as it saves."""
    each = end - begin
    if CUT:
        wanted = tl.maximum(tl.minimum(each // least, splits), 1)
        each = tl.maximum(tl.cdiv(tl.cdiv(each, wanted), BLOCK) * BLOCK, 1)
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
def turned(
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
def part_of(PARTS, first, i, parts, inner, here, g, GROUP: tl.constexpr, HEAD: tl.constexpr):
    """What part `i` left: weighted values, maximum, sum; nothing if there is none. From the L2: others wrote it."""
    there = (g < GROUP) & (g * 0 + i < parts)
    own = PARTS + (first + i) * (GROUP * (HEAD + 2))
    a = tl.load(own + inner, mask=here & there[:, None], other=0.0, cache_modifier=".cg")
    b = tl.load(own + GROUP * HEAD + g, mask=there, other=-1e30, cache_modifier=".cg")
    c = tl.load(own + GROUP * (HEAD + 1) + g, mask=there, other=0.0, cache_modifier=".cg")
    return a, b, c


@triton.jit
def gathered(
    PARTS, first, parts, inner, here, GROUP: tl.constexpr, GROUP_P: tl.constexpr, HEAD: tl.constexpr,
    HEAD_P: tl.constexpr,
):  # fmt: skip
    """The sum of all `parts` that begin at `first`. Always in this order, whoever asks: one sum every time. Four at
    a time: one wait for all of them."""
    g = tl.arange(0, GROUP_P)
    m = tl.full([GROUP_P], -1e30, tl.float32)
    total = tl.zeros([GROUP_P], tl.float32)
    acc = tl.zeros([GROUP_P, HEAD_P], tl.float32)
    for i in range(0, parts, 4):
        a0, b0, c0 = part_of(PARTS, first, i, parts, inner, here, g, GROUP, HEAD)
        a1, b1, c1 = part_of(PARTS, first, i + 1, parts, inner, here, g, GROUP, HEAD)
        a2, b2, c2 = part_of(PARTS, first, i + 2, parts, inner, here, g, GROUP, HEAD)
        a3, b3, c3 = part_of(PARTS, first, i + 3, parts, inner, here, g, GROUP, HEAD)
        m_new = tl.maximum(tl.maximum(tl.maximum(b0, b1), tl.maximum(b2, b3)), m)
        fade, w0, w1 = tl.exp2(m - m_new), tl.exp2(b0 - m_new), tl.exp2(b1 - m_new)
        w2, w3 = tl.exp2(b2 - m_new), tl.exp2(b3 - m_new)
        total = total * fade + c0 * w0 + c1 * w1 + c2 * w2 + c3 * w3
        acc = acc * fade[:, None] + a0 * w0[:, None] + a1 * w1[:, None] + a2 * w2[:, None] + a3 * w3[:, None]
        m = m_new
    return acc, m, total


@triton.jit
def merged(acc, m, total, a, b, c):
    """Two parts as one."""
    m_new = tl.maximum(m, b)
    fade, weight = tl.exp2(m - m_new), tl.exp2(b - m_new)
    return acc * fade[:, None] + a * weight[:, None], m_new, total * fade + c * weight


@triton.jit
def keep(
    NEW, apart, TO, half, WEIGHT, COS, SIN, position, eps, HEAD: tl.constexpr, HEAD_P: tl.constexpr, NORM: tl.constexpr
):
    """The row's own key and value (at NEW and NEW + apart) go into the pool."""
    d = tl.arange(0, HEAD_P)
    inner = tl.arange(0, 1)[:, None] + d[None, :]
    here = inner < HEAD
    k = turned(NEW, WEIGHT, COS, SIN, inner, d, here, position, eps, HEAD, HEAD_P, NORM)
    tl.store(TO + inner, k, mask=here)
    tl.store(TO + half + inner, tl.load(NEW + apart + inner, mask=here), mask=here)


@triton.jit
def combine(
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
        acc, m, total = gathered(PARTS, pair * splits, parts, inner, here, GROUP, GROUP_P, HEAD, HEAD_P)
        tl.store(COUNTS + pair, 0)
        tl.store(OUT + at, (acc / total[:, None]).to(OUT.dtype.element_ty), mask=here)


def tiling(programs: int, itemsize: int, head: int) -> tuple[int, int, int]:
    """(keys of a block, warps, stages), by measurement. A program that has a multiprocessor to itself wants to read far
    ahead; of some hundreds, all should be there at once; beyond, the longest should not be the last to finish."""
    if itemsize > 2:
        block, stages = 32, 2
    else:
        block, stages = (128, 3) if programs <= 132 else (64, 2) if programs < 1024 else (64, 3)
    block, stages = launch.fitted(block, stages, tile=TILE, head=head, itemsize=itemsize)
    return block, 4, stages
