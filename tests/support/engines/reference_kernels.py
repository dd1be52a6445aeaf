"""What the kernels of the GPU engine compute, in plain torch on any device: the reference that they are tested against.
A test that imports this module can run the GPU engine without a GPU.

Rules:
- values are rounded in the order of transformers' Llama and Qwen3 modules; `cos` and `sin` are tables in the model's
  dtype, because transformers rounds them before use;
- a row's keys and values are written to the page that its slot's page table lists for the row's position, or to the
  scratch page if the slot is inactive;
- tokens are sampled as in `windfall.engine.torch.sampler`: from (seed, position, logits) and nothing else;
- tokens are drafted and verified as in `windfall.engine.drafts`.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from windfall.engine.cuda import decoder
from windfall.engine.cuda.adapters import ProjectionAdapters, RowGroups, rows_of_tile
from windfall.engine.cuda.sampling import sample
from windfall.engine.cuda.splits import min_split_tokens, splits_for
from windfall.engine.cuda.state import DeviceState, KVPool, PrefixGroups, Spans, Texts
from windfall.engine.drafts import KNOWN, MOST, count_run, longest_match, verify

__all__ = ["min_split_tokens", "sample", "splits_for"]

decoder.KERNELS["cpu"] = __name__


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
    width: int = 1,
) -> Tensor:
    """Normalize queries and keys if norm weights are given, rotate them, and store keys and values in the pool. Returns
    the queries (T, heads, head)."""
    head = qkv.shape[-1] // (heads + 2 * kv_heads)
    q, k, v = qkv.view(-1, heads + 2 * kv_heads, head).split([heads, kv_heads, kv_heads], 1)
    q = q if q_weight is None else _rms_norm(q, q_weight, eps)
    k = k if k_weight is None else _rms_norm(k, k_weight, eps)
    c, s = cos[positions.long()][:, None], sin[positions.long()][:, None]
    at = slots.long().repeat_interleave(width)
    ahead = torch.arange(width, device=slots.device).repeat(len(slots))
    # A finished slot may be one token past the end of its page table, and a draft further.
    column = (positions.long() // pool.page_size).clamp_max(state.table.shape[1] - 1)
    page = torch.where(state.left[at] > ahead, state.table[at, column], pool.scratch).long()
    row = positions.long() % pool.page_size
    data = _data(pool)[layer]
    data[0][page, :, row] = _rotate(k, c, s).to(pool.dtype)
    data[1][page, :, row] = v.to(pool.dtype)
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
    width: int = 1,
) -> Tensor:
    """Attend `width` queries per row: the first to tokens 0 to `length` of its slot, the next to one token more. The
    result is zero for rows of inactive slots. Without a window, the rows of a prefix group read the shared prefix from
    the pages of the group's first row."""
    del splits  # they do not change the sum
    at = rows.long()
    active = (state.left[at] > 0).repeat_interleave(width)
    length = state.length[at].repeat_interleave(width) + torch.arange(width, device=rows.device).repeat(len(rows))
    pages = min(int(torch.where(active, length, 0).max()) // pool.page_size + 1, state.table.shape[1])
    table = state.table[at, :pages].long()
    if prefix_groups is not None and window is None:
        _use_shared_prefix(table, prefix_groups, pool.page_size)
    table = table.repeat_interleave(width, 0)
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
    width: int = 1,
) -> Tensor:
    """`rope_and_store`, then `decode_attention`. `positions` come from `decode_inputs`."""
    q = rope_and_store(
        qkv, rows, positions, state, pool, layer, cos, sin, q_weight, k_weight, eps, heads, pool.kv_heads, width
    )
    return decode_attention(q, rows, state, pool, layer, scale, window, splits, prefix_groups, width)


def _attention(q: Tensor, k: Tensor, v: Tensor, visible: Tensor, scale: float) -> Tensor:
    """Attention of q (B, heads, T, head) over k and v (B, kv_heads, N, head), in float32."""
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = (q.float() @ k.transpose(-1, -2)) * scale
    return torch.softmax(scores.masked_fill(~visible, -1e30), -1) @ v


def prefill_attention(
    q: Tensor, spans: Spans, state: DeviceState, pool: KVPool, layer: int, scale: float, window: int | None
) -> Tensor:
    """Causal attention of every tile over its sequence so far. The output of rows outside all tiles is zero."""
    out = torch.zeros_like(q)
    for slot, first, count, start in (t for t in spans.tiles.tolist() if t[2]):
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


def decode_inputs(state: DeviceState, rows: Tensor, texts: Texts | None, width: int) -> tuple[Tensor, Tensor, Tensor]:
    """The input tokens (B * width) int64 and positions int32 of a decode step: the newest token of every row's slot,
    then the tokens drafted for it. Also the tokens that are expected to be sampled, -1 where there are none."""
    ids, positions, expected = [], [], []
    for slot in rows.tolist():
        following = _following(state, texts, slot, width)
        ids += [int(state.last[slot]), *(max(t, 0) for t in following[: width - 1])]
        positions += [int(state.length[slot]) + w for w in range(width)]
        expected += following
    int32 = {"dtype": torch.int32, "device": rows.device}
    return torch.tensor(ids, device=rows.device), torch.tensor(positions, **int32), torch.tensor(expected, **int32)


def _following(state: DeviceState, texts: Texts | None, slot: int, width: int) -> list[int]:
    """The next `width` tokens at the place that a slot follows."""
    place = int(state.match[slot])
    if texts is None or not place:
        return [-1] * width
    row, at = divmod(place & ((1 << 40) - 1), texts.tokens.shape[1])
    known = texts.tokens[row, at : min(int(texts.length[row]), at + width)].tolist()
    return known + [-1] * (width - len(known))


def accept(
    rows: Tensor,
    state: DeviceState,
    texts: Texts | None,
    tokens: Tensor,
    logprobs: Tensor,
    expected: Tensor | None,
    out: Tensor,
    out_row: Tensor,
    width: int,
) -> None:
    """Write the accepted tokens and log-probs of every row's slot to `width` rows of `out`, beginning at `out_row`, and
    -1 for the others; update the slots and their texts."""
    first = int(out_row)
    for n, slot in enumerate(rows.tolist()):
        left = int(state.left[slot])
        drawn = tokens[n * width : (n + 1) * width].tolist()
        guesses = [] if expected is None else expected[n * width : (n + 1) * width].tolist()
        stop = set(state.stop[slot].tolist())
        count, right = verify(drawn, guesses, left, stop)
        for w in range(width):
            out[first + w, 0, n] = drawn[w] if w < count else -1
            out[first + w, 1, n] = logprobs.view(torch.int32)[n * width + w] if w < count else 0
        if not count:
            continue
        state.last[slot] = drawn[count - 1]
        state.length[slot] += count
        state.position[slot] += count
        state.left[slot] = 0 if drawn[count - 1] in stop else left - count
        row = int(state.text_row[slot])
        if texts is None or row < 0:
            continue
        known = int(texts.length[row])
        end = min(known + count, texts.tokens.shape[1] - 1)
        texts.tokens[row, known:end] = torch.tensor(drawn[: end - known], dtype=torch.int32)
        texts.length[row] = end
        goes_on = right == width and int(state.left[slot]) > 0
        if expected is None:
            state.run[slot] = 0
        else:
            state.run[slot] = count_run(texts.runs[:-1], int(state.run[slot]), count, goes_on)
            texts.runs[-1] += sum(t >= 0 for t in guesses[: min(width, left) - 1])
        state.search[slot] = int(not goes_on)
        state.match[slot] = state.match[slot] + width if goes_on else 0


def find_matches(rows: Tensor, state: DeviceState, texts: Texts) -> None:
    """Let every row's slot that follows no place follow the one with the longest agreement, if there is one."""
    size = texts.tokens.shape[1]
    for slot in rows.tolist():
        own = int(state.text_row[slot])
        if int(state.left[slot]) <= 0 or own < 0 or not int(state.search[slot]):
            continue
        mine = texts.tokens[own, : int(texts.length[own])].cpu().numpy()
        family = texts.families[int(state.text_family[slot])]
        family = torch.cat([family[family >= 0], family.new_tensor([own])]).unique().long()  # sorted
        lengths = texts.length[family].cpu().numpy()
        found = longest_match(texts.tokens[family].cpu().numpy(), lengths, mine[-MOST:])
        if found is not None:
            rank = found.agreed * (KNOWN + 1) + min(int(lengths[found.row]) - found.at, KNOWN)
            state.match[slot] = rank << 40 | int(family[found.row]) * size + found.at


def group_rows(slots: Tensor, state: DeviceState, adapters: int, width: int = 1) -> RowGroups:
    """The rows of a pass by adapter, `width` rows for each of these slots. Entries of unused tiles have no rows."""
    numbers = [adapters if n < 0 else n for n in state.adapter[slots.long()].repeat_interleave(width).tolist()]
    tile = rows_of_tile(len(numbers))
    order, tiles = list[int](), [[0, 0, 0] for _ in range(len(numbers) // tile + adapters + 1)]
    for adapter in range(adapters + 1):
        own, entry = [n for n, number in enumerate(numbers) if number == adapter], len(order) // tile + adapter
        for first in range(0, len(own), tile):
            tiles[entry] = [adapter, len(order) + first, min(tile, len(own) - first)]
            entry += 1
        order += own
    both = [torch.tensor(values, dtype=torch.int32, device=slots.device) for values in (order, tiles)]
    return RowGroups(order=both[0], tiles=both[1], tile=tile)


def add_adapters(y: Tensor, adapters: ProjectionAdapters, groups: RowGroups) -> Tensor:
    """The outputs of a projection (rows, outputs). `y`: the product with `adapters.weight`: the outputs of the weights,
    and h (parts * rank) of every adapter."""
    count, parts = len(adapters.b), len(adapters.outputs)
    out, hidden = y[:, : sum(adapters.outputs)].clone(), y[:, sum(adapters.outputs) :].unflatten(1, (count, parts, -1))
    for adapter, first, number in groups.tiles.tolist():
        if adapter < count:
            rows = groups.order[first : first + number].long()
            h = (hidden[rows, adapter].float() * adapters.scale[adapter]).to(y.dtype).float()
            b = adapters.b[adapter].float().split(adapters.outputs)
            added = torch.cat([h[:, part] @ b[part].T for part in range(parts)], 1)
            out[rows] = (out[rows].float() + added).to(y.dtype)
    return out


def add_adapters_in_place(y: Tensor, adapters: ProjectionAdapters, groups: RowGroups) -> Tensor:
    """As `add_adapters`, but returns a part of `y`."""
    out = y[:, : sum(adapters.outputs)]
    return out.copy_(add_adapters(y, adapters, groups))


def add_adapters_swiglu(y: Tensor, adapters: ProjectionAdapters, groups: RowGroups) -> Tensor:
    return swiglu(add_adapters(y, adapters, groups))
