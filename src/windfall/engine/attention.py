"""The one attention function that engine and trainer share, registered with transformers under the name "windfall".

transformers' model code hands every layer's query, key and value (1, heads, rows, size) to the registered function,
along with the keyword `batch` that the caller gave to the model. What a row may look at is the batch's business:

    Paged    the engine: rows of many sequences, each looking at the pages of its own
    Packed   the trainer (packed.py): whole sequences laid end to end in one row

so every decoder that transformers knows runs in both, unpatched, and both compute the same numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention as sdpa
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from windfall.errors import WindfallError

NAME = "windfall"


class Batch(Protocol):
    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None) -> Tensor:
        """(rows, heads, size) in and out."""
        ...


def attention(module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any = None, *,
              batch: Batch, scaling: float | None = None, sliding_window: int | None = None, dropout: float = 0.0,
              **other: Any) -> tuple[Tensor, None]:  # fmt: skip
    unknown = [name for name in ("softcap", "s_aux") if other.get(name) is not None]
    if unknown or dropout:
        raise WindfallError(
            f"{type(module).__name__} asks attention for {', '.join(unknown) or 'dropout'}, which is not supported",
            fix="Use a model without it (Llama, Qwen, Mistral and SmolLM shapes have none).",
        )
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    return batch.attend(module.layer_idx, q, k, v, scale, sliding_window).unsqueeze(0), None


ALL_ATTENTION_FUNCTIONS.register(NAME, attention)


@dataclass(frozen=True, slots=True)
class Block:
    """Rows that attend together: S sequences with Q consecutive rows each, from row `first` of the batch on, over
    contexts padded to the same number of pages."""

    first: int
    sequences: int
    queries: int
    pages: Tensor
    """(S * P,) page numbers."""
    mask: Tensor
    """(S, 1, share * Q, C): 0 where a row may look, -inf where it may not, for each head that shares a key head."""
    windowed: dict[int, Tensor]
    """The same for a sliding window of the given size."""


@dataclass(frozen=True, slots=True)
class Paged:
    keys: list[Tensor]
    """Per layer (pages, page size, kv_heads, size)."""
    values: list[Tensor]
    slots: Tensor
    """Where each row's own key and value go: page * page size + offset."""
    blocks: Sequence[Block]
    """All rows, in order."""

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None) -> Tensor:
        kc, vc = self.keys[layer], self.values[layer]
        kc.view(-1, *k.shape[1:]).index_copy_(0, self.slots, k)
        vc.view(-1, *v.shape[1:]).index_copy_(0, self.slots, v)
        parts = [
            self._block(b, q, kc, vc, scale, b.mask if window is None else b.windowed[window]) for b in self.blocks
        ]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    @staticmethod
    def _block(b: Block, q: Tensor, kc: Tensor, vc: Tensor, scale: float, mask: Tensor) -> Tensor:
        """The heads that share a key head are laid out as further queries of it, so that nothing is copied per head."""
        kv, size = kc.shape[2:]
        s, n, share = b.sequences, b.queries, q.shape[1] // kv
        q = q[b.first : b.first + s * n]
        q = q.reshape(s, kv, share, size) if n == 1 else _heads_first(q.view(s, n, kv, share, size))
        k, v = (c.index_select(0, b.pages).view(s, -1, kv, size).transpose(1, 2) for c in (kc, vc))
        out = sdpa(q, k, v, attn_mask=mask, scale=scale)
        if n > 1:
            out = out.reshape(s, kv, share, n, size).permute(0, 3, 1, 2, 4)
        return out.reshape(s * n, kv * share, size)


def _heads_first(q: Tensor) -> Tensor:
    s, n, kv, share, size = q.shape
    return q.permute(0, 2, 3, 1, 4).reshape(s, kv, share * n, size)
