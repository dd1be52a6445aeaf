"""The attention function that the engine and trainer share, registered with transformers under the name "windfall".

transformers' model code passes the query, key and value (1, heads, rows, size) of every layer to the registered
function, along with the keyword `batch` that the caller gave to the model. The batch determines what a row attends to:

    Paged    the engine: rows of many sequences; each row attends to the pages of its own sequence
    Packed   the trainer (packed.py): whole sequences, concatenated

So every decoder of transformers runs in the engine and in the trainer without patches, with the same results.
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
        """Attention of (rows, heads, size) tensors. Called once for every attention module of the model, in order."""
        ...


def attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any = None,
    *,
    batch: AttentionBatch,
    scaling: float | None = None,
    sliding_window: int | None = None,
    dropout: float = 0.0,
    **other: Any,
) -> tuple[Tensor, None]:
    unknown = [name for name in ("softcap", "s_aux", "position_bias") if other.get(name) is not None]
    unknown += ["attention_mask"] * (attention_mask is not None) + ["dropout"] * bool(dropout)
    if unknown:
        what = f"{type(module).__name__} needs attention with {', '.join(unknown)}, which is not supported"
        raise WindfallError(what, fix="Use a model without it, such as Llama, Qwen, Mistral or SmolLM.")
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    return batch.attend(q, k, v, scale, sliding_window).contiguous().unsqueeze(0), None


ALL_ATTENTION_FUNCTIONS.register(NAME, attention)


class KVShape(NamedTuple):
    """What one attention module caches per token: (heads, size) of its keys and of its values."""

    keys: tuple[int, int]
    values: tuple[int, int]

    @property
    def elements(self) -> int:
        return self.keys[0] * self.keys[1] + self.values[0] * self.values[1]


class ShapeRecorder:
    """A batch that computes nothing and records the shapes of keys and values."""

    def __init__(self) -> None:
        self.shapes: list[KVShape] = []

    def attend(self, q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None) -> Tensor:
        del scale, window
        self.shapes.append(KVShape((k.shape[1], k.shape[2]), (v.shape[1], v.shape[2])))
        return q.new_zeros(*q.shape[:2], v.shape[2])


@torch.inference_mode()
def cache_shapes(model: Any) -> list[KVShape]:
    """What the KV cache of this model must hold: one entry per attention module, in order. Found by running one token,
    because configurations describe it in too many ways, and a layer may have two attention modules or none."""
    batch, zero = ShapeRecorder(), torch.zeros(1, 1, dtype=torch.long, device=model.device)
    model(input_ids=zero, position_ids=zero, use_cache=False, batch=batch)
    return batch.shapes


@dataclass(frozen=True, slots=True)
class Block:
    """Rows that attend together: S sequences with Q consecutive rows each, starting at row `first` of the batch, with
    contexts padded to the same number of pages."""

    first: int
    pages: Tensor  # (S * P,) page numbers
    positions: Tensor  # (S, Q): the index of each row in its sequence
    context: Tensor  # (P * page size,): 0, 1, 2, ...
    _masks: dict[tuple[int | None, int], Tensor] = field(default_factory=dict)

    def mask(self, window: int | None, share: int, dtype: torch.dtype) -> Tensor:
        """(S, 1, share * Q, C): 0 where a row may attend, else -inf; repeated for all query heads of a key head."""
        cached = self._masks.get((window, share))
        if cached is None:
            at = self.positions[..., None]
            hidden = self.context > at
            if window is not None:
                hidden |= self.context <= at - window
            zeros = torch.zeros(hidden.shape, dtype=dtype, device=hidden.device)
            cached = zeros.masked_fill_(hidden, float("-inf"))[:, None].repeat(1, 1, share, 1)
            self._masks[window, share] = cached
        return cached


@dataclass(frozen=True, slots=True)
class Paged:
    pools: Iterator[tuple[Tensor, Tensor]]  # keys and values of each attention module: (pages, page size, heads, size)
    slots: Tensor  # index in the cache for each row's own key and value: page * page size + offset
    blocks: Sequence[Block]  # all rows of the step, in order

    def attend(self, q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None) -> Tensor:
        pool = next(self.pools, None)
        if pool is None or any(c.shape[2:] != x.shape[1:] for c, x in zip(pool, (k, v), strict=True)):
            have = "nothing" if pool is None else f"{[tuple(c.shape[2:]) for c in pool]} (heads, size)"
            need = [tuple(x.shape[1:]) for x in (k, v)]
            raise WindfallError(f"the KV cache has {have} for attention whose keys and values are {need}")
        for c, x in zip(pool, (k, v), strict=True):
            if c.is_contiguous():
                c.view(-1, *x.shape[1:]).index_copy_(0, self.slots, x)
            else:  # pages in shared memory are not adjacent
                c.index_put_((self.slots // c.shape[1], self.slots % c.shape[1]), x)
        parts = [self._block(b, q, *pool, scale, window) for b in self.blocks]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    @staticmethod
    def _block(b: Block, q: Tensor, kc: Tensor, vc: Tensor, scale: float, window: int | None) -> Tensor:
        """Query heads that share a key head become more queries of that head, so keys are not copied per query head."""
        kv, size, out_size = *kc.shape[2:], vc.shape[3]
        (s, n), share = b.positions.shape, q.shape[1] // kv
        q = q[b.first : b.first + s * n]
        if n > 1:
            q = q.view(s, n, kv, share, size).permute(0, 2, 3, 1, 4)
        q = q.reshape(s, kv, share * n, size)
        k, v = (c.index_select(0, b.pages).view(s, -1, *c.shape[2:]).transpose(1, 2) for c in (kc, vc))
        out = sdpa(q, k, v, attn_mask=b.mask(window, share, q.dtype), scale=scale)
        if n > 1:
            out = out.reshape(s, kv, share, n, out_size).permute(0, 3, 1, 2, 4)
        return out.reshape(s * n, kv * share, out_size)
