"""What the kernels of the GPU engine compute, in plain torch on any device: the reference that they are tested against.
A test that imports this module can run the GPU engine without a GPU.

Rules:
- values are rounded in the order of transformers' Llama and Qwen3 modules; `cos` and `sin` are tables in the model's
  dtype, because transformers rounds them before use;
- a row's keys and values are written to the page that its slot's page table lists for the row's position, or to the
  scratch page if the slot is inactive;
- tokens are sampled as in `windfall.engine.torch.sampler`: from (seed, position, logits) and nothing else.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from windfall.engine.cuda import decoder
from windfall.engine.cuda.sampling import sample
from windfall.engine.cuda.splits import min_split_tokens, splits_for
from windfall.engine.cuda.state import DeviceState, KVPool, PrefixGroups, Spans

__all__ = ["min_split_tokens", "sample", "splits_for"]

decoder.KERNELS["cpu"] = __name__


def decode_inputs(state: DeviceState, rows: Tensor) -> tuple[Tensor, Tensor]:
    """The input tokens (B,) int64 and positions (B,) int32 of a decode step."""
    at = rows.long()
    return state.last[at].long(), state.length[at]


def add_rms_norm(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The sum of `x` and `residual`, and its RMSNorm: (normed, sum)."""
    residual = x if residual is None else residual + x
    return _rms_norm(residual, weight, eps), residual


def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return weight * wide.to(x.dtype)


def rope_and_store(
    qkv: Tensor,
    slots: Tensor,
    positions: Tensor,
    state: DeviceState,
    pool: KVPool,
    layer: int,
    cos: Tensor,
    sin: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    eps: float,
    heads: int,
    kv_heads: int,
) -> Tensor:
    """Normalize queries and keys if norm weights are given, rotate them, and store keys and values in the pool. Returns
    the queries (T, heads, head)."""
    head = qkv.shape[-1] // (heads + 2 * kv_heads)
    q, k, v = qkv.view(-1, heads + 2 * kv_heads, head).split([heads, kv_heads, kv_heads], 1)
    q = q if q_weight is None else _rms_norm(q, q_weight, eps)
    k = k if k_weight is None else _rms_norm(k, k_weight, eps)
    c, s = cos[positions.long()][:, None], sin[positions.long()][:, None]
    at = slots.long()
    # A finished slot may be one token past the end of its page table.
    column = (positions.long() // pool.page_size).clamp_max(state.table.shape[1] - 1)
    page = torch.where(state.left[at] > 0, state.table[at, column], pool.scratch).long()
    row = positions.long() % pool.page_size
    data = _data(pool)[layer]
    data[0][page, :, row] = _rotate(k, c, s)
    data[1][page, :, row] = v
    return _rotate(q, c, s)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    left, right = x.chunk(2, -1)
    return x * cos + torch.cat((-right, left), -1) * sin


def _data(pool: KVPool) -> Tensor:
    assert pool.data is not None, "the pool was freed"
    return pool.data


def decode_attention(
    q: Tensor,
    rows: Tensor,
    state: DeviceState,
    pool: KVPool,
    layer: int,
    scale: float,
    window: int | None,
    splits: int,
    prefix_groups: PrefixGroups | None = None,
) -> Tensor:
    """Attend one query per row to tokens 0 to `length` of its slot. The result is zero for rows of inactive slots.
    Without a window, the rows of a prefix group read the shared prefix from the pages of the group's first row."""
    del splits  # they do not change the sum
    at = rows.long()
    length, active = state.length[at], state.left[at] > 0
    pages = int(torch.where(active, length, 0).max()) // pool.page_size + 1
    table = state.table[at, :pages].long()
    if prefix_groups is not None and window is None:
        _use_shared_prefix(table, prefix_groups, pool.page_size)
    # (B, kv_heads, tokens, head)
    k, v = (_data(pool)[layer][i][table].transpose(1, 2).flatten(2, 3).float() for i in (0, 1))
    token = torch.arange(k.shape[2], device=q.device)
    visible = token <= length[:, None]
    if window is not None:
        visible &= token > length[:, None] - window
    out = _attention(q[:, :, None], k, v, visible[:, None, None], scale)[:, :, 0]
    return torch.where(active[:, None], out.flatten(1), 0.0).to(q.dtype)


def _use_shared_prefix(table: Tensor, prefix_groups: PrefixGroups, size: int) -> None:
    """Let the page tables of a group's rows start with the pages of its first row."""
    shared = torch.zeros_like(prefix_groups.shared_tokens)
    columns = (prefix_groups.first.tolist(), prefix_groups.count.tolist(), prefix_groups.tokens.tolist())
    for first, count, tokens in zip(*columns, strict=True):
        table[first : first + count, : tokens // size] = table[first, : tokens // size].clone()
        shared[first : first + count] = tokens
    assert torch.equal(shared, prefix_groups.shared_tokens), "prefix groups and rows disagree"


def rope_store_and_decode(
    qkv: Tensor,
    rows: Tensor,
    positions: Tensor,
    state: DeviceState,
    pool: KVPool,
    layer: int,
    cos: Tensor,
    sin: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    eps: float,
    heads: int,
    scale: float,
    window: int | None,
    splits: int,
    prefix_groups: PrefixGroups | None = None,
) -> Tensor:
    """`rope_and_store`, then `decode_attention`. `positions` come from `decode_inputs`."""
    q = rope_and_store(
        qkv, rows, positions, state, pool, layer, cos, sin, q_weight, k_weight, eps, heads, pool.kv_heads
    )
    return decode_attention(q, rows, state, pool, layer, scale, window, splits, prefix_groups)


def _attention(q: Tensor, k: Tensor, v: Tensor, visible: Tensor, scale: float) -> Tensor:
    """Attention of q (B, heads, T, head) over k and v (B, kv_heads, N, head), in float32."""
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = (q.float() @ k.transpose(-1, -2)) * scale
    return torch.softmax(scores.masked_fill(~visible, -1e30), -1) @ v


def prefill_attention(
    q: Tensor, spans: Spans, state: DeviceState, pool: KVPool, layer: int, scale: float, window: int | None
) -> Tensor:
    """Causal attention of every chunk over its sequence so far. The output of rows outside all chunks is zero."""
    out = torch.zeros_like(q)
    columns = (spans.slot.tolist(), spans.first.tolist(), spans.count.tolist(), spans.start.tolist())
    for slot, first, count, start in zip(*columns, strict=True):
        end = start + count
        table = state.table[slot, : -(-end // pool.page_size)].long()
        k, v = (_data(pool)[layer][i][table].transpose(0, 1).flatten(1, 2)[:, :end].float() for i in (0, 1))
        token, own = torch.arange(end, device=q.device), torch.arange(start, end, device=q.device)[:, None]
        visible = token <= own
        if window is not None:
            visible &= token > own - window
        attended = _attention(q[first : first + count].transpose(0, 1)[None], k[None], v[None], visible, scale)
        out[first : first + count] = attended[0].transpose(0, 1).to(q.dtype)
    return out.flatten(1)


def swiglu(gate_up: Tensor) -> Tensor:
    """silu(first half) * second half."""
    left, right = gate_up.chunk(2, -1)
    return F.silu(left) * right
