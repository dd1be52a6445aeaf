"""The one attention function that engine and trainer share, registered with transformers under the name "windfall".

transformers' model code hands every layer's query, key and value (1, heads, rows, size) to the registered function,
along with the keyword `batch` that the caller gave to the model. What a row may look at is the batch's business:

    Paged    the engine: rows of many sequences, each looking at the pages of its own
    Packed   the trainer (packed.py): whole sequences laid end to end in one row

so every decoder that transformers knows runs in both, unpatched, and both compute the same numbers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention as sdpa
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from windfall.errors import WindfallError

NAME = "windfall"


class AttentionBatch(Protocol):
    def attend(self, q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None) -> Tensor:
        """(rows, heads, size) in and out. Called once for every attention of the model, in the model's order."""
        ...


def attention(module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any = None, *,
              batch: AttentionBatch, scaling: float | None = None, sliding_window: int | None = None, dropout: float = 0.0,
              **other: Any) -> tuple[Tensor, None]:  # fmt: skip
    unknown = [name for name in ("softcap", "s_aux", "position_bias") if other.get(name) is not None]
    unknown += ["attention_mask"] * (attention_mask is not None) + ["dropout"] * bool(dropout)
    if unknown:
        raise WindfallError(
            f"{type(module).__name__} asks attention for {', '.join(unknown)}, which is not supported",
            fix="Use a model without it (Llama, Qwen, Mistral and SmolLM shapes have none).",
        )
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    return batch.attend(q, k, v, scale, sliding_window).contiguous().unsqueeze(0), None


ALL_ATTENTION_FUNCTIONS.register(NAME, attention)


class KVShape(NamedTuple):
    """What one attention of a model keeps of every token: (heads, size) of its keys and of its values."""

    keys: tuple[int, int]
    values: tuple[int, int]

    @property
    def numbers(self) -> int:
        return self.keys[0] * self.keys[1] + self.values[0] * self.values[1]


class _Shapes:
    """A batch that attends to nothing and remembers what it was asked."""

    def __init__(self) -> None:
        self.found: list[KVShape] = []

    def attend(self, q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None) -> Tensor:
        del scale, window
        self.found.append(KVShape((k.shape[1], k.shape[2]), (v.shape[1], v.shape[2])))
        return q.new_zeros(*q.shape[:2], v.shape[2])


@torch.inference_mode()
def cache_shapes(model: Any) -> list[KVShape]:
    """What the KV cache of this model must hold, one entry for every call of attention, in order: found by running one
    token through it. Configurations say it in too many ways, and a model may attend twice in a layer or in none."""
    batch, zero = _Shapes(), torch.zeros(1, 1, dtype=torch.long, device=model.device)
    model(input_ids=zero, position_ids=zero, use_cache=False, batch=batch)
    return batch.found


@dataclass(frozen=True, slots=True)
class Block:
    """Rows that attend together: S sequences with Q consecutive rows each, from row `first` of the batch on, over
    contexts padded to the same number of pages."""

    first: int
    pages: Tensor
    """(S * P,) page numbers."""
    positions: Tensor
    """(S, Q): where each row is in its sequence."""
    context: Tensor
    """(P * page size,): 0, 1, 2, ..."""
    _masks: dict[tuple[int | None, int], Tensor] = field(default_factory=dict)

    def mask(self, window: int | None, share: int, dtype: torch.dtype) -> Tensor:
        """(S, 1, share * Q, C): 0 where a row may look, -inf where it may not, for each head that shares a key head."""
        known = self._masks.get((window, share))
        if known is None:
            at = self.positions[..., None]
            hidden = self.context > at
            if window is not None:
                hidden |= self.context <= at - window
            blank = torch.zeros(hidden.shape, dtype=dtype, device=hidden.device)
            known = blank.masked_fill_(hidden, float("-inf"))[:, None].repeat(1, 1, share, 1)
            self._masks[window, share] = known
        return known


@dataclass(frozen=True, slots=True)
class Paged:
    pools: Iterator[tuple[Tensor, Tensor]]
    """Keys and values, each (pages, page size, heads, size), for every attention of the model in turn."""
    slots: Tensor
    """Where each row's own key and value go: page * page size + offset."""
    blocks: Sequence[Block]
    """All rows, in order."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None) -> Tensor:
        pool = next(self.pools, None)
        if pool is None or any(c.shape[2:] != x.shape[1:] for c, x in zip(pool, (k, v), strict=True)):
            there = "nothing" if pool is None else f"{[tuple(c.shape[2:]) for c in pool]} (heads, size)"
            asked = [tuple(x.shape[1:]) for x in (k, v)]
            raise WindfallError(f"the KV cache has {there} for an attention whose keys and values are {asked}")
        for c, x in zip(pool, (k, v), strict=True):
            c.view(-1, *x.shape[1:]).index_copy_(0, self.slots, x)
        parts = [self._block(b, q, *pool, scale, window) for b in self.blocks]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    @staticmethod
    def _block(b: Block, q: Tensor, kc: Tensor, vc: Tensor, scale: float, window: int | None) -> Tensor:
        """The heads that share a key head are laid out as further queries of it, so that nothing is copied per head."""
        kv, size, out_size = *kc.shape[2:], vc.shape[3]
        (s, n), share = b.positions.shape, q.shape[1] // kv
        q = q[b.first : b.first + s * n]
        q = q.reshape(s, kv, share, size) if n == 1 else _heads_first(q.view(s, n, kv, share, size))
        k, v = (c.index_select(0, b.pages).view(s, -1, *c.shape[2:]).transpose(1, 2) for c in (kc, vc))
        out = sdpa(q, k, v, attn_mask=b.mask(window, share, q.dtype), scale=scale)
        if n > 1:
            out = out.reshape(s, kv, share, n, out_size).permute(0, 3, 1, 2, 4)
        return out.reshape(s * n, kv * share, out_size)


def _heads_first(q: Tensor) -> Tensor:
    s, n, kv, share, size = q.shape
    return q.permute(0, 2, 3, 1, 4).reshape(s, kv, share * n, size)
