"""Dense decoders of the Llama family (Llama, SmolLM, Mistral, Qwen2, Qwen3) with a hand-written backward pass.

A decoder layer is one autograd function. It chooses which activations to keep (see activation_memory.py), recomputes
what is cheaper to recompute (norms, rotary embedding, SwiGLU), and adds the gradient of every weight to its sum at once
(see gradients.py). It is called through the layer's module, as a keyword argument of `forward`, so that the hooks of
FSDP2 see the call. Without that argument the module computes as in transformers, for an engine that shares it.

Weights are read from the module in every pass. Matrices with the same input are moved next to each other in memory, so
that they need one product; sharded ones are copied next to each other in every pass. Linear layers may have adapters
(projection.py); then the other weights are frozen, and no gradient is computed for them. `LlamaBody` refuses modules
that it does not support.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import MethodType
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn.functional import embedding

from windfall.free_memory import free_bytes
from windfall.trainer.model import activation_memory
from windfall.trainer.model import layers as plain
from windfall.trainer.model.activation_memory import ALL, LEAST, LIGHT
from windfall.trainer.model.gradients import Gradients, accept_float32
from windfall.trainer.model.lora import LoraEmbedding, LoraLinear
from windfall.trainer.model.packs import PackedRows
from windfall.trainer.model.projection import Projection, make_adjacent

FAMILIES = ("LlamaDecoderLayer", "MistralDecoderLayer", "Qwen2DecoderLayer", "Qwen3DecoderLayer")
SHARDED_WEIGHT, SHARDED_GRADIENT = 8, 12
"""Bytes per weight of a layer that FSDP2 needs during a backward pass: two layers in half precision with their gather
buffers; for trained weights also, in float32, the gradients of one layer and the inputs of two reductions."""


class UnsupportedModel(Exception):
    """LlamaBody does not support this module; the text gives the reason."""


@dataclass(kw_only=True, slots=True)
class Activations:
    """The activations that a layer keeps for its backward pass. Only `x` at LEAST; no `gate_up` at LIGHT."""

    x: Tensor
    residual: Tensor | None = None
    qkv: Tensor | None = None
    attention_out: Tensor | None = None
    logsumexp: Tensor | None = None
    gate_up: Tensor | None = None


class Tape:
    """What the layers of one pack share. Not a dataclass, because FSDP2 would copy it when a module gets it."""

    def __init__(self, rows: PackedRows, cos: Tensor, sin: Tensor, levels: list[int] | None) -> None:
        self.batch = rows.batch
        self.cos = cos
        self.sin = sin
        self.levels = levels if levels is None or rows.agree is None else rows.agree(levels)
        """What each layer keeps. None: there is no backward pass."""
        self.agreed = rows.agree is not None
        """Whether other ranks rely on these levels."""
        self.kept: list[Activations] = []
        """The activations of the layers so far. The backward pass consumes them."""

    def keep_least(self) -> None:
        """Free what all layers keep beyond their inputs, and keep no more for this pack."""
        self.levels = [LEAST] * len(self.levels or ())
        for a in self.kept:
            a.residual = a.qkv = a.attention_out = a.logsumexp = a.gate_up = None
        torch.cuda.empty_cache()


class LlamaBody:
    def __init__(
        self,
        model: Any,
        gradients: Gradients | None = None,
        *,
        keep: str | int = "auto",
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Raises UnsupportedModel. `keep`: a level of activation_memory.py for all layers, or "auto": by the free
        memory, for every pack. `device` and `dtype` are those of the passes, if not those of the stored weights."""
        _check(model)
        self.base = model.base_model
        self.gradients = gradients
        self.keep = keep
        self.ops = plain.for_device(device or model.device)
        self.layers = [LlamaLayer(x, gradients, self.ops) for x in self.base.layers]
        one, mlp = self.layers[0], self.base.layers[0].mlp
        self.each = activation_memory.layer_bytes(
            hidden=mlp.down_proj.out_features,
            intermediate=mlp.down_proj.in_features,
            heads=one.heads,
            kv_heads=one.kv_heads,
            head=one.head,
            value_bytes=(dtype or model.dtype).itemsize,
        )
        self.reserved = 0
        """Bytes that FSDP2 and the gradient of the head need during the backward pass."""
        if split := [p for p in self.base.layers[0].parameters() if isinstance(p, DTensor)]:
            head = model.get_output_embeddings().weight
            self.reserved = 4 * head.numel() if head.requires_grad else 0
            for p in split:
                self.reserved += p.numel() * (SHARDED_WEIGHT + (SHARDED_GRADIENT if p.requires_grad else 0))
        for x in self.base.layers:
            x.forward = MethodType(_forward, x)

    def __call__(self, rows: PackedRows) -> Tensor:
        """Hidden states of the wanted rows."""
        base = self.base
        x = _embed(base.embed_tokens, rows.ids, self.gradients)
        cos, sin = (a[0].contiguous() for a in base.rotary_emb(x[None], rows.positions[None]))
        tape = Tape(rows, cos, sin, self.levels(len(x), x.device) if torch.is_grad_enabled() else None)
        for module, layer in zip(base.layers, self.layers, strict=True):
            x = module(x, layer=layer, tape=tape)
        apply = cast(Any, _FinalNorm.apply)
        return apply(x, base.norm.weight, rows.wanted, base.norm.variance_epsilon, self.ops, self.gradients)

    def levels(self, tokens: int, device: torch.device) -> list[int]:
        """What each layer keeps for a pack."""
        count = len(self.layers)
        if self.keep == "auto" and device.type == "cuda":
            return activation_memory.levels(free_bytes(device) - self.reserved, tokens, count, self.each)
        return [ALL if self.keep == "auto" else cast(int, self.keep)] * count


def _forward(self: Any, *args: Any, layer: LlamaLayer | None = None, **kwargs: Any) -> Any:
    """The forward of a decoder layer's module."""
    return type(self).forward(self, *args, **kwargs) if layer is None else layer(*args, **kwargs)


def _embed(layer: Any, ids: Tensor, gradients: Gradients | None) -> Tensor:
    """The embeddings of these tokens, with the adapter that has an effect now, if there is one."""
    pair, scale = (layer.adapter if isinstance(layer, LoraEmbedding) else None) or ((), 0.0)
    return cast(Tensor, _Embedding.apply(ids, layer.padding_idx, scale, gradients, layer.weight, *pair))


class _Embedding(torch.autograd.Function):
    """Its last inputs are the weight and the two matrices of the adapter, if there is one."""

    @staticmethod
    def forward(
        ctx: Any, ids: Tensor, padding: int | None, scale: float, gradients: Gradients | None, weight: Tensor,
        *pair: Tensor,
    ) -> Tensor:  # fmt: skip
        ctx.save_for_backward(ids, weight, *pair)
        ctx.rest = padding, scale, gradients
        x = embedding(ids, weight)
        return x.addmm_(embedding(ids, pair[1]), pair[0], alpha=scale) if pair else x

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (ids, weight, *pair), (padding, scale, gradients), dx = ctx.saved_tensors, ctx.rest, grads[0]
        rows = dx
        if padding is not None:  # torch never trains that row of an embedding
            rows = dx.masked_fill((ids == padding)[:, None], 0.0)
        found = [gradients.add_rows(weight, ids, rows)]
        if pair:
            a, b = pair
            found += gradients.product([a], scale * embedding(ids, b), dx)
            found.append(gradients.add_rows(b, ids, scale * (rows @ a.t())))
        return None, None, None, None, *found


class _FinalNorm(torch.autograd.Function):
    """RMSNorm of some rows."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, wanted: Tensor, eps: float, ops: Any, gradients: Gradients | None
    ) -> Tensor:
        x, ctx.rest = x.index_select(0, wanted), (len(x), eps, ops, gradients)
        ctx.save_for_backward(x, weight, wanted)
        return ops.rms_norm(x, weight, eps)[0]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (x, weight, wanted), (count, eps, ops, gradients), grad = ctx.saved_tensors, ctx.rest, grads[0]
        back, _, norm_grad = ops.rms_norm_backward(grad, x, weight, eps, None)
        dx = grad.new_zeros(count, grad.shape[1]).index_add_(0, wanted, back)  # a row may be wanted several times
        return dx, gradients.add(weight, norm_grad), None, None, None, None


class _Layer(torch.autograd.Function):
    """A decoder layer. Its last inputs are all its weights."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: LlamaLayer, tape: Tape, now: LayerWeights, *weights: Tensor) -> Tensor:
        del weights
        needed = tape.levels is not None and any(ctx.needs_input_grad)  # not needed below all adapters
        # Detached: with its graph in the tape, the tape would refer to itself.
        y, kept = layer.forward_in_memory(x.detach(), now, tape, needed)
        if needed:
            tape.kept.append(kept)
        ctx.rest = layer, tape
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        layer, tape = ctx.rest
        back, weights = layer.backward(grads[0], layer.weights(), tape.kept.pop(), tape)
        return back, None, None, None, *weights


class LayerWeights:
    """The weights of a layer's module as they are now."""

    def __init__(self, module: Any) -> None:
        a = module.self_attn
        self.input_norm = module.input_layernorm.weight
        self.mlp_norm = module.post_attention_layernorm.weight
        self.norms = [a.q_norm.weight, a.k_norm.weight] if hasattr(a, "q_norm") else [None, None]
        self.qkv, self.out, self.gate_up, self.down = (Projection(*group) for group in projections(module))

    @property
    def all(self) -> list[Tensor]:
        """In the order in which the backward pass returns their gradients."""
        attention = [self.input_norm, *self.qkv.weights, *(x for x in self.norms if x is not None), *self.out.weights]
        return [*attention, self.mlp_norm, *self.gate_up.weights, *self.down.weights]

    def valid(self) -> bool:
        """Whether the joined weights are still those of the module."""
        return all(p.valid() for p in (self.qkv, self.out, self.gate_up, self.down))


def projections(module: Any) -> list[tuple[Any, ...]]:
    """The linear layers of a layer's module; those with the same input together."""
    a, m = module.self_attn, module.mlp
    return [(a.q_proj, a.k_proj, a.v_proj), (a.o_proj,), (m.gate_proj, m.up_proj), (m.down_proj,)]


class LlamaLayer:
    def __init__(self, module: Any, gradients: Gradients | None, ops: Any) -> None:
        a = module.self_attn
        self.module = module
        self.ops = ops
        self.gradients = gradients
        self.head = a.head_dim
        self.heads, self.kv_heads = (p.out_features // a.head_dim for p in (a.q_proj, a.k_proj))
        self.scale: float = a.scaling
        self.eps: float = module.input_layernorm.variance_epsilon
        window = getattr(a, "sliding_window", None)
        self.window: int | None = a.config.sliding_window if _family(module) == FAMILIES[1] else window
        self._weights: LayerWeights | None = None
        for group in projections(module):
            make_adjacent(*group)

    def weights(self) -> LayerWeights:
        """The weights as they are now. Only during a pass, because only then FSDP2 has gathered them."""
        if self._weights is not None and self._weights.valid():
            return self._weights
        now = LayerWeights(self.module)
        self._weights = now if now.valid() else None
        return now

    def __call__(self, x: Tensor, tape: Tape) -> Tensor:
        now = self.weights()
        if self.gradients is not None and self.gradients.sharded:
            accept_float32(now.all)
        return cast(Tensor, _Layer.apply(x, self, tape, now, *now.all))

    def forward_in_memory(self, x: Tensor, w: LayerWeights, tape: Tape, needed: bool) -> tuple[Tensor, Activations]:
        """`forward` at the level of the tape, if activations are needed; if memory runs out, all layers keep the least.
        The other ranks do not notice: the layers before are not run again. (With a part of a pack, they would.)"""
        level = tape.levels[len(tape.kept)] if needed and tape.levels is not None else LEAST
        try:
            return self.forward(x, w, tape, level)
        except torch.OutOfMemoryError:  # the free memory is fragmented, or was taken meanwhile
            if tape.agreed or not any(tape.levels or ()):
                raise
        tape.keep_least()
        return self.forward(x, w, tape, LEAST)

    def forward(self, x: Tensor, w: LayerWeights, tape: Tape, level: int) -> tuple[Tensor, Activations]:
        kept = Activations(x=x)
        self._attention(kept, w, tape)
        self._mlp_input(kept, w)
        assert kept.gate_up is not None and kept.residual is not None
        y = w.down(self.ops.apply_swiglu(kept.gate_up)).add_(kept.residual)
        if level == LIGHT:
            kept.gate_up = None
        return y, kept if level > LEAST else Activations(x=x)

    def _attention(self, kept: Activations, w: LayerWeights, tape: Tape) -> None:
        h, _ = self.ops.rms_norm(kept.x, w.input_norm, self.eps)
        kept.qkv = w.qkv(h)
        del h
        q, k, v = self._rotated(kept.qkv, w, tape)
        kept.attention_out, kept.logsumexp = tape.batch.forward(q, k, v, self.scale, self.window)
        kept.residual = w.out(kept.attention_out.flatten(1))

    def _mlp_input(self, kept: Activations, w: LayerWeights) -> None:
        """Add the attention output to the residual, and compute the gate and up projections of the MLP from it."""
        assert kept.residual is not None
        h, kept.residual = self.ops.rms_norm(kept.residual, w.mlp_norm, self.eps, kept.x)
        kept.gate_up = w.gate_up(h)

    def _rotated(self, qkv: Tensor, w: LayerWeights, tape: Tape) -> tuple[Tensor, Tensor, Tensor]:
        """Queries and keys with their norms and rotary embedding, and values."""
        q, k = self.ops.apply_rotary(qkv, tape.cos, tape.sin, self.heads, self.kv_heads, *w.norms, self.eps)
        return q, k, qkv[:, (self.heads + self.kv_heads) * self.head :].unflatten(1, (self.kv_heads, self.head))

    def backward(
        self, dy: Tensor, w: LayerWeights, kept: Activations, tape: Tape
    ) -> tuple[Tensor, list[Tensor | None]]:
        """The gradients of the layer's input and of all its weights. Consumes `kept`."""
        ops, sums = self.ops, self.gradients
        assert sums is not None
        self._recompute(kept, w, tape)
        gate_up, residual = kept.gate_up, kept.residual
        d_gate_up, gated = ops.apply_swiglu_backward(w.down.input_grad(dy), gate_up)
        down = w.down.weight_grads(dy, gated, sums)
        del gated, gate_up
        dh = w.gate_up.input_grad(d_gate_up)
        dx, h, norm_grad = ops.rms_norm_backward(dh, residual, w.mlp_norm, self.eps, dy)
        mlp = [sums.add(w.mlp_norm, norm_grad), *w.gate_up.weight_grads(d_gate_up, h, sums), *down]
        kept.gate_up = kept.residual = None
        del d_gate_up, dh, h, residual, dy
        d_qkv, norms_and_out = self._attention_backward(dx, w, kept, tape)
        dh = w.qkv.input_grad(d_qkv)
        back, h, norm_grad = ops.rms_norm_backward(dh, kept.x, w.input_norm, self.eps, dx)
        attention = [sums.add(w.input_norm, norm_grad), *w.qkv.weight_grads(d_qkv, h, sums)]
        return back, [*attention, *norms_and_out, *mlp]

    def _attention_backward(
        self, dx: Tensor, w: LayerWeights, kept: Activations, tape: Tape
    ) -> tuple[Tensor, list[Tensor | None]]:
        """The gradients of the joint projection, of the norms of queries and keys, and of the output projection."""
        sums, out, qkv = self.gradients, kept.attention_out, kept.qkv
        assert sums is not None and out is not None and qkv is not None and kept.logsumexp is not None
        out_grads = w.out.weight_grads(dx, out.flatten(1), sums)
        grad = w.out.input_grad(dx).view_as(out)
        q, k, v = self._rotated(qkv, w, tape)
        parts = tape.batch.backward(grad, q, k, v, out, kept.logsumexp, self.scale, self.window)
        kept.attention_out = kept.logsumexp = None
        back, *norm_grads = self.ops.apply_rotary_backward(
            *parts, qkv, tape.cos, tape.sin, self.heads, self.kv_heads, *w.norms, self.eps
        )
        norms = [sums.add(p, x) for p, x in zip(w.norms, norm_grads, strict=True) if p is not None]
        return back, [*norms, *out_grads]

    def _recompute(self, kept: Activations, w: LayerWeights, tape: Tape) -> None:
        """Recompute the activations that were not kept."""
        if kept.qkv is None:
            self._attention(kept, w, tape)
            self._mlp_input(kept, w)
        elif kept.gate_up is None:
            assert kept.residual is not None
            kept.gate_up = w.gate_up(self.ops.rms_norm(kept.residual, w.mlp_norm, self.eps)[0])


def _family(module: Any) -> str | None:
    """The supported class of a layer. FSDP2 makes a layer an instance of a subclass."""
    return next((x.__name__ for x in type(module).__mro__ if x.__name__ in FAMILIES), None)


def _check(model: Any) -> None:
    found = getattr(model.base_model, "layers", None)
    if found is None or not all(map(_family, found)):
        raise UnsupportedModel(f"{type(model).__name__} is not of the Llama family")
    if getattr(model.config, "hidden_act", "silu") != "silu":
        raise UnsupportedModel(f"its activation is {model.config.hidden_act}")
    for x in found:
        a, m = x.self_attn, x.mlp
        biased = any(p.bias is not None for p in (a.o_proj, m.gate_proj, m.up_proj, m.down_proj))
        mixed = len({p.bias is None for p in (a.q_proj, a.k_proj, a.v_proj)}) > 1
        linears = [p for group in projections(x) for p in group]
        if biased or mixed or any(type(p) not in (torch.nn.Linear, LoraLinear) for p in linears):
            raise UnsupportedModel("its projections are not plain linear layers, or only some of them have biases")
        if a.head_dim % 8 or a.head_dim != 2 * model.base_model.rotary_emb.inv_freq.numel():
            raise UnsupportedModel(f"its heads have {a.head_dim} elements: not a multiple of 8, or not all are rotated")
        if len({p.dtype for p in x.parameters()}) > 1 or not x.mlp.down_proj.weight.is_floating_point():
            raise UnsupportedModel("its weights have several dtypes")
