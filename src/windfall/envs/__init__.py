"""Builds the environment that the recipe's [env] section describes."""

from __future__ import annotations

import importlib
import os
import sys
import traceback
from typing import Any

from windfall.envs.base import Env
from windfall.envs.failures import source_location
from windfall.envs.sessions.stateful import Stateful
from windfall.errors import WindfallError, nearest

BUILT_IN = {
    "arithmetic": ("windfall.envs.arithmetic", "Arithmetic"),
    "frozen_lake": ("windfall.envs.frozen_lake", "FrozenLake"),
    "gym": ("windfall.envs.gym", "Gym"),
    "guess": ("windfall.envs.guess", "Guess"),
    "jsonl": ("windfall.envs.jsonl", "JsonLines"),
}
"""Module and class of each environment that ships with windfall. Some of the modules are slow to import."""


def section_dict(section: Any) -> dict[str, Any]:
    """Convert an env section of windfall.config into plain data that can be sent to another process."""
    return section.model_dump(mode="json", exclude_none=True)


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


def import_object(name: str, where: str) -> Any:
    """Import "package.module:name" of a user. The current folder is on the import path, as with `python -m`. `where`:
    the recipe key."""
    module_name, _, attribute = name.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as e:
        if e.name is None or not (module_name == e.name or module_name.startswith(f"{e.name}.")):
            raise _user_code_error(f"importing {module_name}", e) from e
        what = f"cannot import {module_name!r}: there is no module {e.name!r}"
        fix = f"Put it into {os.getcwd()} or into the packages of {sys.executable}."
        raise WindfallError(what, where=where, fix=fix) from e
    except (Exception, SystemExit) as e:  # fault boundary: an environment is foreign code
        raise _user_code_error(f"importing {module_name}", e) from e
    if not hasattr(module, attribute):
        fix = nearest(attribute, dir(module))
        raise WindfallError(f"there is no {attribute!r} in {module_name}", where=where, fix=fix)
    return getattr(module, attribute)


def _custom(factory: str, seed: int, options: dict[str, Any]) -> Env:
    """Build a user's own environment."""
    function = import_object(factory, "env.factory")
    try:
        env = function(seed=seed, **options)
    except (Exception, SystemExit) as e:  # fault boundary: an environment is foreign code
        if isinstance(e, TypeError) and e.__traceback__ is not None and e.__traceback__.tb_next is None:
            raise WindfallError(f"{factory} does not accept these options: {e}", where="env.options") from e
        raise _user_code_error(f"building {factory}", e) from e
    env = _with_feedback(env)
    missing = [method for method in ("task", "feedback") if not callable(getattr(env, method, None))]
    if missing:
        what = f"{factory} returned a {type(env).__name__} without {' and '.join(missing)}"
        raise WindfallError(
            what, where="env.factory", fix="An environment needs the methods task and feedback, or task and open."
        )
    return env


def _user_code_error(doing: str, e: BaseException) -> WindfallError:
    where = source_location(e)
    if isinstance(e, SyntaxError):
        line = f"\n    {e.text.strip()}" if e.text else ""
        return WindfallError(f"{doing} found a syntax error: {e.msg}", where=where, fix=f"Correct this line:{line}")
    frames = traceback.extract_tb(e.__traceback__)[-5:]
    shown = "\n".join(f"  {f.filename}:{f.lineno} in {f.name}: {f.line}" for f in frames)
    fix = f"The last calls were:\n{shown}"
    return WindfallError(f"{doing} raised {type(e).__name__}: {e}", where=where, fix=fix)
