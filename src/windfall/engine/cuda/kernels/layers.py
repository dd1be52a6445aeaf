# pyright: reportMissingImports=false, reportIndexIssue=false
"""What a layer computes between its matrix products: norms, rotary embedding and KV store, SwiGLU.

Rules:
- each value is rounded to the model's dtype where transformers rounds it: products and sums are float32, then rounded;
- kernels are not specialized on integers that change from call to call, so each kernel is compiled once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_wait

from windfall.engine.cuda.kernels import launch
from windfall.engine.cuda.state import DeviceState, KVPool


@triton.jit
def _add_rms_norm(
    X, RESIDUAL, WEIGHT, NORMED, SUM, eps,
    SIZE: tl.constexpr, SIZE_P: tl.constexpr, ADD: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, SIZE_P)
    x = tl.load(X + row * SIZE + i, mask=i < SIZE, other=0.0).to(tl.float32)
    weight = tl.load(WEIGHT + i, mask=i < SIZE, other=0.0)
    if ADD:
        x += tl.load(RESIDUAL + row * SIZE + i, mask=i < SIZE, other=0.0).to(tl.float32)
        rounded = x.to(SUM.dtype.element_ty)
        tl.store(SUM + row * SIZE + i, rounded, mask=i < SIZE)
        x = rounded.to(tl.float32)
    normed = (x * tl.rsqrt(tl.sum(x * x, 0) / SIZE + eps)).to(NORMED.dtype.element_ty).to(tl.float32)
    normed = (normed * weight.to(tl.float32)).to(NORMED.dtype.element_ty)
    tl.store(NORMED + row * SIZE + i, normed, mask=i < SIZE)


def add_rms_norm(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The sum of `x` and `residual`, and its RMSNorm: (normed, sum)."""
    size = x.shape[-1]
    normed = torch.empty_like(x)
    total = x if residual is None else torch.empty_like(x)
    _add_rms_norm[(x.numel() // size,)](
        x, x if residual is None else residual, weight, normed, total, eps, SIZE=size,
        SIZE_P=triton.next_power_of_2(size), ADD=residual is not None, num_warps=4 if size <= 2048 else 8,
        **launch.options(),
    )  # fmt: skip
    return normed, total


@triton.jit
def _head_norm(a, b, WEIGHT, i, valid, eps, HEAD: tl.constexpr):
    """RMSNorm of heads given as two halves (heads, half), with transformers' intermediate roundings."""
    dtype: tl.constexpr = WEIGHT.dtype.element_ty
    factor = tl.rsqrt((tl.sum(a * a, 1) + tl.sum(b * b, 1)) / HEAD + eps)[:, None]
    wa = tl.load(WEIGHT + i, mask=valid, other=0.0).to(tl.float32)
    wb = tl.load(WEIGHT + HEAD // 2 + i, mask=valid, other=0.0).to(tl.float32)
    a = ((a * factor).to(dtype).to(tl.float32) * wa).to(dtype).to(tl.float32)
    b = ((b * factor).to(dtype).to(tl.float32) * wb).to(dtype).to(tl.float32)
    return a, b


@triton.jit(
    do_not_specialize=["layer", "scratch", "table_stride", "columns", "width"],
    do_not_specialize_on_alignment=["SLOTS", "POSITIONS", "LEFT", "TABLE", "BASE"],
)
def _rope_and_store(
    QKV, SLOTS, POSITIONS, LEFT, TABLE, BASE, COS, SIN, QW, KW, OUT, layer, half, scratch, table_stride, columns, width,
    eps,
    KV_HEADS: tl.constexpr, KV_HEADS_P: tl.constexpr, GROUP: tl.constexpr, HEAD: tl.constexpr, HALF_P: tl.constexpr,
    PAGE: tl.constexpr, PAGE_STRIDE: tl.constexpr, NORM: tl.constexpr, KV: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program handles `KV_HEADS` heads of a row: some of the queries, or all keys, or all values."""
    if PDL:
        gdc_wait()
    row, what = tl.program_id(0).to(tl.int64), tl.program_id(1)
    slot, position = tl.load(SLOTS + row // width), tl.load(POSITIONS + row)
    dtype: tl.constexpr = QKV.dtype.element_ty
    h = tl.arange(0, KV_HEADS_P)[:, None]
    # All tiles are full, even for values that are the same for all heads: loads stay wide and nothing goes through
    # shared memory.
    i = tl.broadcast_to(tl.arange(0, HALF_P)[None, :], [KV_HEADS_P, HALF_P])
    valid = (h < KV_HEADS) & (i < HEAD // 2)
    source = QKV + (row * (GROUP + 2) + what) * (KV_HEADS * HEAD) + h * HEAD + i
    a = tl.load(source, mask=valid, other=0.0).to(tl.float32)
    b = tl.load(source + HEAD // 2, mask=valid, other=0.0).to(tl.float32)
    if what <= GROUP:
        if NORM:
            a, b = _head_norm(a, b, QW if what < GROUP else KW, i, valid, eps, HEAD)
        at = position * HEAD + i
        ca = tl.load(COS + at, mask=valid, other=0.0).to(tl.float32)
        cb = tl.load(COS + at + HEAD // 2, mask=valid, other=0.0).to(tl.float32)
        sa = tl.load(SIN + at, mask=valid, other=0.0).to(tl.float32)
        sb = tl.load(SIN + at + HEAD // 2, mask=valid, other=0.0).to(tl.float32)
        x = (a * ca).to(dtype).to(tl.float32) + (-b * sa).to(dtype).to(tl.float32)
        b = (b * cb).to(dtype).to(tl.float32) + (a * sb).to(dtype).to(tl.float32)
        a = x
    if what < GROUP:
        to = OUT + (row * GROUP + what) * (KV_HEADS * HEAD) + h * HEAD + i
        tl.store(to, a.to(dtype), mask=valid)
        tl.store(to + HEAD // 2, b.to(dtype), mask=valid)
    else:
        # A finished slot may be one token past the end of its page table, and a draft further.
        column = tl.minimum(position // PAGE, columns - 1)
        page = tl.load(TABLE + slot.to(tl.int64) * table_stride + column)
        page = tl.where(tl.load(LEFT + slot) > row % width, page, scratch).to(tl.int64)
        pool = tl.multiple_of(tl.load(BASE).to(tl.pointer_type(KV)), 16)
        place = pool + (layer.to(tl.int64) * 2 + (what - GROUP)) * half + page * PAGE_STRIDE
        place = place + (position % PAGE) * HEAD + h * (PAGE * HEAD) + i
        tl.store(place, a.to(dtype).to(KV), mask=valid)
        tl.store(place + HEAD // 2, b.to(dtype).to(KV), mask=valid)


def rope_and_store(
    qkv: Tensor, slots: Tensor, positions: Tensor, state: DeviceState, pool: KVPool, layer: int, cos: Tensor,
    sin: Tensor, q_weight: Tensor | None, k_weight: Tensor | None, eps: float, heads: int, kv_heads: int,
    width: int = 1,
) -> Tensor:  # fmt: skip
    """See tests/support/engines/reference_kernels.py. `cos` and `sin` are tables in the model's dtype."""
    count = qkv.shape[0]
    head = qkv.shape[-1] // (heads + 2 * kv_heads)
    out = torch.empty((count, heads, head), dtype=qkv.dtype, device=qkv.device)
    heads_p, half_p = triton.next_power_of_2(kv_heads), triton.next_power_of_2(head // 2)
    _rope_and_store[(count, heads // kv_heads + 2)](
        qkv, slots, positions, state.left, state.table, pool.base, cos, sin,
        cos if q_weight is None else q_weight, cos if k_weight is None else k_weight, out, layer,
        pool.value_offset, pool.scratch, state.table.stride(0), state.table.shape[1],
        width, eps,
        KV_HEADS=kv_heads, KV_HEADS_P=heads_p, GROUP=heads // kv_heads, HEAD=head, HALF_P=half_p, PAGE=pool.page_size,
        PAGE_STRIDE=pool.page_stride, NORM=q_weight is not None, KV=launch.ELEMENT_TYPES[pool.dtype],
        num_warps=max(1, min(8, heads_p * half_p // 256)),
        **launch.options(),
    )  # fmt: skip
    return out


@triton.jit
def _swiglu(GATE_UP, OUT, SIZE: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    if PDL:
        gdc_wait()
    row, i = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    left = tl.load(GATE_UP + row * (2 * SIZE) + i, mask=i < SIZE, other=0.0).to(tl.float32)
    right = tl.load(GATE_UP + row * (2 * SIZE) + SIZE + i, mask=i < SIZE, other=0.0).to(tl.float32)
    silu = (left / (1.0 + tl.exp(-left))).to(OUT.dtype.element_ty).to(tl.float32)
    tl.store(OUT + row * SIZE + i, (silu * right).to(OUT.dtype.element_ty), mask=i < SIZE)


def swiglu(gate_up: Tensor) -> Tensor:
    """silu(first half) * second half."""
    count, size = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty((count, size), dtype=gate_up.dtype, device=gate_up.device)
    _swiglu[(count, triton.cdiv(size, 1024))](gate_up, out, SIZE=size, BLOCK=1024, num_warps=4, **launch.options())
    return out
