"""From the recipe's [env] section to an environment."""

from __future__ import annotations

import importlib
import os
import sys
from typing import Any

from windfall.envs.base import Env
from windfall.errors import WindfallError, nearest


def make(section: Any, seed: int) -> Env:
    """`section` is one of the env sections of windfall.config. Refuses what is wrong before any task is drawn."""
    options = section.model_dump(exclude={"name"}, exclude_none=True)
    match section.name:
        case "arithmetic":
            from windfall.envs.arithmetic import Arithmetic

            return Arithmetic(seed=seed, **options)
        case "gym":
            from windfall.envs.gym import Gym

            return Gym(seed=seed, **options)
        case "jsonl":
            from windfall.envs.jsonl import JsonLines

            return JsonLines(seed=seed, **options)
        case "guess":
            from windfall.envs.guess import Guess

            return Guess(seed=seed, **options)
        case "custom":
            return _custom(section.factory, seed, section.options)
    raise AssertionError(section.name)


def _custom(factory: str, seed: int, options: dict[str, Any]) -> Env:
    """Somebody's own environment. The current folder is looked in, as `python -m` would."""
    module_name, _, name = factory.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        module = importlib.import_module(module_name)
    except ImportError as e:
        raise WindfallError(f"cannot import {module_name!r}: {e}", where="env.factory") from e
    if not hasattr(module, name):
        raise WindfallError(f"no {name!r} in {module_name}", where="env.factory", fix=nearest(name, dir(module)))
    try:
        env = getattr(module, name)(seed=seed, **options)
    except TypeError as e:
        raise WindfallError(f"{factory} cannot be called so: {e}", where="env.options") from e
    if not isinstance(env, Env):
        raise WindfallError(f"{factory} made a {type(env).__name__} that lacks task or feedback", where="env.factory")
    return env
