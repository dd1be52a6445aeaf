"""Attention for training: whole sequences, concatenated. It is the `AttentionBatch` without a paged KV cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention as sdpa


@dataclass(frozen=True)
class Packed:
    """Concatenated sequences. On a GPU in half precision nothing is padded; elsewhere every sequence is padded to the
    longest one. `forward` and `backward` are for callers that compute gradients without autograd."""

    lengths: tuple[int, ...]
    ends: Tensor  # (sequences + 1,) int32 on the device: the first row of each sequence, and the end of the last one

    @staticmethod
    def of(lengths: Sequence[int], device: torch.device | str = "cpu") -> Packed:
        ends = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
        on_gpu = torch.device(device).type == "cuda"
        return Packed(tuple(lengths), ends.pin_memory().to(device, non_blocking=True) if on_gpu else ends)

    @staticmethod
    def pads(device: torch.device | str, dtype: torch.dtype) -> bool:
        """Whether sequences are padded. The cost then grows with sequences * longest length, otherwise with tokens."""
        return torch.device(device).type != "cuda" or dtype not in (torch.bfloat16, torch.float16)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None) -> Tensor:
        if self.pads(q.device, q.dtype):
            return self._padded(q, k, v, scale, window)
        return cast(Tensor, _Flash.apply(q, k, v, self, scale, window))

    @torch.no_grad()
    def forward(self, q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None) -> tuple[Tensor, Tensor]:
        """The output, and the log-sum-exp that `backward` needs."""
        if self.pads(q.device, q.dtype):
            return self._padded(q, k, v, scale, window), q.new_empty(0)
        options = self._options(scale, window)
        flash = torch.ops.aten._flash_attention_forward
        out, sums, *_ = flash(q, k, v, self.ends, self.ends, self._longest, self._longest, 0.0, True, False, **options)
        return out, sums

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, sums: Tensor, scale: float, window: int | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of q, k and v."""
        if self.pads(q.device, q.dtype):
            with torch.enable_grad():
                q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
                return cast(Any, torch.autograd.grad(self._padded(q, k, v, scale, window), (q, k, v), grad))
        unused = torch.zeros(2, dtype=torch.uint64, device=q.device)  # the random state for dropout, which is off
        tensors = (grad, q, k, v, out, sums, self.ends, self.ends)
        rest = (self._longest, self._longest, 0.0, True, unused, unused)
        return torch.ops.aten._flash_attention_backward(*tensors, *rest, **self._options(scale, window))

    def _options(self, scale: float, window: int | None) -> dict[str, Any]:
        if window is None or window >= self._longest:
            return {"scale": scale}
        return {"scale": scale, "window_size_left": window - 1, "window_size_right": 0}

    def _padded(self, q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None) -> Tensor:
        # Padding repeats row 0; the causal mask hides it from every real row.
        where, flat = self._layout
        length = self._longest
        q, k, v = (x.index_select(0, where).view(-1, length, *x.shape[1:]).transpose(1, 2) for x in (q, k, v))
        share = q.shape[1] // k.shape[1]
        if window is None or window >= length:
            out = sdpa(q, k, v, is_causal=True, scale=scale, enable_gqa=share > 1)
        else:
            n = torch.arange(length, device=q.device)
            near = (n[:, None] >= n[None]) & (n[:, None] - n[None] < window)
            out = sdpa(q, k, v, attn_mask=near, scale=scale, enable_gqa=share > 1)
        return out.transpose(1, 2).reshape(-1, *out.shape[1:2], out.shape[-1]).index_select(0, flat)

    @cached_property
    def _longest(self) -> int:
        return max(self.lengths)

    @cached_property
    def _layout(self) -> tuple[Tensor, Tensor]:
        """Indices from the padded layout to rows, and from rows to the padded layout."""
        where = torch.zeros(len(self.lengths), self._longest, dtype=torch.long)
        flat = torch.empty(sum(self.lengths), dtype=torch.long)
        start = 0
        for i, n in enumerate(self.lengths):
            where[i, :n] = torch.arange(start, start + n)
            flat[start : start + n] = torch.arange(i * self._longest, i * self._longest + n)
            start += n
        return where.view(-1).to(self.ends.device), flat.to(self.ends.device)


class _Flash(torch.autograd.Function):
    """`Packed.forward` and `Packed.backward` as an autograd function."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, batch: Packed, scale: float, window: int | None) -> Tensor:
        out, sums = batch.forward(q, k, v, scale, window)
        ctx.save_for_backward(q, k, v, out, sums)
        ctx.rest = batch, scale, window
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        batch, *rest = ctx.rest
        return *batch.backward(grads[0], *ctx.saved_tensors, *rest), None, None, None
