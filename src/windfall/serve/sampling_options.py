"""How a serving request wants its tokens sampled: reads and checks the fields of its body. Plain data in and out.

A field that changes the distribution and that the engine does not have is refused with status 400, unless its value has
no effect.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from windfall.gateway.protocol import ApiError
from windfall.types import Sampling

NEUTRAL: dict[str, tuple[Any, ...]] = {
    "frequency_penalty": (0,), "presence_penalty": (0,), "repetition_penalty": (1,), "logit_bias": ({},), "min_p": (0,),
    "min_tokens": (0,), "use_beam_search": (False,), "response_format": ({"type": "text"},), "guided_json": (),
}  # fmt: skip
"""Fields that are not supported, and the values that have no effect."""
MAX_SEED = 1 << 63


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingOptions:
    sampling: Sampling
    seed: int | None
    ignore_eos: bool


def read(body: Mapping[str, Any]) -> SamplingOptions:
    """The options of a request.

    >>> read({"temperature": 0, "seed": 7}).sampling
    Sampling(temperature=0.0, top_p=1.0, top_k=0)
    """
    for name, neutral in NEUTRAL.items():
        if body.get(name) is not None and body[name] not in neutral:
            raise ApiError(400, f"{name} is not supported", param=name)
    top_k = _number(body, "top_k", 0, -1, 1 << 31)
    seed = body.get("seed")
    if seed is not None and (type(seed) is not int or not -MAX_SEED <= seed < MAX_SEED):
        raise ApiError(400, "seed must be an integer of 64 bits", param="seed")
    ignore_eos = body.get("ignore_eos")
    if ignore_eos not in (None, True, False):
        raise ApiError(400, "ignore_eos must be true or false", param="ignore_eos")
    top_p = _number(body, "top_p", 1.0, 0.0, 1.0)
    if top_p == 0.0:
        raise ApiError(400, "top_p must be above 0", param="top_p")
    sampling = Sampling(
        temperature=_number(body, "temperature", 1.0, 0.0, 100.0), top_p=top_p, top_k=max(0, int(top_k))
    )
    return SamplingOptions(
        sampling=sampling, seed=None if seed is None else seed % (1 << 64), ignore_eos=bool(ignore_eos)
    )


def _number(body: Mapping[str, Any], name: str, default: float, least: float, most: float) -> float:
    value = body.get(name)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ApiError(400, f"{name} must be a number", param=name)
    if not least <= value <= most:
        raise ApiError(400, f"{name} is {value}; it must be between {least:g} and {most:g}", param=name)
    return float(value)
