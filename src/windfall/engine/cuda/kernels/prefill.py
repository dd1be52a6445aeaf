# pyright: reportMissingImports=false, reportIndexIssue=false
"""Attention of a prefill: chunks of several sequences, each causal over the pages of its sequence so far.

A program handles some tokens of a chunk, for all query heads that share a kv head: one row of its tile is one (token,
query head) pair. So a short chunk over a long context reads each key once; the siblings of a group have such chunks.
The list of tiles is data: one captured launch serves every combination of chunks.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_wait

from windfall.engine.cuda.kernels import launch
from windfall.engine.cuda.kernels.attention_common import attend_block
from windfall.engine.cuda.state import DeviceState, KVPool, Spans

_LOG2E = 1.4426950408889634


@triton.jit(
    do_not_specialize=["layer", "window", "table_stride"],
    do_not_specialize_on_alignment=["TILES", "TABLE", "BASE"],
)
def _prefill_attention(
    Q, OUT, TILES, TABLE, BASE, layer, half, table_stride, window, scale,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD: tl.constexpr, HEAD_P: tl.constexpr, PAGE: tl.constexpr,
    PAGE_STRIDE: tl.constexpr,
    TILE: tl.constexpr, BLOCK: tl.constexpr, WINDOWED: tl.constexpr, KV: tl.constexpr, COMPUTE: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_wait()
    kv, entry = tl.program_id(0), TILES + tl.program_id(1) * 4
    count = tl.load(entry + 2)
    if count == 0:
        return
    slot, row, start = tl.load(entry), tl.load(entry + 1), tl.load(entry + 3)
    m, d, n = tl.arange(0, TILE), tl.arange(0, HEAD_P), tl.arange(0, BLOCK)
    token = m // GROUP
    real = token < count
    at = (row + token).to(tl.int64) * (KV_HEADS * GROUP * HEAD)
    at = (at + (kv * GROUP + m % GROUP) * HEAD)[:, None] + d[None, :]
    valid = real[:, None] & (d < HEAD)[None, :]
    q = tl.load(Q + at, mask=valid, other=0.0).to(COMPUTE)
    own = start + token
    end = start + count
    begin = 0
    if WINDOWED:
        begin = tl.maximum(start - window + 1, 0) // BLOCK * BLOCK

    pool = tl.multiple_of(tl.load(BASE).to(tl.pointer_type(KV)), 16)
    keys = pool + layer.to(tl.int64) * 2 * half + kv * (PAGE * HEAD)
    table = TABLE + slot.to(tl.int64) * table_stride
    top = tl.full([TILE], -1e30, tl.float32)
    total = tl.zeros([TILE], tl.float32)
    acc = tl.zeros([TILE, HEAD_P], tl.float32)
    page = tl.load(table + (begin + n) // PAGE, mask=begin + n < end, other=0)
    for first in range(begin, end, BLOCK):
        t = first + n
        where = (page.to(tl.int64) * PAGE_STRIDE + (t % PAGE) * HEAD)[:, None] + d[None, :]
        wanted = (t < end)[:, None] & (d < HEAD)[None, :]
        page = tl.load(table + (t + BLOCK) // PAGE, mask=t + BLOCK < end, other=0)  # for the next iteration
        k = tl.load(keys + where, mask=wanted, other=0.0).to(COMPUTE)
        v = tl.load(keys + half + where, mask=wanted, other=0.0).to(COMPUTE)
        visible = t[None, :] <= own[:, None]
        if WINDOWED:
            visible = visible & (t[None, :] > own[:, None] - window)
        acc, top, total = attend_block(q, k, v, visible, acc, top, total, scale)
    tl.store(OUT + at, (acc / total[:, None]).to(OUT.dtype.element_ty), mask=valid)


def tiling(tile: int, itemsize: int, head: int) -> tuple[int, int, int]:
    """(keys of a block, warps, stages) for tiles of this many queries."""
    block, warps, stages = (32, 4, 2) if itemsize > 2 else (32, 4, 3) if tile <= 64 else (64, 8, 3)
    block, stages = launch.fit_tiling(block, stages, tile=tile, head=head, itemsize=itemsize)
    return block, warps, stages


def prefill_attention(
    q: Tensor, spans: Spans, state: DeviceState, pool: KVPool, layer: int, scale: float, window: int | None
) -> Tensor:
    """Causal attention of every tile over its sequence so far. The output of rows outside all tiles is undefined."""
    count, heads, head = q.shape
    kv_heads = pool.kv_heads
    out = torch.empty((count, heads * head), dtype=q.dtype, device=q.device)
    block, warps, stages = tiling(spans.tile, q.dtype.itemsize, triton.next_power_of_2(head))
    _prefill_attention[(kv_heads, len(spans.tiles))](
        q, out, spans.tiles, state.table, pool.base, layer,
        pool.value_offset, state.table.stride(0), window or 0, scale * _LOG2E,
        KV_HEADS=kv_heads, GROUP=heads // kv_heads, HEAD=head, HEAD_P=triton.next_power_of_2(head),
        PAGE=pool.page_size, PAGE_STRIDE=pool.page_stride, TILE=spans.tile,
        BLOCK=block, WINDOWED=window is not None, **launch.kv_types(q.dtype, pool.dtype), num_warps=warps,
        num_stages=stages,
        **launch.options(),
    )  # fmt: skip
    return out
