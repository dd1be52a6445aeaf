"""The forward pass of dense decoders of the Llama family, over flat rows and the KV pool.

It takes its weights from a transformers module or a `ModelSkeleton`, and shares their storage: projections that read
the same input are joined into one tensor, and the module's parameters become views of it. So no weight is stored twice,
the module trains and saves as before, and weights copied into its parameters are used from the next step on.

Rules:
- `unsupported_reason` rejects unknown models with an explanation, before anything is changed;
- activations have the weights' dtype, and values are rounded where transformers rounds them;
- a parameter that gets other storage (`module.to`, assigning `.data`) makes the decoder `stale`: build a new one.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from windfall.engine.cuda import skeleton
from windfall.engine.cuda.adapters import DeviceAdapters, ProjectionAdapters, RowGroups
from windfall.engine.cuda.splits import PrefixSharing
from windfall.engine.cuda.state import DeviceState, KVPool, PrefixGroups, Spans, Texts
from windfall.engine.module_weights import join
from windfall.errors import WindfallError

KERNELS = {"cuda": "windfall.engine.cuda.kernels"}
"""The module with the kernels for each type of device. The tests have one for CPUs."""
SUPPORTED = tuple(skeleton.ARCHITECTURES.values())
STATIC_ROPE = ("default", "linear", "llama3", "yarn")
"""Types of rotary embeddings that do not change with the length of the sequence."""


def unsupported_reason(model: Any) -> str | None:
    """Why the decoder cannot run this module; None if it can."""
    name, config = getattr(model, "architecture", type(model).__name__), model.config
    if name not in SUPPORTED:
        return f"{name} is not one of {', '.join(SUPPORTED)}"
    if config.hidden_act != "silu":
        return f"its MLP uses {config.hidden_act}, not silu"
    if model.model.rotary_emb.rope_type not in STATIC_ROPE:
        return f"its rotary embedding ({model.model.rotary_emb.rope_type}) changes with the sequence length"
    linears = [(n, m) for n, m in model.named_modules() if n.endswith(("_proj", "lm_head"))]
    odd = [n for n, m in linears if type(m) not in (nn.Linear, skeleton.Linear)]
    if odd:
        return f"{odd[0]} is not a plain linear layer"
    parameters = list(model.parameters())
    if len({(p.dtype, p.device) for p in parameters}) != 1:
        return "its parameters are not all of one dtype on one device"
    if parameters[0].dtype not in (torch.bfloat16, torch.float16, torch.float32):
        return f"its parameters are {parameters[0].dtype}, not bfloat16, float16 or float32"
    return None


class JoinedProjection(NamedTuple):
    """Linear layers that read the same input, joined. With adapters, weight and bias are those of the adapters."""

    weight: Tensor
    bias: Tensor | None
    adapters: ProjectionAdapters | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class DecoderLayer:
    input_norm: Tensor  # weight of the norm before attention
    qkv: JoinedProjection
    q_norm: Tensor | None
    k_norm: Tensor | None
    out: JoinedProjection
    mlp_norm: Tensor  # weight of the norm before the MLP
    gate_up: JoinedProjection
    down: JoinedProjection
    window: int | None


class Decoder:
    def __init__(self, model: Any, ops: Any, adapters: DeviceAdapters | None = None) -> None:
        config = model.config
        self.adapters = adapters
        self.model = model
        self.ops = ops
        self.device = model.device
        self.dtype = model.dtype
        self.heads = config.num_attention_heads
        self.kv_heads = getattr(config, "num_key_value_heads", None) or self.heads
        self.head = getattr(config, "head_dim", None) or config.hidden_size // self.heads
        self.scale = self.head**-0.5
        self.eps = config.rms_norm_eps
        with torch.no_grad():
            own = [{} for _ in model.model.layers] if adapters is None else adapters.layers
            self.layers = [_layer(block, config, a) for block, a in zip(model.model.layers, own, strict=True)]
        self.embedding = model.model.embed_tokens.weight.data
        self.last_norm = model.model.norm.weight.data
        self.lm_head = model.lm_head.weight.data
        self._addresses = [p.data_ptr() for p in model.parameters()]
        self.sizes = (self.heads * self.head, config.hidden_size)
        """Sizes of a row of what `prefill` returns."""
        self.cos = self.sin = torch.empty(0, self.head, dtype=self.dtype, device=self.device)

    @staticmethod
    def of(model: Any, ops: Any = None, adapters: DeviceAdapters | None = None) -> Decoder:
        """`ops`: the kernels to use instead of those for the module's device. `adapters`: those that rows may use."""
        reason = unsupported_reason(model)
        if reason:
            raise WindfallError(f"the GPU engine cannot run this model: {reason}", fix="Use TorchEngine.")
        return Decoder(model, ops or importlib.import_module(KERNELS[model.device.type]), adapters)

    def stale(self) -> bool:
        """Whether the module's parameters have moved, so that these weights are no longer the module's."""
        return self._addresses != [p.data_ptr() for p in self.model.parameters()]

    @torch.no_grad()
    def build_rotary_tables(self, positions: int) -> None:
        """Compute the tables of sine and cosine for sequences of at most `positions` tokens."""
        rotary = self.model.model.rotary_emb
        at = torch.arange(positions, dtype=torch.float32, device=self.device)
        angles = at[:, None] * rotary.inv_freq.to(device=self.device, dtype=torch.float32)
        angles = torch.cat((angles, angles), -1)
        self.cos = (angles.cos() * rotary.attention_scaling).to(self.dtype)
        self.sin = (angles.sin() * rotary.attention_scaling).to(self.dtype)

    def sharing(self) -> PrefixSharing:
        """Which rows may form prefix groups. If every layer has a window, none: each row reads its own window."""
        windows = all(w.window is not None for w in self.layers)
        return PrefixSharing(max_rows=0) if windows else PrefixSharing.for_heads(self.heads, self.kv_heads)

    def decode(
        self,
        rows: Tensor,
        state: DeviceState,
        pool: KVPool,
        splits: int,
        prefix_groups: PrefixGroups | None = None,
        texts: Texts | None = None,
        width: int = 1,
    ) -> tuple[Tensor, Tensor]:
        """Logits (B * width, V) for the tokens after the newest token of every row's slot and after each of the tokens
        drafted for it; and the tokens that `texts` lead to expect there (B * width), -1 for none."""
        ids, positions, expected = self.ops.decode_inputs(state, rows, texts, width)
        groups = self.group_rows(rows, state, width)

        def attend(n: int, w: DecoderLayer, qkv: Tensor) -> Tensor:
            return self.ops.rope_store_and_decode(
                qkv, rows, positions, state, pool, n, *self._rotation(w), self.scale, w.window, splits, prefix_groups,
                width,
            )  # fmt: skip

        return self.logits(*self._attended(ids, attend, groups), groups), expected

    def group_rows(self, slots: Tensor, state: DeviceState, width: int = 1) -> RowGroups | None:
        """The rows of these slots by adapter; None: there are no adapters."""
        return None if self.adapters is None else self.ops.group_rows(slots, state, self.adapters.count, width)

    def prefill(self, spans: Spans, state: DeviceState, pool: KVPool) -> tuple[Tensor, Tensor]:
        """Compute keys and values of all rows. Returns what `logits` needs, of every row."""

        def attend(n: int, w: DecoderLayer, qkv: Tensor) -> Tensor:
            at = (spans.slot, spans.position)
            q = self.ops.rope_and_store(qkv, *at, state, pool, n, *self._rotation(w), self.kv_heads)
            return self.ops.prefill_attention(q, spans, state, pool, n, self.scale, w.window)

        return self._attended(spans.ids, attend, self.group_rows(spans.slot, state))

    def _rotation(self, w: DecoderLayer) -> tuple[Any, ...]:
        """Arguments of the kernels that normalize and rotate queries and keys."""
        return self.cos, self.sin, w.q_norm, w.k_norm, self.eps, self.heads

    def _project(self, x: Tensor, w: JoinedProjection, groups: RowGroups | None) -> Tensor:
        y = F.linear(x, w.weight, w.bias)
        return y if groups is None else self.ops.add_adapters(y, w.adapters, groups)

    def _embedded(self, ids: Tensor, groups: RowGroups | None) -> Tensor:
        x = F.embedding(ids, self.embedding)
        if self.adapters is None or groups is None:
            return x
        own = self.adapters.embedding
        return self.ops.add_adapters(torch.cat([x, F.embedding(ids, own.weight)], 1), own, groups)

    def _attended(
        self, ids: Tensor, attend: Callable[[int, DecoderLayer, Tensor], Tensor], groups: RowGroups | None
    ) -> tuple[Tensor, Tensor]:
        """All layers up to the attention of the last one: its output, and the residual."""
        x, first = self._embedded(ids, groups), self.layers[0]
        normed, residual = self.ops.add_rms_norm(x, None, first.input_norm, self.eps)
        x = attend(0, first, self._project(normed, first.qkv, groups))
        for n, (before, w) in enumerate(pairwise(self.layers), 1):
            normed, residual = self.ops.add_rms_norm(*self._mlp(before, x, residual, groups), w.input_norm, self.eps)
            x = attend(n, w, self._project(normed, w.qkv, groups))
        return x, residual

    def _mlp(self, w: DecoderLayer, x: Tensor, residual: Tensor, groups: RowGroups | None) -> tuple[Tensor, Tensor]:
        """The rest of a layer after its attention."""
        out = self._project(x, w.out, groups)
        normed, residual = self.ops.add_rms_norm(out, residual, w.mlp_norm, self.eps)
        gate_up = F.linear(normed, w.gate_up.weight, w.gate_up.bias)
        if groups is None:
            x = self.ops.swiglu(gate_up)
        else:
            x = self.ops.add_adapters_swiglu(gate_up, w.gate_up.adapters, groups)
        return self._project(x, w.down, groups), residual

    def logits(self, attended: Tensor, residual: Tensor, groups: RowGroups | None = None) -> Tensor:
        """Logits of some rows, from the output of the last layer's attention and the residual. `groups`: of these
        rows."""
        last = self._mlp(self.layers[-1], attended, residual, groups)
        normed, _ = self.ops.add_rms_norm(*last, self.last_norm, self.eps)
        if self.adapters is None or groups is None:
            return F.linear(normed, self.lm_head)
        head = self.adapters.head
        return self.ops.add_adapters_in_place(F.linear(normed, head.weight, head.bias), head, groups)


def _layer(block: Any, config: Any, adapters: Mapping[str, ProjectionAdapters]) -> DecoderLayer:
    a, mlp = block.self_attn, block.mlp
    # Mistral has the window only in its configuration; the others have it in every layer.
    window = getattr(a, "sliding_window", config.sliding_window if config.model_type == "mistral" else None)
    norms = [getattr(a, name).weight.data if hasattr(a, name) else None for name in ("q_norm", "k_norm")]
    return DecoderLayer(
        input_norm=block.input_layernorm.weight.data,
        qkv=_join(adapters.get("qkv"), a.q_proj, a.k_proj, a.v_proj),
        q_norm=norms[0],
        k_norm=norms[1],
        out=_join(adapters.get("out"), a.o_proj),
        mlp_norm=block.post_attention_layernorm.weight.data,
        gate_up=_join(adapters.get("gate_up"), mlp.gate_proj, mlp.up_proj),
        down=_join(adapters.get("down"), mlp.down_proj),
        window=window,
    )


def _join(adapters: ProjectionAdapters | None, *linears: nn.Linear) -> JoinedProjection:
    """The joined weight and the joined bias of linear layers that read the same input."""
    if adapters is not None:
        return JoinedProjection(adapters.weight, adapters.bias, adapters)
    weight = join([linear.weight for linear in linears])
    bias = None if linears[0].bias is None else join([linear.bias for linear in linears])
    return JoinedProjection(weight, bias)
