"""Recipe files: read one, apply overrides, validate it completely before any work starts, and write it back.

An unknown key is refused, and the error names the key that was probably meant (unknown_keys.py).
"""

from __future__ import annotations

import datetime
import json
import tomllib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from windfall import parts
from windfall.errors import WindfallError, nearest, newer_format
from windfall.recipe import shipped
from windfall.recipe.env_sections import ENVS
from windfall.recipe.section_base import explained
from windfall.recipe.sections import Recipe
from windfall.recipe.unknown_keys import REMOVED, suggestion

FORMAT = 1
"""Version of the format of recipes. Change it when a key gets another meaning; keys that are gone are refused by name.
A file without `format` has format 1."""
_DATES = (datetime.date, datetime.time)  # datetime.datetime is a subclass of date


def load_recipe(path: Path, overrides: list[str] | None = None) -> Recipe:
    """Read a recipe file, apply `a.b=value` overrides, and validate the result."""
    data = _read(path)
    if not data and not overrides:
        fix = 'Set at least a model and an environment, such as [model] path = "tiny"; see recipes/demo.toml.'
        raise WindfallError("the recipe is empty", where=str(path), fix=fix)
    return parse_recipe(data, where=str(path), overrides=overrides or ())


def _read(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8-sig")  # some editors begin a file with a byte order mark
    except (FileNotFoundError, NotADirectoryError) as e:
        near = nearest(path.name, _files_in(path.parent), ".toml")
        fix = shipped.hint(path) or near or "Recipes are TOML files; `windfall examples .` writes some."
        raise WindfallError("no such recipe file", where=str(path), fix=fix) from e
    except IsADirectoryError as e:
        inside = _files_in(path)
        fix = f"Use a file in it: {', '.join(inside[:5])}." if inside else "Give a TOML file; see recipes/."
        raise WindfallError("this is a folder, not a recipe", where=str(path), fix=fix) from e
    except OSError as e:
        fix = "Check the path and its permissions."
        raise WindfallError(f"cannot read the recipe: {e.strerror or e}", where=str(path), fix=fix) from e
    except UnicodeDecodeError as e:
        fix = f"The first invalid byte is at offset {e.start}. Save the file as UTF-8."
        raise WindfallError("not valid TOML: the file is not UTF-8 text", where=str(path), fix=fix) from e
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as e:
        raise WindfallError(f"not valid TOML: {e}", where=str(path), fix="Correct the syntax there.") from e


def _files_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("*.toml") if path.name != "pyproject.toml")


def parse_recipe(data: dict[str, Any], where: str, overrides: Sequence[str] = ()) -> Recipe:
    for text in overrides:
        _override(data, text)
    data = {**data}
    _check_format(data.pop("format", 1), where)
    try:
        return Recipe.model_validate(data)
    except ValidationError as e:
        lines = _explain(e.errors(), data)
        given = tuple(text.partition("=")[0].strip() for text in overrides)
        where = "--set" if all(key.startswith(given) for key in lines) else where
        raise WindfallError("\n".join(lines.values()), where=where) from None


def _check_format(number: Any, where: str) -> None:
    if type(number) is not int or number < 1:
        what = f"'format' = {number!r}: this is the version of the recipe's format, a whole number"
        raise WindfallError(what, where=where, fix=f"Write format = {FORMAT}, or leave it out.")
    if number > FORMAT:
        raise newer_format("the recipe", number, FORMAT, where)


def _override(data: dict[str, Any], text: str) -> None:
    """Apply one `section.key=value` to the data of a recipe, in place.

    >>> data = {}; _override(data, "train.lr=3e-4"); data
    {'train': {'lr': 0.0003}}
    """
    key, equals, value = text.partition("=")
    *sections, last = [part.strip() for part in key.split(".")]
    if not equals or not all([*sections, last]):
        raise WindfallError(f"cannot parse {text!r}", where="--set", fix="Write it as --set section.key=value.")
    try:
        parsed = tomllib.loads(f"v = {value}")["v"]
    except tomllib.TOMLDecodeError:
        parsed = value.strip()  # a bare word is a string
    if isinstance(parsed, _DATES):
        parsed = value.strip()  # no key takes a date, but a run may be named after one
    for section in sections:
        data = data.setdefault(section, {})
        if not isinstance(data, dict):
            what = f"{section!r} in {text!r} is a value, not a section"
            raise WindfallError(what, where="--set", fix="Write it as --set section.key=value.")
    data[last] = parsed


def _explain(errors: Iterable[Any], data: dict[str, Any]) -> dict[str, str]:
    """A line for every invalid key: which key, what is wrong, and the nearest valid key."""
    lines: dict[str, str] = {}
    for error in errors:
        path = _path(error, data)
        name = ".".join(path)
        # Pydantic reports one error for each type that the value may have.
        lines[name] = f"{lines[name]}, or {explained(error['msg'])}" if name in lines else _line(error, path, data)
    return lines


def _path(error: Any, data: Any) -> list[str]:
    """The keys that lead to the error, without the names of the types that pydantic tried."""
    path: list[str] = []
    for part in error["loc"]:
        keys = data if isinstance(data, dict) else range(len(data)) if isinstance(data, list) else ()
        if part in keys:
            data = data[part]
        elif error["type"] != "missing" or part != error["loc"][-1]:
            continue
        path.append(str(part))
    return path


def _line(error: Any, path: list[str], data: dict[str, Any]) -> str:
    name, message = ".".join(path), explained(error["msg"])
    match error["type"]:
        case "extra_forbidden":
            return f"unknown key '{name}'. {parts.restore(path[-1]) or suggestion(path, data)}"
        case "union_tag_invalid":
            what = f"env.name = {(given := data['env']['name'])!r}"
            return f"{what} is not an environment. {REMOVED.get(what) or nearest(str(given), ENVS)}"
        case "union_tag_not_found":
            return f"'env.name' is missing. {nearest('', ENVS)}"
        case "missing":
            return f"'{name}' is missing"
        case "model_type" | "model_attributes_type":
            message = "this is a section and needs keys of its own"
    given = "" if isinstance(error["input"], dict) else f" = {error['input']!r}"
    return f"'{name}'{given}: {message}" if path else message


def dump_recipe(recipe: Recipe, *, all_keys: bool = True) -> str:
    """The recipe as TOML. `load_recipe` reads it back to an equal recipe. `all_keys`: also those at their defaults."""
    lines = [f"format = {FORMAT}", ""]
    for section, values in recipe.model_dump(exclude_none=True, exclude_defaults=not all_keys).items():
        if not values:  # [policies] of a run that has one
            continue
        lines.append(f"[{section}]")
        lines += [f"{key} = {to_toml(value)}" for key, value in values.items()]
        lines.append("")
    return "\n".join(lines)


def to_toml(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str | Path):
        # JSON and TOML escape the same characters, except for the delete character, which JSON leaves as it is.
        return json.dumps(str(value), ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{to_toml(str(k))} = {to_toml(v)}" for k, v in value.items()) + " }" if value else "{}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(to_toml(v) for v in value) + "]"
    return value.isoformat() if isinstance(value, _DATES) else repr(value)
