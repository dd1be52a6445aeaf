"""Dense decoders of the Llama family (Llama, SmolLM, Mistral, Qwen2, Qwen3), forward and backward, without a graph.

The weights are those of the transformers module, in place; matrices with the same input are made to lie one after the
other, so that they are one product. Backward is written out: it knows what to keep (see memory.py), what is cheaper to
compute again than to keep (norms, rotary embedding, gate), and adds every weight's gradient to its float32 sum as it is
made. `Blocks.of` refuses what it does not know; whoever calls it also compares the two on real rows (see logprobs.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from windfall.engine.joined_weights import adjacent, join
from windfall.engine.torch.packed import Packed
from windfall.free_memory import free_bytes
from windfall.train import activation_memory
from windfall.train import layers as plain
from windfall.train.activation_memory import ALL, LEAST, LIGHT
from windfall.train.gradients import Gradients

FAMILIES = ("LlamaDecoderLayer", "MistralDecoderLayer", "Qwen2DecoderLayer", "Qwen3DecoderLayer")


class Unfit(Exception):
    """This module is not one that Blocks knows. Says why."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PackedRows:
    """A pack on the device: whole sequences end to end."""

    ids: Tensor
    positions: Tensor
    wanted: Tensor
    """The rows whose hidden states are asked for."""
    batch: Packed


@dataclass(kw_only=True, slots=True)
class Kept:
    """What a layer's backward pass finds again. Only `x` at level LEAST; no `both` at LIGHT."""

    x: Tensor
    after: Tensor | None = None
    qkv: Tensor | None = None
    attended: Tensor | None = None
    sums: Tensor | None = None
    both: Tensor | None = None


@dataclass(kw_only=True, slots=True)
class Tape:
    rows: PackedRows
    cos: Tensor
    sin: Tensor
    layers: list[Kept] = field(default_factory=list)
    last: Tensor | None = None
    """The wanted rows before the final norm."""


class Blocks:
    def __init__(self, model: Any, gradients: Gradients | None, keep: str | int, ops: Any) -> None:
        self.base, self.gradients, self.keep = model.base_model, gradients, keep
        self.layers = [LlamaLayer(x, gradients, ops) for x in self.base.layers]
        self.ops, self.eps = ops, self.base.norm.variance_epsilon
        one, mlp = self.layers[0], self.base.layers[0].mlp
        self.each = activation_memory.layer_bytes(
            hidden=one.out.shape[0], intermediate=mlp.down_proj.in_features, heads=one.heads, kv_heads=one.kv_heads,
            head=one.head, value_bytes=one.out.element_size(),
        )  # fmt: skip

    @staticmethod
    def of(model: Any, gradients: Gradients | None = None, *, keep: str | int = "auto", ops: Any = None) -> Blocks:
        """`keep`: a level of memory.py for all layers, or "auto": by the free memory, for every pack anew."""
        _check(model)
        return Blocks(model, gradients, keep, ops or plain.for_device(model.device))

    def forward(self, rows: PackedRows, *, learning: bool) -> tuple[Tensor, Tape]:
        """Hidden states of the wanted rows, and what `backward` needs if there is learning to be done."""
        least = [LEAST] * len(self.layers)
        levels = self._levels(len(rows.ids)) if learning else least
        try:
            return self._forward(rows, levels, learning)
        except torch.OutOfMemoryError:  # memory in pieces too small, or somebody else's by now
            if levels == least:
                raise
        torch.cuda.empty_cache()
        return self._forward(rows, least, learning)

    @torch.no_grad()
    def _forward(self, rows: PackedRows, levels: list[int], learning: bool) -> tuple[Tensor, Tape]:
        x = self.base.embed_tokens(rows.ids)
        cos, sin = (a[0].contiguous() for a in self.base.rotary_emb(x[None], rows.positions[None]))
        tape = Tape(rows=rows, cos=cos, sin=sin)
        for layer, level in zip(self.layers, levels, strict=True):
            y, kept = layer.forward(x, tape, level)
            if learning:
                tape.layers.append(kept)
            x = y
            del y, kept
        last = x.index_select(0, rows.wanted)
        tape.last = last if learning else None
        return self.ops.norm(last, self.base.norm.weight, self.eps)[0], tape

    @torch.no_grad()
    def backward(self, tape: Tape, grad: Tensor) -> None:
        """From the gradient of the hidden states on. Uses the tape up."""
        assert self.gradients is not None and tape.last is not None
        rows, norm = tape.rows, self.base.norm.weight
        back, _, of_norm = self.ops.norm_back(grad, tape.last, norm, self.eps, None)
        self.gradients.add(norm, of_norm)
        dx = grad.new_zeros(len(rows.ids), grad.shape[1]).index_copy_(0, rows.wanted, back)
        for layer in reversed(self.layers):
            dx = layer.backward(dx, tape.layers.pop(), tape)
        embedding = self.base.embed_tokens
        if embedding.padding_idx is not None:  # torch never trains that row of an embedding
            dx.masked_fill_((rows.ids == embedding.padding_idx)[:, None], 0.0)
        self.gradients.add_rows(embedding.weight, rows.ids, dx)

    def forget(self, tape: Tape) -> None:
        """In place of `backward`, where every gradient is zero."""
        tape.layers.clear()

    def _levels(self, tokens: int) -> list[int]:
        count = len(self.layers)
        if isinstance(self.keep, int):
            return [self.keep] * count
        weight = self.base.embed_tokens.weight
        if not weight.is_cuda:
            return [ALL] * count
        return activation_memory.levels(free_bytes(weight.device), tokens, count, self.each)


class LlamaLayer:
    def __init__(self, layer: Any, gradients: Gradients | None, ops: Any) -> None:
        a, mlp = layer.self_attn, layer.mlp
        self.ops, self.gradients, self.head = ops, gradients, a.head_dim
        self.heads, self.kv_heads = (p.out_features // a.head_dim for p in (a.q_proj, a.k_proj))
        self.scale: float = a.scaling
        self.eps: float = layer.input_layernorm.variance_epsilon
        self.before, self.between = layer.input_layernorm.weight, layer.post_attention_layernorm.weight
        self.norms = [a.q_norm.weight, a.k_norm.weight] if hasattr(a, "q_norm") else [None, None]
        self.qkv = Joined([a.q_proj.weight, a.k_proj.weight, a.v_proj.weight])
        self.biases = Joined([a.q_proj.bias, a.k_proj.bias, a.v_proj.bias] if a.q_proj.bias is not None else [])
        self.out, self.down = a.o_proj.weight, mlp.down_proj.weight
        self.gate_up = Joined([mlp.gate_proj.weight, mlp.up_proj.weight])
        window = getattr(a, "sliding_window", None)
        self.window: int | None = a.config.sliding_window if type(layer).__name__.startswith("Mistral") else window

    def forward(self, x: Tensor, tape: Tape, level: int) -> tuple[Tensor, Kept]:
        kept = Kept(x=x)
        self._attend(kept, tape)
        self._widen(kept)
        assert kept.both is not None and kept.after is not None
        y = linear(self.ops.gate(kept.both), self.down).add_(kept.after)
        if level == LIGHT:
            kept.both = None
        return y, kept if level > LEAST else Kept(x=x)

    def _attend(self, kept: Kept, tape: Tape) -> None:
        h, _ = self.ops.norm(kept.x, self.before, self.eps)
        kept.qkv = linear(h, self.qkv.whole, self.biases.whole if self.biases.parts else None)
        del h
        q, k, v = self._turned(kept.qkv, tape)
        kept.attended, kept.sums = tape.rows.batch.forward(q, k, v, self.scale, self.window)
        kept.after = linear(kept.attended.flatten(1), self.out)

    def _widen(self, kept: Kept) -> None:
        """`after` becomes the residual with attention's part; `both` is what the MLP makes of it."""
        assert kept.after is not None
        h, kept.after = self.ops.norm(kept.after, self.between, self.eps, kept.x)
        kept.both = linear(h, self.gate_up.whole)

    def _turned(self, qkv: Tensor, tape: Tape) -> tuple[Tensor, Tensor, Tensor]:
        q, k = self.ops.turn(qkv, tape.cos, tape.sin, self.heads, self.kv_heads, *self.norms, self.eps)
        return q, k, qkv[:, (self.heads + self.kv_heads) * self.head :].unflatten(1, (self.kv_heads, self.head))

    def backward(self, dy: Tensor, kept: Kept, tape: Tape) -> Tensor:
        """The gradient of the layer's input."""
        ops, sums = self.ops, self.gradients
        assert sums is not None
        self._again(kept, tape)
        both, after = kept.both, kept.after
        d_both, gated = ops.gate_back(dy @ self.down, both)
        sums.add_product([self.down], dy, gated)
        del gated, both
        dh = d_both @ self.gate_up.whole
        dx, h, of_norm = ops.norm_back(dh, after, self.between, self.eps, dy)
        sums.add(self.between, of_norm)
        sums.add_product(self.gate_up.parts, d_both, h)
        kept.both = kept.after = None
        del d_both, dh, h, after, dy
        d_qkv = self._attend_back(dx, kept, tape)
        dh = d_qkv @ self.qkv.whole
        back, h, of_norm = ops.norm_back(dh, kept.x, self.before, self.eps, dx)
        sums.add(self.before, of_norm)
        sums.add_product(self.qkv.parts, d_qkv, h)
        start = 0
        for bias in self.biases.parts:
            sums.add(bias, d_qkv[:, start : start + len(bias)].sum(0, dtype=torch.float32))
            start += len(bias)
        return back

    def _attend_back(self, dx: Tensor, kept: Kept, tape: Tape) -> Tensor:
        """The gradient of the joint projection."""
        sums, out, qkv = self.gradients, kept.attended, kept.qkv
        assert sums is not None and out is not None and qkv is not None and kept.sums is not None
        sums.add_product([self.out], dx, out.flatten(1))
        grad = (dx @ self.out).view_as(out)
        q, k, v = self._turned(qkv, tape)
        parts = tape.rows.batch.backward(grad, q, k, v, out, kept.sums, self.scale, self.window)
        kept.attended = kept.sums = None
        back, *of_norms = self.ops.turn_back(
            *parts, qkv, tape.cos, tape.sin, self.heads, self.kv_heads, *self.norms, self.eps
        )
        for weight, of_norm in zip(self.norms, of_norms, strict=True):
            if weight is not None:
                sums.add(weight, of_norm)
        return back

    def _again(self, kept: Kept, tape: Tape) -> None:
        """Compute what was not kept."""
        if kept.qkv is None:
            self._attend(kept, tape)
            self._widen(kept)
        elif kept.both is None:
            assert kept.after is not None
            kept.both = linear(self.ops.norm(kept.after, self.between, self.eps)[0], self.gate_up.whole)


class Joined:
    """Weights that have the same input, made to lie one after the other. They stay the same objects."""

    def __init__(self, parts: Sequence[Tensor]) -> None:
        self.parts = parts
        self._at: list[int] = []
        self._whole: Tensor | None = None
        if len(parts) > 1:
            join(parts)

    @property
    def whole(self) -> Tensor:
        """As one tensor; a copy only if somebody has moved them apart since."""
        at = [p.data_ptr() for p in self.parts]
        if at != self._at:
            self._at, self._whole = at, adjacent(self.parts)
        return torch.cat([p.detach() for p in self.parts]) if self._whole is None else self._whole


def _check(model: Any) -> None:
    found = getattr(model.base_model, "layers", None)
    if found is None or not all(type(x).__name__ in FAMILIES for x in found):
        raise Unfit(f"{type(model).__name__} is not of the Llama family")
    if getattr(model.config, "hidden_act", "silu") != "silu":
        raise Unfit(f"its activation is {model.config.hidden_act}")
    for x in found:
        a, m = x.self_attn, x.mlp
        biased = any(p.bias is not None for p in (a.o_proj, m.gate_proj, m.up_proj, m.down_proj))
        mixed = len({p.bias is None for p in (a.q_proj, a.k_proj, a.v_proj)}) > 1
        if biased or mixed or any(not isinstance(p, torch.nn.Linear) for p in (a.q_proj, m.up_proj)):
            raise Unfit("its projections are not plain, or have biases where others have none")
        if a.head_dim % 8:
            raise Unfit(f"its heads have {a.head_dim} elements, not a multiple of 8")
        if len({p.dtype for p in x.parameters()}) > 1 or not x.mlp.down_proj.weight.is_floating_point():
            raise Unfit("its weights have several dtypes")
