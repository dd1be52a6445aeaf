"""How a serving request wants its tokens sampled: reads and checks the fields of its body. Plain data in and out.

No value of any field may raise an error other than ApiError: all requests share an engine.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from windfall.controller.gateway.protocol import ApiError
from windfall.types import Sampling

MAX_SEED = 1 << 63
GREEDY_BELOW = 1e-5
"""A temperature below this is greedy. Logits divided by a tiny number would be infinite."""


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
    temperature = _number(body, "temperature", 1.0, 0.0, 100.0)
    temperature = temperature if temperature >= GREEDY_BELOW else 0.0
    sampling = Sampling(temperature=temperature, top_p=top_p, top_k=max(0, int(top_k)))
    return SamplingOptions(
        sampling=sampling, seed=None if seed is None else seed % (1 << 64), ignore_eos=bool(ignore_eos)
    )


def choice_seed(seed: int | None, number: int) -> int:
    """The seed of one of several choices: `number` counts those of one prompt. With a seed of the request it is always
    the same, and choice 0 is the answer that the request has without `n`. Without one it is random.

    A sum of seed and number would give requests with neighboring seeds the same choices.
    """
    if seed is None:
        return secrets.randbits(63)
    if number == 0:
        return seed
    return int.from_bytes(hashlib.blake2b(f"{seed}/{number}".encode(), digest_size=8).digest())


def _number(body: Mapping[str, Any], name: str, default: float, least: float, most: float) -> float:
    value = body.get(name)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ApiError(400, f"{name} must be a number", param=name)
    if not least <= value <= most:  # also NaN
        raise ApiError(400, f"{name} must be between {least:g} and {most:g}", param=name)
    return float(value)
