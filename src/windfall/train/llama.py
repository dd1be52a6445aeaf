"""Dense decoders of the Llama family (Llama, SmolLM, Mistral, Qwen2, Qwen3), forward and backward without autograd.

The weights are those of the transformers module, in place; matrices with the same input are moved next to each other in
memory, so that they need one product. The backward pass is written by hand: it chooses which activations to keep (see
activation_memory.py), recomputes what is cheaper to recompute (norms, rotary embedding, SwiGLU), and adds the gradient
of every weight to its float32 sum at once. `LlamaBody.of` refuses modules that it does not support; the caller also
compares the two implementations on real rows (see logprobs.py).
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


class UnsupportedModel(Exception):
    """LlamaBody does not support this module; the text gives the reason."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PackedRows:
    """A pack on the device: concatenated sequences."""

    ids: Tensor
    positions: Tensor
    wanted: Tensor
    """Indices of the rows whose hidden states are needed."""
    batch: Packed


@dataclass(kw_only=True, slots=True)
class Activations:
    """The activations that a layer keeps for its backward pass. Only `x` at LEAST; no `gate_up` at LIGHT."""

    x: Tensor
    residual: Tensor | None = None
    qkv: Tensor | None = None
    attention_out: Tensor | None = None
    logsumexp: Tensor | None = None
    gate_up: Tensor | None = None


@dataclass(kw_only=True, slots=True)
class Tape:
    """What the backward pass of a pack needs."""

    rows: PackedRows
    cos: Tensor
    sin: Tensor
    layers: list[Activations] = field(default_factory=list)
    last: Tensor | None = None
    """The wanted rows before the final norm."""


class LlamaBody:
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
    def of(model: Any, gradients: Gradients | None = None, *, keep: str | int = "auto", ops: Any = None) -> LlamaBody:
        """`keep`: a level of activation_memory.py for all layers, or "auto": by the free memory, for every pack."""
        _check(model)
        return LlamaBody(model, gradients, keep, ops or plain.for_device(model.device))

    def forward(self, rows: PackedRows, *, learning: bool) -> tuple[Tensor, Tape]:
        """Hidden states of the wanted rows, and a tape for `backward`, which is complete only with `learning`."""
        least = [LEAST] * len(self.layers)
        levels = self._levels(len(rows.ids)) if learning else least
        try:
            return self._forward(rows, levels, learning)
        except torch.OutOfMemoryError:  # the free memory is fragmented, or was taken meanwhile
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
        return self.ops.rms_norm(last, self.base.norm.weight, self.eps)[0], tape

    @torch.no_grad()
    def backward(self, tape: Tape, grad: Tensor) -> None:
        """Add the gradients of all weights, from the gradient of the hidden states. Consumes the tape."""
        assert self.gradients is not None and tape.last is not None
        rows, norm = tape.rows, self.base.norm.weight
        back, _, norm_grad = self.ops.rms_norm_backward(grad, tape.last, norm, self.eps, None)
        self.gradients.add(norm, norm_grad)
        dx = grad.new_zeros(len(rows.ids), grad.shape[1]).index_copy_(0, rows.wanted, back)
        for layer in reversed(self.layers):
            dx = layer.backward(dx, tape.layers.pop(), tape)
        embedding = self.base.embed_tokens
        if embedding.padding_idx is not None:  # torch never trains that row of an embedding
            dx.masked_fill_((rows.ids == embedding.padding_idx)[:, None], 0.0)
        self.gradients.add_rows(embedding.weight, rows.ids, dx)

    def discard(self, tape: Tape) -> None:
        """Replaces `backward` if every gradient is zero."""
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
        self.input_norm, self.mlp_norm = layer.input_layernorm.weight, layer.post_attention_layernorm.weight
        self.norms = [a.q_norm.weight, a.k_norm.weight] if hasattr(a, "q_norm") else [None, None]
        self.qkv = JoinedWeights([a.q_proj.weight, a.k_proj.weight, a.v_proj.weight])
        self.biases = JoinedWeights([a.q_proj.bias, a.k_proj.bias, a.v_proj.bias] if a.q_proj.bias is not None else [])
        self.out, self.down = a.o_proj.weight, mlp.down_proj.weight
        self.gate_up = JoinedWeights([mlp.gate_proj.weight, mlp.up_proj.weight])
        window = getattr(a, "sliding_window", None)
        self.window: int | None = a.config.sliding_window if type(layer).__name__.startswith("Mistral") else window

    def forward(self, x: Tensor, tape: Tape, level: int) -> tuple[Tensor, Activations]:
        kept = Activations(x=x)
        self._attention(kept, tape)
        self._mlp_input(kept)
        assert kept.gate_up is not None and kept.residual is not None
        y = linear(self.ops.apply_swiglu(kept.gate_up), self.down).add_(kept.residual)
        if level == LIGHT:
            kept.gate_up = None
        return y, kept if level > LEAST else Activations(x=x)

    def _attention(self, kept: Activations, tape: Tape) -> None:
        h, _ = self.ops.rms_norm(kept.x, self.input_norm, self.eps)
        kept.qkv = linear(h, self.qkv.tensor, self.biases.tensor if self.biases.parts else None)
        del h
        q, k, v = self._rotated(kept.qkv, tape)
        kept.attention_out, kept.logsumexp = tape.rows.batch.forward(q, k, v, self.scale, self.window)
        kept.residual = linear(kept.attention_out.flatten(1), self.out)

    def _mlp_input(self, kept: Activations) -> None:
        """Add the attention output to the residual, and compute the gate and up projections of the MLP from it."""
        assert kept.residual is not None
        h, kept.residual = self.ops.rms_norm(kept.residual, self.mlp_norm, self.eps, kept.x)
        kept.gate_up = linear(h, self.gate_up.tensor)

    def _rotated(self, qkv: Tensor, tape: Tape) -> tuple[Tensor, Tensor, Tensor]:
        """Queries and keys with their norms and rotary embedding, and values."""
        q, k = self.ops.apply_rotary(qkv, tape.cos, tape.sin, self.heads, self.kv_heads, *self.norms, self.eps)
        return q, k, qkv[:, (self.heads + self.kv_heads) * self.head :].unflatten(1, (self.kv_heads, self.head))

    def backward(self, dy: Tensor, kept: Activations, tape: Tape) -> Tensor:
        """Add the gradients of the weights, and return that of the layer's input."""
        ops, sums = self.ops, self.gradients
        assert sums is not None
        self._recompute(kept, tape)
        gate_up, residual = kept.gate_up, kept.residual
        d_gate_up, gated = ops.apply_swiglu_backward(dy @ self.down, gate_up)
        sums.add_product([self.down], dy, gated)
        del gated, gate_up
        dh = d_gate_up @ self.gate_up.tensor
        dx, h, norm_grad = ops.rms_norm_backward(dh, residual, self.mlp_norm, self.eps, dy)
        sums.add(self.mlp_norm, norm_grad)
        sums.add_product(self.gate_up.parts, d_gate_up, h)
        kept.gate_up = kept.residual = None
        del d_gate_up, dh, h, residual, dy
        d_qkv = self._attention_backward(dx, kept, tape)
        dh = d_qkv @ self.qkv.tensor
        back, h, norm_grad = ops.rms_norm_backward(dh, kept.x, self.input_norm, self.eps, dx)
        sums.add(self.input_norm, norm_grad)
        sums.add_product(self.qkv.parts, d_qkv, h)
        start = 0
        for bias in self.biases.parts:
            sums.add(bias, d_qkv[:, start : start + len(bias)].sum(0, dtype=torch.float32))
            start += len(bias)
        return back

    def _attention_backward(self, dx: Tensor, kept: Activations, tape: Tape) -> Tensor:
        """Add the gradients of the attention weights, and return that of the joint projection."""
        sums, out, qkv = self.gradients, kept.attention_out, kept.qkv
        assert sums is not None and out is not None and qkv is not None and kept.logsumexp is not None
        sums.add_product([self.out], dx, out.flatten(1))
        grad = (dx @ self.out).view_as(out)
        q, k, v = self._rotated(qkv, tape)
        parts = tape.rows.batch.backward(grad, q, k, v, out, kept.logsumexp, self.scale, self.window)
        kept.attention_out = kept.logsumexp = None
        back, *norm_grads = self.ops.apply_rotary_backward(
            *parts, qkv, tape.cos, tape.sin, self.heads, self.kv_heads, *self.norms, self.eps
        )
        for weight, norm_grad in zip(self.norms, norm_grads, strict=True):
            if weight is not None:
                sums.add(weight, norm_grad)
        return back

    def _recompute(self, kept: Activations, tape: Tape) -> None:
        """Recompute the activations that were not kept."""
        if kept.qkv is None:
            self._attention(kept, tape)
            self._mlp_input(kept)
        elif kept.gate_up is None:
            assert kept.residual is not None
            kept.gate_up = linear(self.ops.rms_norm(kept.residual, self.mlp_norm, self.eps)[0], self.gate_up.tensor)


class JoinedWeights:
    """Weights with the same input, moved next to each other in memory. They remain the same parameter objects."""

    def __init__(self, parts: Sequence[Tensor]) -> None:
        self.parts = parts
        self._at: list[int] = []
        self._tensor: Tensor | None = None
        if len(parts) > 1:
            join(parts)

    @property
    def tensor(self) -> Tensor:
        """All parts as one tensor; a copy only if they have been moved apart since."""
        at = [p.data_ptr() for p in self.parts]
        if at != self._at:
            self._at, self._tensor = at, adjacent(self.parts)
        return torch.cat([p.detach() for p in self.parts]) if self._tensor is None else self._tensor


def _check(model: Any) -> None:
    found = getattr(model.base_model, "layers", None)
    if found is None or not all(type(x).__name__ in FAMILIES for x in found):
        raise UnsupportedModel(f"{type(model).__name__} is not of the Llama family")
    if getattr(model.config, "hidden_act", "silu") != "silu":
        raise UnsupportedModel(f"its activation is {model.config.hidden_act}")
    for x in found:
        a, m = x.self_attn, x.mlp
        biased = any(p.bias is not None for p in (a.o_proj, m.gate_proj, m.up_proj, m.down_proj))
        mixed = len({p.bias is None for p in (a.q_proj, a.k_proj, a.v_proj)}) > 1
        linears = (a.q_proj, a.k_proj, a.v_proj, a.o_proj, m.gate_proj, m.up_proj, m.down_proj)
        if biased or mixed or any(type(p) is not torch.nn.Linear for p in linears):  # with an adapter it is a subclass
            raise UnsupportedModel("its projections are not plain linear layers, or only some of them have biases")
        if a.head_dim % 8:
            raise UnsupportedModel(f"its heads have {a.head_dim} elements, not a multiple of 8")
        if len({p.dtype for p in x.parameters()}) > 1 or not x.mlp.down_proj.weight.is_floating_point():
            raise UnsupportedModel("its weights have several dtypes")
