"""Whether the packs of a model can be split over the ranks of a context group (ulysses.py). Pure: config.json tells, so
it is checked before anything starts, and again before weights are read."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal

from windfall.errors import WindfallError

KEY = "train.context_parallel"


def check(size: int, ranks: int | Literal["auto"], config: Mapping[str, Any]) -> None:
    """Raise WindfallError unless packs can be split over `size` of the ranks, as far as these fields of config.json
    show it. Ranks that are "auto" are not known yet.

    >>> check(3, "auto", {"num_attention_heads": 32})
    Traceback (most recent call last):
    windfall.errors.WindfallError: train.context_parallel = 3: this model has 32 heads (32 key/value heads), ...
    """
    if size == 1:
        return
    where = f"{KEY} = {size}"
    if ranks != "auto" and ranks % size:
        what = f"{ranks} {'rank' if ranks == 1 else 'ranks'} cannot be divided into groups of {size}"
        raise WindfallError(what, where=where, fix=f"Use a divisor of the number of ranks: {_divisors(ranks)}.")
    heads = config.get("num_attention_heads") or 0
    if heads % size:
        kv_heads = config.get("num_key_value_heads") or heads
        what = f"this model has {heads} heads ({kv_heads} key/value heads), which {size} ranks cannot divide equally"
        able = _divisors(heads if ranks == "auto" else math.gcd(heads, ranks))
        raise WindfallError(what, where=where, fix=f"Use a divisor of both heads and ranks: {able}.")
    for kind in _rotary_kinds(config):  # a rank that has only the beginning of a sequence would use another embedding
        if kind in ("dynamic", "longrope"):
            what = f"the rotary embedding of this model ({kind}) depends on the longest sequence of a pass"
            raise WindfallError(what, where=where, fix="Set it to 1.")


def _rotary_kinds(config: Mapping[str, Any]) -> list[Any]:
    """
    >>> _rotary_kinds({"rope_parameters": {"full": {"rope_type": "longrope"}, "sliding": {"rope_type": "default"}}})
    ['longrope', 'default']
    >>> _rotary_kinds({"rope_scaling": {"type": "dynamic"}}), _rotary_kinds({})
    (['dynamic'], [None])
    """
    found = config.get("rope_parameters") or config.get("rope_scaling") or {}
    each = [own for own in found.values() if isinstance(own, Mapping)] or [found]
    # "dynamic" with alpha is a fixed scale (Hunyuan).
    return [own.get("rope_type", own.get("type")) for own in each if not own.get("alpha")]


def _divisors(number: int) -> str:
    return ", ".join(str(n) for n in range(1, number + 1) if number % n == 0)
