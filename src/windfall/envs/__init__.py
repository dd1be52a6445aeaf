"""Builds the environment that the recipe's [env] section describes."""

from __future__ import annotations

import importlib
from typing import Any

from windfall.envs import user_code
from windfall.envs.base import Env
from windfall.envs.failures import message_of
from windfall.envs.sessions import Stateful
from windfall.errors import WindfallError

BUILT_IN = {
    "arithmetic": ("windfall.envs.arithmetic", "Arithmetic"),
    "dataset": ("windfall.envs.dataset", "Dataset"),
    "gym": ("windfall.envs.gym", "Gym"),
}
"""Module and class of each environment that ships with windfall. Some of the modules are slow to import."""


def runs_user_code(section: dict[str, Any]) -> bool:
    return section["name"] == "custom" or any(":" in reward for reward in section.get("rewards", ()))


HOST_KEYS = frozenset({"servers", "servers_token", "max_sessions"})
"""Keys of an env section for the host of the environment, not for the environment."""


def section_dict(section: Any) -> dict[str, Any]:
    """What the environment of an env section of windfall.recipe is built from, as plain data that can be sent to
    another process."""
    return section.model_dump(mode="json", exclude_none=True, exclude=set(HOST_KEYS))


def build(section: dict[str, Any], seed: int) -> Env:
    """Build the environment. Invalid options raise here. This runs foreign code, so call it in a child process."""
    options = {key: value for key, value in section.items() if key != "name"}
    if section["name"] == "custom":
        return _custom(options["factory"], seed, options.get("options", {}))
    module, name = BUILT_IN[section["name"]]
    return _with_feedback(getattr(importlib.import_module(module), name)(seed=seed, **options))


def _with_feedback(env: Any) -> Any:
    """An environment with sessions as one that gives feedback; every other one unchanged."""
    if callable(getattr(env, "open", None)) and not callable(getattr(env, "feedback", None)):
        return Stateful(env)
    return env


def _custom(factory: str, seed: int, options: dict[str, Any]) -> Env:
    make = user_code.load(factory, where="env.factory")
    try:
        env = make(seed=seed, **options)
    except WindfallError:
        raise
    except BaseException as e:  # fault boundary: an environment is foreign code
        if isinstance(e, TypeError) and e.__traceback__ is not None and e.__traceback__.tb_next is None:
            what = f"{factory} does not accept {', '.join(['seed', *options])}: {message_of(e)}"
            fix = "Give it parameters for the seed and for all keys of env.options, and for nothing else."
            raise WindfallError(what, where="env.options" if options else "env.factory", fix=fix) from e
        raise user_code.error(f"building {factory}", e) from e
    env = _with_feedback(env)
    missing = [method for method in ("task", "feedback") if not callable(getattr(env, method, None))]
    if missing:
        what = f"{factory} returned a {type(env).__name__} without {' and '.join(missing)}"
        raise WindfallError(
            what, where="env.factory", fix="An environment needs the methods task and feedback, or task and open."
        )
    return env
