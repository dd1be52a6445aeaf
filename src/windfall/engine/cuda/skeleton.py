"""A model's weight tensors without its code: what the decoder needs of a module, built without transformers.

A worker has its own forward pass and pulls its weights, so it needs only tensors of the right names and shapes, and a
few values of the configuration. `ModelSkeleton` quickly allocates the tensors on the device, uninitialized.

Rules:
- names, shapes, order and tied weights are those of transformers' module, so pulled weights can be copied unchanged;
- projections that read the same input are adjacent in memory from the start, so the decoder moves nothing;
- the frequencies of the rotary embedding are those of transformers, bit for bit;
- `unsupported_reason` rejects, with an explanation, a configuration that leaves anything undetermined: transformers
  must build that model.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

ARCHITECTURES = {
    "llama": "LlamaForCausalLM", "mistral": "MistralForCausalLM", "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}  # fmt: skip
SIZES = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
)  # fmt: skip
REQUIRED_FIELDS = {
    "llama": ("attention_bias", "mlp_bias"), "mistral": ("sliding_window",), "qwen2": ("use_sliding_window",),
    "qwen3": ("attention_bias", "use_sliding_window", "head_dim"),
}  # fmt: skip
"""Fields that the configuration of each model type must have besides the common ones. If one is missing, transformers
would use a default that is not known here."""
ROPE_PARAMETERS = {
    "default": ("rope_theta",),
    "llama3": ("rope_theta", "factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
}
"""The types of rotary embeddings whose frequencies are computed here, and the parameters that each type needs."""


def unsupported_reason(config: Mapping[str, Any]) -> str | None:
    """Why this configuration does not determine the module; None if it does.

    >>> unsupported_reason({"model_type": "gemma"})
    "'gemma' is not one of llama, mistral, qwen2, qwen3"
    """
    kind = config.get("model_type")
    if kind not in ARCHITECTURES:
        return f"{kind!r} is not one of {', '.join(ARCHITECTURES)}"
    wrong = [name for name in SIZES if type(config.get(name)) is not int]
    if wrong:
        return f"its configuration does not say {wrong[0]}"
    missing = [
        name
        for name in ("rms_norm_eps", "hidden_act", "tie_word_embeddings", *REQUIRED_FIELDS[kind])
        if name not in config
    ]
    if missing:
        return f"its configuration does not say {missing[0]}"
    if config["hidden_act"] != "silu":
        return f"its MLP uses {config['hidden_act']}, not silu"
    if config.get("quantization_config"):
        return "it is quantized"
    return _window_reason(config) or _rope_reason(config)


def _window_reason(config: Mapping[str, Any]) -> str | None:
    by_layer = config.get("layer_types")
    if config["model_type"] in ("llama", "mistral"):
        return None if by_layer is None else "its layers differ"
    if not config["use_sliding_window"]:
        return None
    by_layer = by_layer if isinstance(by_layer, list) else []
    known = len(by_layer) == config["num_hidden_layers"] and set(by_layer) <= {"full_attention", "sliding_attention"}
    if not known or "sliding_window" not in config:
        return "its configuration does not say which layers have a window"
    return None


def _rope_reason(config: Mapping[str, Any]) -> str | None:
    rope = rope_parameters(config)
    kind = rope.get("rope_type")
    if kind not in ROPE_PARAMETERS:
        return f"its rotary embedding ({kind!r}) is not one of {', '.join(ROPE_PARAMETERS)}"
    missing = [name for name in ROPE_PARAMETERS[kind] if not isinstance(rope.get(name), int | float)]
    if missing:
        return f"its {kind} rotary embedding has no {missing[0]}"
    if any((where.get("partial_rotary_factor") or 1.0) != 1.0 for where in (rope, config)):
        return "its rotary embedding rotates only a part of every head"
    if config.get("original_max_position_embeddings") is not None:
        return "its configuration has original_max_position_embeddings outside rope_parameters"
    return None


def rope_parameters(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The configuration's RoPE parameters. Older configurations have `rope_theta` alone."""
    if config.get("rope_parameters") is None and config.get("rope_scaling") is None and config.get("rope_theta"):
        return {"rope_type": "default", "rope_theta": config["rope_theta"]}
    return config.get("rope_parameters") or {}


def frequencies(config: Mapping[str, Any], head: int) -> Tensor:
    """The frequencies (head / 2,) float32 on the CPU, rounded in the order in which transformers rounds."""
    rope = rope_parameters(config)
    plain = 1.0 / rope["rope_theta"] ** (torch.arange(0, head, 2, dtype=torch.float32, device="cpu") / head)
    if rope["rope_type"] == "default":
        return plain
    # llama3: keep short wavelengths, stretch long ones, and interpolate between them.
    factor, low, high = rope["factor"], rope["low_freq_factor"], rope["high_freq_factor"]
    context = rope["original_max_position_embeddings"]
    length = 2 * math.pi / plain
    share = (context / length - low) / (high - low)
    between = (1 - share) * plain / factor + share * plain
    long, short = length > context / low, length < context / high
    return torch.where(long, plain / factor, torch.where(short, plain, between))


class Linear(nn.Linear):
    """A linear layer with given weights: no time is spent on random initialization."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        nn.Module.__init__(self)
        self.out_features, self.in_features = weight.shape
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.register_parameter("bias", None if bias is None else nn.Parameter(bias, requires_grad=False))


class Norm(nn.Module):
    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)


class Rotary(nn.Module):
    inv_freq: Tensor
    attention_scaling = 1.0

    def __init__(self, config: Mapping[str, Any], head: int, device: str) -> None:
        super().__init__()
        self.rope_type = rope_parameters(config)["rope_type"]
        self.register_buffer("inv_freq", frequencies(config, head).to(device), persistent=False)


class NamedModules(nn.Module):
    """A module of named submodules, in the given order."""

    sliding_window: int | None

    def __init__(self, **parts: nn.Module | None) -> None:
        super().__init__()
        for name, part in parts.items():
            if part is not None:
                self.add_module(name, part)


class ModelSkeleton(nn.Module):
    """Takes the place of transformers' module of the class `architecture`. It cannot be called."""

    def __init__(
        self,
        config: Mapping[str, Any],
        *,
        dtype: torch.dtype,
        device: str,
        empty: Callable[[tuple[int, ...]], Tensor] | None = None,
    ) -> None:
        """`empty`: makes an uninitialized tensor of a shape; by default, each gets memory of its own."""
        super().__init__()
        self.architecture = ARCHITECTURES[config["model_type"]]
        self._new = empty or (lambda shape: torch.empty(shape, dtype=dtype, device=device))
        head = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
        self.config = SimpleNamespace(**{"sliding_window": None, **config, "head_dim": head})
        hidden = config["hidden_size"]
        embedding = nn.Embedding.from_pretrained(self._new((config["vocab_size"], hidden)))
        self.model = NamedModules(
            embed_tokens=embedding,
            layers=nn.ModuleList(self._block(n, head) for n in range(config["num_hidden_layers"])),
            norm=Norm(self._new((hidden,))),
            rotary_emb=Rotary(config, head, device),
        )
        head_weight = self._new((config["vocab_size"], hidden)) if not config["tie_word_embeddings"] else None
        self.lm_head = Linear(embedding.weight.data if head_weight is None else head_weight, None)
        if head_weight is None:
            self.lm_head.weight = embedding.weight
        self.eval()

    @property
    def dtype(self) -> torch.dtype:
        return self.lm_head.weight.dtype

    @property
    def device(self) -> torch.device:
        return self.lm_head.weight.device

    def get_input_embeddings(self) -> Any:
        return self.model.embed_tokens

    def _linears(self, inputs: int, outputs: Sequence[int], bias: bool) -> list[Linear]:
        """Linear layers that read the same input, adjacent in memory."""
        weights = self._new((sum(outputs), inputs)).split(list(outputs))
        biases = self._new((sum(outputs),)).split(list(outputs)) if bias else [None] * len(outputs)
        return [Linear(w, b) for w, b in zip(weights, biases, strict=True)]

    def _block(self, n: int, head: int) -> nn.Module:
        c, kind = self.config, self.config.model_type
        hidden, heads, kv_heads = c.hidden_size, c.num_attention_heads * head, c.num_key_value_heads * head
        bias = kind in ("llama", "qwen3") and c.attention_bias
        mlp_bias = kind == "llama" and c.mlp_bias
        q, k, v = self._linears(hidden, (heads, kv_heads, kv_heads), bias or kind == "qwen2")
        (o,) = self._linears(heads, (hidden,), bias)
        q_norm, k_norm = (Norm(self._new((head,))) if kind == "qwen3" else None for _ in range(2))
        attention = NamedModules(q_proj=q, k_proj=k, v_proj=v, o_proj=o, q_norm=q_norm, k_norm=k_norm)
        if kind in ("qwen2", "qwen3"):
            sliding = c.use_sliding_window and c.layer_types[n] == "sliding_attention"
            attention.sliding_window = c.sliding_window if sliding else None
        gate, up = self._linears(hidden, (c.intermediate_size, c.intermediate_size), mlp_bias)
        (down,) = self._linears(c.intermediate_size, (hidden,), mlp_bias)
        return NamedModules(
            self_attn=attention,
            mlp=NamedModules(gate_proj=gate, up_proj=up, down_proj=down),
            input_layernorm=Norm(self._new((hidden,))),
            post_attention_layernorm=Norm(self._new((hidden,))),
        )
