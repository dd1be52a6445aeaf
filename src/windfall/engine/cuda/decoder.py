"""The forward pass of dense decoders of the Llama family, over flat rows and the KV pool.

It takes its weights from a transformers module, or a `Bare` one, and shares their storage with it: the projections that
read the same input are laid end to end in one tensor, and the module's parameters become views of it. So nothing is
held twice, the module trains and saves as before, and what is copied into its parameters is what it computes with next.

Rules:
- what it does not know is refused by `refusal`, in words, before anything is changed;
- activations have the weights' dtype, and roundings come where transformers has them;
- whoever gives a parameter other storage (`module.to`, assigning `.data`) makes it `stale`: it must be made anew.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from windfall.engine.cuda import rotary, skeleton
from windfall.engine.cuda.fuse import fuse
from windfall.engine.cuda.splits import Sharing
from windfall.engine.cuda.state import DeviceState, Families, Pool, Spans
from windfall.errors import WindfallError

FAMILY = tuple(skeleton.KINDS.values())
STATIC_ROPE = tuple(rotary.NEEDS)


def refusal(model: Any) -> str | None:
    """Why this module cannot be run here; None: it can."""
    name, config = getattr(model, "architecture", type(model).__name__), model.config
    if name not in FAMILY:
        return f"{name} is not one of {', '.join(FAMILY)}"
    if config.hidden_act != "silu":
        return f"its MLP uses {config.hidden_act}, not silu"
    if model.model.rotary_emb.rope_type not in STATIC_ROPE:
        return f"its rotary embedding ({model.model.rotary_emb.rope_type}) changes with the length"
    linears = [(n, m) for n, m in model.named_modules() if n.endswith(("_proj", "lm_head"))]
    odd = [n for n, m in linears if type(m) not in (nn.Linear, skeleton.Linear)]
    if odd:
        return f"{odd[0]} is not a plain linear layer"
    parameters = list(model.parameters())
    if len({(p.dtype, p.device) for p in parameters}) != 1:
        return "its parameters are not all of one dtype on one device"
    if parameters[0].dtype not in (torch.bfloat16, torch.float16, torch.float32):
        return f"its parameters are {parameters[0].dtype}"
    return None


@dataclass(frozen=True, kw_only=True, slots=True)
class DecoderLayer:
    before: Tensor
    """Weight of the norm before attention."""
    qkv: Tensor
    qkv_bias: Tensor | None
    q_norm: Tensor | None
    k_norm: Tensor | None
    out: Tensor
    out_bias: Tensor | None
    after: Tensor
    """Weight of the norm before the MLP."""
    gate_up: Tensor
    gate_up_bias: Tensor | None
    down: Tensor
    down_bias: Tensor | None
    window: int | None


class Decoder:
    def __init__(self, model: Any, ops: Any) -> None:
        config = model.config
        self.model, self.ops = model, ops
        self.device, self.dtype = model.device, model.dtype
        self.heads = config.num_attention_heads
        self.kv_heads = getattr(config, "num_key_value_heads", None) or self.heads
        self.head = getattr(config, "head_dim", None) or config.hidden_size // self.heads
        self.scale, self.eps = self.head**-0.5, config.rms_norm_eps
        with torch.no_grad():
            self.layers = [_layer(block, config) for block in model.model.layers]
        self.embedding = model.model.embed_tokens.weight.data
        self.last_norm, self.lm_head = model.model.norm.weight.data, model.lm_head.weight.data
        self._addresses = [p.data_ptr() for p in model.parameters()]
        self.cos = self.sin = torch.empty(0, self.head, dtype=self.dtype, device=self.device)

    @staticmethod
    def of(model: Any, ops: Any = None) -> Decoder:
        """`ops`: the kernels to use, if not those that fit the module's device."""
        why = refusal(model)
        if why:
            raise WindfallError(f"the GPU engine cannot run this model: {why}", fix="Use TorchEngine.")
        return Decoder(model, ops or kernels_for(model.device.type))

    def stale(self) -> bool:
        """The module's parameters are no longer where they were: the weights here are not the module's."""
        return self._addresses != [p.data_ptr() for p in self.model.parameters()]

    @torch.no_grad()
    def reach(self, positions: int) -> None:
        """Sequences will have so many tokens at most."""
        rotary = self.model.model.rotary_emb
        at = torch.arange(positions, dtype=torch.float32, device=self.device)
        angles = at[:, None] * rotary.inv_freq.to(device=self.device, dtype=torch.float32)
        angles = torch.cat((angles, angles), -1)
        self.cos = (angles.cos() * rotary.attention_scaling).to(self.dtype)
        self.sin = (angles.sin() * rotary.attention_scaling).to(self.dtype)

    def sharing(self) -> Sharing:
        """Which rows may read together. None if every layer has a window: those read alone."""
        windows = all(w.window is not None for w in self.layers)
        return Sharing(rows=0) if windows else Sharing.of(self.heads, self.kv_heads)

    def decode(
        self, rows: Tensor, state: DeviceState, pool: Pool, splits: int, families: Families | None = None
    ) -> Tensor:
        """The newest token of every row's slot goes in; logits (B, V) for the next one come out."""
        ids, positions = self.ops.begin(state, rows)

        def attend(n: int, w: DecoderLayer, qkv: Tensor) -> Tensor:
            return self.ops.place_and_decode(
                qkv, rows, positions, state, pool, n, self.cos, self.sin, w.q_norm, w.k_norm, self.eps, self.heads,
                self.scale, w.window, splits, families,
            )  # fmt: skip

        return self._run(F.embedding(ids, self.embedding), attend, None)

    def prefill(self, ids: Tensor, spans: Spans, state: DeviceState, pool: Pool, wanted: Tensor) -> Tensor:
        """Tokens of `spans` go in; logits (W, V) of the rows `wanted` come out."""

        def attend(n: int, w: DecoderLayer, qkv: Tensor) -> Tensor:
            q = self.ops.place(
                qkv, spans.row_slot, spans.row_position, state, pool, n, self.cos, self.sin, w.q_norm, w.k_norm,
                self.eps, self.heads, self.kv_heads,
            )  # fmt: skip
            return self.ops.attend(q, spans, state, pool, n, self.scale, w.window)

        return self._run(F.embedding(ids, self.embedding), attend, wanted)

    def _run(self, x: Tensor, attend: Callable[[int, DecoderLayer, Tensor], Tensor], wanted: Tensor | None) -> Tensor:
        ops, eps, residual, last = self.ops, self.eps, None, len(self.layers) - 1
        for n, w in enumerate(self.layers):
            normed, residual = ops.norm(x, residual, w.before, eps)
            x = attend(n, w, F.linear(normed, w.qkv, w.qkv_bias))
            if n == last and wanted is not None:  # of the others, nothing but keys and values was needed
                if not len(wanted):
                    return x.new_empty(0, len(self.lm_head))
                x, residual = x.index_select(0, wanted), residual.index_select(0, wanted)
            normed, residual = ops.norm(F.linear(x, w.out, w.out_bias), residual, w.after, eps)
            x = F.linear(ops.gate(F.linear(normed, w.gate_up, w.gate_up_bias)), w.down, w.down_bias)
        normed, _ = ops.norm(x, residual, self.last_norm, eps)
        return F.linear(normed, self.lm_head)


def kernels_for(device: str) -> Any:
    if device == "cuda":
        from windfall.engine.cuda import kernels

        return kernels
    from windfall.engine.cuda import reference

    return reference


def _layer(block: Any, config: Any) -> DecoderLayer:
    a, mlp = block.self_attn, block.mlp
    # Mistral keeps the window in its configuration alone; others say by layer whether they have one.
    window = getattr(a, "sliding_window", config.sliding_window if config.model_type == "mistral" else None)
    norms = [getattr(a, name).weight.data if hasattr(a, name) else None for name in ("q_norm", "k_norm")]
    qkv, qkv_bias = fuse(a.q_proj, a.k_proj, a.v_proj)
    gate_up, gate_up_bias = fuse(mlp.gate_proj, mlp.up_proj)
    return DecoderLayer(
        before=block.input_layernorm.weight.data, qkv=qkv, qkv_bias=qkv_bias, q_norm=norms[0], k_norm=norms[1],
        out=a.o_proj.weight.data, out_bias=_bias(a.o_proj), after=block.post_attention_layernorm.weight.data,
        gate_up=gate_up, gate_up_bias=gate_up_bias, down=mlp.down_proj.weight.data, down_bias=_bias(mlp.down_proj),
        window=window,
    )  # fmt: skip


def _bias(linear: nn.Linear) -> Tensor | None:
    return None if linear.bias is None else linear.bias.data
