"""The frequencies of rotary embeddings, computed from a model's configuration alone: bit for bit those of transformers.

Every formula here follows the order in which transformers rounds. `unsupported_reason` rejects, with an explanation,
every configuration that is not certain to be handled exactly; the caller then lets transformers build the model.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

REQUIRED_PARAMETERS = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor", "original_max_position_embeddings"),
}
"""RoPE types whose frequencies do not depend on the sequence length, and the parameters that each type needs."""


def rope_parameters(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The configuration's RoPE parameters. Older configurations have `rope_theta` alone."""
    if config.get("rope_parameters") is None and config.get("rope_scaling") is None and config.get("rope_theta"):
        return {"rope_type": "default", "rope_theta": config["rope_theta"]}
    return config.get("rope_parameters") or {}


def unsupported_reason(config: Mapping[str, Any]) -> str | None:
    """Why the frequencies cannot be computed here; None if they can.

    >>> unsupported_reason({"rope_theta": 1e6})
    >>> unsupported_reason({"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}})
    "its rotary embedding ('dynamic') is not one of default, linear, llama3, yarn"
    """
    rope = rope_parameters(config)
    kind = rope.get("rope_type")
    if kind not in REQUIRED_PARAMETERS:
        return f"its rotary embedding ({kind!r}) is not one of {', '.join(REQUIRED_PARAMETERS)}"
    missing = [
        name for name in ("rope_theta", *REQUIRED_PARAMETERS[kind]) if not isinstance(rope.get(name), int | float)
    ]
    if missing:
        return f"its {kind} rotary embedding has no {missing[0]}"
    if any((where.get("partial_rotary_factor") or 1.0) != 1.0 for where in (rope, config)):
        return "its rotary embedding rotates only a part of every head"
    if config.get("original_max_position_embeddings") is not None:
        return "its configuration has original_max_position_embeddings outside rope_parameters"
    return None


def frequencies(config: Mapping[str, Any], head: int) -> tuple[Tensor, float]:
    """The frequencies (head / 2,) float32 on the CPU, and the scale factor of sine and cosine."""
    rope = rope_parameters(config)
    waves = rope["rope_theta"] ** (torch.arange(0, head, 2, dtype=torch.float32, device="cpu") / head)
    match rope["rope_type"]:
        case "linear":
            return 1.0 / waves / rope["factor"], 1.0
        case "llama3":
            return _llama3(1.0 / waves, rope), 1.0
        case "yarn":
            return _yarn(waves, rope, head), _yarn_scaling(rope)
    return 1.0 / waves, 1.0


def _llama3(plain: Tensor, rope: Mapping[str, Any]) -> Tensor:
    """Keep short wavelengths, stretch long ones, and interpolate between them."""
    factor, low, high = rope["factor"], rope["low_freq_factor"], rope["high_freq_factor"]
    context = rope["original_max_position_embeddings"]
    length = 2 * math.pi / plain
    share = (context / length - low) / (high - low)
    between = (1 - share) * plain / factor + share * plain
    long, short = length > context / low, length < context / high
    return torch.where(long, plain / factor, torch.where(short, plain, between))


def _yarn(waves: Tensor, rope: Mapping[str, Any], head: int) -> Tensor:
    base, context = rope["rope_theta"], rope["original_max_position_embeddings"]

    def dimension(turns: float) -> float:
        """The dimension that makes this number of full rotations within the original context."""
        return (head * math.log(context / (turns * 2 * math.pi))) / (2 * math.log(base))

    low, high = dimension(rope.get("beta_fast") or 32), dimension(rope.get("beta_slow") or 1)
    if rope.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head - 1)
    if low == high:
        high += 0.001
    ramp = ((torch.arange(head // 2, dtype=torch.float32, device="cpu") - low) / (high - low)).clamp(0, 1)
    keep = 1 - ramp
    return 1.0 / (rope["factor"] * waves) * (1 - keep) + 1.0 / waves * keep


def _yarn_scaling(rope: Mapping[str, Any]) -> float:
    given, factor = rope.get("attention_factor"), rope["factor"]
    if given is not None:
        return given

    def scale(by: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * by * math.log(factor) + 1.0

    if rope.get("mscale") and rope.get("mscale_all_dim"):
        return scale(rope["mscale"]) / scale(rope["mscale_all_dim"])
    return scale(1)
