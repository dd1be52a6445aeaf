"""What the kernels of the GPU engine compute, in plain torch on any device: the definition they are tested against.

Rules:
- roundings come in the order of transformers' Llama and Qwen3 modules; `cos` and `sin` are tables in the model's dtype,
  as transformers rounds them before use;
- keys and values of a row go to the page of its slot's table; those of an inactive slot go to the scratch page;
- tokens are drawn as by `windfall.engine.torch.sampler`: from (seed, position, logits) and nothing else;
- an inactive slot never changes, whatever rows name it.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from windfall.engine.cuda.splits import part_tokens, splits_for
from windfall.engine.cuda.state import DeviceState, Families, Pool, Spans

__all__ = [
    "attend",
    "begin",
    "decode",
    "draw",
    "gate",
    "norm",
    "part_tokens",
    "place",
    "place_and_decode",
    "splits_for",
]

_GOLDEN, _MIX1, _MIX2 = (x - 2**64 for x in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))


def begin(state: DeviceState, rows: Tensor) -> tuple[Tensor, Tensor]:
    """The tokens (B,) int64 and positions (B,) int32 of a decode step."""
    at = rows.long()
    return state.last[at].long(), state.length[at]


def norm(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The sum of `x` and `residual`, and its RMSNorm: (normed, sum)."""
    residual = x if residual is None else residual + x
    return _rms(residual, weight, eps), residual


def _rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return weight * wide.to(x.dtype)


def place(
    qkv: Tensor, slots: Tensor, positions: Tensor, state: DeviceState, pool: Pool, layer: int, cos: Tensor, sin: Tensor,
    q_weight: Tensor | None, k_weight: Tensor | None, eps: float, heads: int, kv_heads: int,
) -> Tensor:  # fmt: skip
    """Norm (where there are weights) and rotate queries and keys, and put keys and values into the pool. Returns the
    queries (T, heads, head)."""
    head = qkv.shape[-1] // (heads + 2 * kv_heads)
    q, k, v = qkv.view(-1, heads + 2 * kv_heads, head).split([heads, kv_heads, kv_heads], 1)
    q = q if q_weight is None else _rms(q, q_weight, eps)
    k = k if k_weight is None else _rms(k, k_weight, eps)
    c, s = cos[positions.long()][:, None], sin[positions.long()][:, None]
    at = slots.long()
    # A slot that has come to its end may stand one token behind the end of its table.
    column = (positions.long() // pool.page_size).clamp_max(state.table.shape[1] - 1)
    page = torch.where(state.left[at] > 0, state.table[at, column], pool.scratch).long()
    row = positions.long() % pool.page_size
    data = _data(pool)[layer]
    data[0][page, :, row] = _rotated(k, c, s)
    data[1][page, :, row] = v
    return _rotated(q, c, s)


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    left, right = x.chunk(2, -1)
    return x * cos + torch.cat((-right, left), -1) * sin


def _data(pool: Pool) -> Tensor:
    assert pool.data is not None, "the pool was given up"
    return pool.data


def decode(
    q: Tensor, rows: Tensor, state: DeviceState, pool: Pool, layer: int, scale: float, window: int | None, splits: int,
    families: Families | None = None,
) -> Tensor:  # fmt: skip
    """One query per row, over tokens 0 to `length` of its slot. Rows of inactive slots: zero. A family reads its shared
    tokens where the first of its rows has them; where there is a window, there are no families."""
    del splits  # the sum is the same however it is cut
    at = rows.long()
    length, active = state.length[at], state.left[at] > 0
    pages = int(torch.where(active, length, 0).max()) // pool.page_size + 1
    table = state.table[at, :pages].long()
    if families is not None and window is None:
        _read_together(table, families, pool.page_size)
    k, v = (
        _data(pool)[layer][i][table].transpose(1, 2).flatten(2, 3).float() for i in (0, 1)
    )  # (B, kv_heads, tokens, head)
    token = torch.arange(k.shape[2], device=q.device)
    seen = token <= length[:, None]
    if window is not None:
        seen &= token > length[:, None] - window
    out = _weighted(q[:, :, None], k, v, seen[:, None, None], scale)[:, :, 0]
    return torch.where(active[:, None], out.flatten(1), 0.0).to(q.dtype)


def _read_together(table: Tensor, families: Families, size: int) -> None:
    """Every row finds what its family shares where the first row of it does."""
    shared = torch.zeros_like(families.shared)
    columns = (families.first.tolist(), families.count.tolist(), families.tokens.tolist())
    for first, count, tokens in zip(*columns, strict=True):
        table[first : first + count, : tokens // size] = table[first, : tokens // size].clone()
        shared[first : first + count] = tokens
    assert torch.equal(shared, families.shared), "families and their rows disagree"


def place_and_decode(
    qkv: Tensor, rows: Tensor, positions: Tensor, state: DeviceState, pool: Pool, layer: int, cos: Tensor, sin: Tensor,
    q_weight: Tensor | None, k_weight: Tensor | None, eps: float, heads: int, scale: float, window: int | None,
    splits: int, families: Families | None = None,
) -> Tensor:  # fmt: skip
    """`place`, then `decode`. `positions` are those of `begin`."""
    q = place(qkv, rows, positions, state, pool, layer, cos, sin, q_weight, k_weight, eps, heads, pool.shape[3])
    return decode(q, rows, state, pool, layer, scale, window, splits, families)


def _weighted(q: Tensor, k: Tensor, v: Tensor, seen: Tensor, scale: float) -> Tensor:
    """Attention of q (B, heads, T, head) over k and v (B, kv_heads, N, head), in float32."""
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = (q.float() @ k.transpose(-1, -2)) * scale
    return torch.softmax(scores.masked_fill(~seen, -1e30), -1) @ v


def attend(
    q: Tensor, spans: Spans, state: DeviceState, pool: Pool, layer: int, scale: float, window: int | None
) -> Tensor:
    """Causal attention of every chunk over its sequence so far. Rows outside all chunks: zero."""
    out = torch.zeros_like(q)
    columns = (spans.slot.tolist(), spans.first.tolist(), spans.count.tolist(), spans.start.tolist())
    for slot, first, count, start in zip(*columns, strict=True):
        end = start + count
        table = state.table[slot, : -(-end // pool.page_size)].long()
        k, v = (_data(pool)[layer][i][table].transpose(0, 1).flatten(1, 2)[:, :end].float() for i in (0, 1))
        token, own = torch.arange(end, device=q.device), torch.arange(start, end, device=q.device)[:, None]
        seen = token <= own
        if window is not None:
            seen &= token > own - window
        here = _weighted(q[first : first + count].transpose(0, 1)[None], k[None], v[None], seen, scale)
        out[first : first + count] = here[0].transpose(0, 1).to(q.dtype)
    return out.flatten(1)


def gate(gate_up: Tensor) -> Tensor:
    """silu(first half) * second half."""
    left, right = gate_up.chunk(2, -1)
    return F.silu(left) * right


def draw(logits: Tensor, rows: Tensor, state: DeviceState, tokens_out: Tensor, logprobs_out: Tensor, cut: bool) -> None:
    """The next token of every active row and its log-prob (inactive: -1 and 0), and the state after it."""
    at = rows.long()
    active, temperature = state.left[at] > 0, state.temperature[at]
    greedy = temperature == 0.0
    logp = torch.log_softmax(logits.float() / torch.where(greedy, 1.0, temperature)[:, None], -1)
    weights = cut_weights(logp, state.top_k[at], state.top_p[at]) if cut else logp.exp()
    cumulative = weights.cumsum(-1, dtype=torch.float64)
    goal = uniform(state.seed[at], state.position[at]) * cumulative[:, -1]
    tokens = torch.searchsorted(cumulative, goal[:, None], right=True)[:, 0]
    tokens = torch.where(greedy, logp.argmax(-1), tokens).clamp_max(logits.shape[1] - 1)  # also if they are broken
    logprobs = logp.gather(-1, tokens[:, None])[:, 0]
    tokens_out.copy_(torch.where(active, tokens, -1))
    logprobs_out.copy_(torch.where(active, logprobs, 0.0))
    _advance(state, at, active, tokens.int())


def cut_weights(logp: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """Probabilities with everything outside top-k and top-p set to zero; ties keep vocabulary order. Waits for nothing
    on the host."""
    p = logp.exp()
    ordered, index = torch.sort(p, dim=-1, descending=True, stable=True)
    rank = torch.arange(p.shape[-1], device=p.device)
    ordered = torch.where(rank < torch.where(top_k > 0, top_k, p.shape[-1])[:, None], ordered, 0.0)
    before = ordered.cumsum(-1, dtype=torch.float64) - ordered
    total = ordered.sum(-1, keepdim=True, dtype=torch.float64)
    out = (before >= top_p.double()[:, None] * total) & (rank > 0) & (top_p < 1.0)[:, None]
    return torch.zeros_like(p).scatter_(-1, index, ordered.masked_fill(out, 0.0))


def uniform(seed: Tensor, position: Tensor) -> Tensor:
    """One number in [0, 1) as float64 for each (seed, position): `windfall.engine.torch.sampler.uniform` on tensors.

    >>> uniform(torch.tensor([7]), torch.tensor([0], dtype=torch.int32)).tolist()
    [0.7215081806049701]
    """
    bits = _mix(_mix(seed + _GOLDEN) + (position.long() + 1) * _GOLDEN)
    return _shifted(bits, 12).double() * 2.0**-52


def _mix(x: Tensor) -> Tensor:
    x = (x ^ _shifted(x, 30)) * _MIX1
    x = (x ^ _shifted(x, 27)) * _MIX2
    return x ^ _shifted(x, 31)


def _shifted(x: Tensor, by: int) -> Tensor:
    """To the right, filled up with zeros: torch has signed integers only."""
    return (x >> by) & (2 ** (64 - by) - 1)


def _advance(state: DeviceState, at: Tensor, active: Tensor, tokens: Tensor) -> None:
    """The state after `tokens`. Rows of an inactive slot write back what is there, so it does not matter how many."""
    step = active.int()
    stopped = (tokens[:, None] == state.stop[at]).any(-1)
    state.last[at] = torch.where(active, tokens, state.last[at])
    state.length[at] = state.length[at] + step
    state.position[at] = state.position[at] + step
    state.left[at] = torch.where(active & ~stopped, state.left[at] - step, 0)
