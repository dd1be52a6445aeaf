"""The algorithms by name. To add one, write a subclass of `base.Algorithm` in a file here, and add a line below."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from windfall.algorithms.base import Algorithm, Outcome
from windfall.algorithms.cispo import CISPO
from windfall.algorithms.dapo import DAPO
from windfall.algorithms.dr_grpo import DrGRPO
from windfall.algorithms.grpo import GRPO
from windfall.algorithms.gspo import GSPO
from windfall.algorithms.reinforce_pp import ReinforcePP
from windfall.algorithms.rloo import RLOO
from windfall.errors import WindfallError, nearest

ALGORITHMS: dict[str, type[Algorithm]] = {
    "grpo": GRPO,
    "dr_grpo": DrGRPO,
    "dapo": DAPO,
    "rloo": RLOO,
    "reinforce_pp": ReinforcePP,
    "gspo": GSPO,
    "cispo": CISPO,
}


def learns_alone(algorithm: Algorithm) -> bool:
    """Whether the algorithm can learn from groups of one response.

    >>> [name for name in ALGORITHMS if learns_alone(make(name))]
    ['reinforce_pp']
    """
    alone = [[Outcome(reward=reward, length=1, limit=2)] for reward in (0.0, 1.0)]
    kept = [group for group in alone if algorithm.informative(group)]
    return any(a != 0 for group in algorithm.advantages(kept) for a in group)


def make(name: str, **options: Any) -> Algorithm:
    """The algorithm `name` with these options.

    >>> make("dapo", clip_high=0.3).normalizer(length=7, limit=100)
    7.0
    """
    if name not in ALGORITHMS:
        raise WindfallError(f"unknown algorithm '{name}'", fix=nearest(name, ALGORITHMS))
    cls: Any = ALGORITHMS[name]
    known, where = {field.name: field.default for field in fields(cls)}, f"algorithm {name}"
    for option, value in options.items():
        if option not in known:
            raise WindfallError(f"unknown option '{option}'", where=where, fix=nearest(option, known))
        if isinstance(value, str) != isinstance(known[option], str):
            fix = f"Use a value such as {known[option]!r}."
            raise WindfallError(f"wrong type: {option} = {value!r}", where=where, fix=fix)
        if not isinstance(value, str) and not value >= 0:
            raise WindfallError(
                f"{option} = {value!r} is not 0 or more", where=where, fix=f"Use a value such as {known[option]!r}."
            )
    return cls(**options)
