"""What every section of a recipe shares: its base class, the types of common values, and the sections that parts add
(windfall.parts)."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar
from urllib.parse import urlsplit

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, create_model

from windfall import parts

Count = Annotated[int, Field(ge=1)]
Share = Annotated[float, Field(gt=0, le=1)]
Beta = Annotated[float, Field(ge=0, lt=1)]
Device = Literal["auto", "cpu", "cuda"] | Annotated[str, Field(pattern=r"^cuda:\d+$")]
FilePath = Annotated[Path, Field(strict=False)]
"""Not strict, because TOML has only strings, no paths."""


def explained(message: str) -> str:
    """What pydantic says of a value, in the words of windfall's errors.

    >>> explained("Input should be a valid number"), explained("Value error, write it as 3")
    ('must be a valid number', 'write it as 3')
    """
    return re.sub(r"^(Input|String|List|Tuple|Dictionary) should ", "must ", message).removeprefix("Value error, ")


def _check_function(name: str) -> str:
    if not re.fullmatch(r"[\w.]+:\w+", name):
        meant = suggested_name(name) or '"package.module:name"'
        raise ValueError(f"write it as {meant}")
    return name


def suggested_name(name: str) -> str:
    """The name of a function or class as it was probably meant, in quotes, or "".

    >>> suggested_name("my_task.Sums"), suggested_name("rewards.py")
    ('"my_task:Sums"', '')
    """
    module, _, function = name.rpartition(".")
    return f'"{module}:{function}"' if re.fullmatch(r"[\w.]+", module) and re.fullmatch(r"(?!py$)\w+", function) else ""


def _check_endpoint(value: str) -> str:
    host, _, port = value.rpartition(":")
    if value and not (host and port.isdecimal() and 0 < int(port) < 1 << 16):
        raise ValueError("write it as HOST:PORT, such as '10.0.0.5:29400'")
    return value


Endpoint = Annotated[str, AfterValidator(_check_endpoint)]
"""HOST:PORT, or empty."""


def _check_bucket(url: str) -> str:
    if not url:
        return url
    parts = urlsplit(url)
    if parts.scheme not in ("s3", "gs", "az", "file") or not parts.netloc + parts.path.strip("/"):
        raise ValueError("write it as s3://bucket/path, gs://bucket/path, az://container/path or file:///folder")
    if "@" in parts.netloc or parts.query or parts.fragment:
        raise ValueError("it must not contain credentials or options: set them in the environment, such as AWS_*")
    return url


BucketUrl = Annotated[str, AfterValidator(_check_bucket)]
"""An object store or a folder, without credentials; or empty."""
FunctionName = Annotated[str, AfterValidator(_check_function)]
"""A function or a class, as "package.module:name"."""


def _check_options(options: dict[str, Any]) -> dict[str, Any]:
    if nan := _find_nan(options):
        raise ValueError(f"{nan} is nan (not a number); if you mean the text, write it in quotes")
    return options


def _find_nan(value: Any, path: str = "") -> str:
    """Where a value contains nan, or ""."""
    if isinstance(value, float):
        return path if math.isnan(value) else ""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return next((found for key, item in items if (found := _find_nan(item, f"{path}.{key}".lstrip(".")))), "")


Options = Annotated[dict[str, Any], AfterValidator(_check_options)]
"""Keyword arguments for code of the user."""


class Section(BaseModel):
    # Strict: a number in quotes, or `true` where a number belongs, is a mistake in the recipe. The last setting keeps
    # inf among the options of an environment; JSON has no such number, so pydantic would replace it with None.
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, ser_json_inf_nan="constants")


Base = TypeVar("Base", bound=Section)


def part_sections(prefix: str = "") -> dict[str, type[Section]]:
    """The sections of all parts directly under `prefix`, such as "fleet.", by name."""
    found = [added for part in parts.found() if (added := part.section()) is not None]
    return {
        path.removeprefix(prefix): section
        for path, section in found
        if path.startswith(prefix) and "." not in path.removeprefix(prefix)
    }


def with_parts(prefix: str) -> Callable[[type[Base]], type[Base]]:
    """Decorate a section with a key for each section that a part adds under `prefix`. On the top level it always has a
    value, as every section; within another section it is None if it is left out."""

    def decorate(base: type[Base]) -> type[Base]:
        added: dict[str, Any] = {}
        for name, section in part_sections(prefix).items():
            help = f"The keys of [{prefix}{name}] below. {section.__doc__}"
            added[name] = (section | None, Field(default=None, description=help)) if prefix else (section, section())
        return create_model(base.__name__, __base__=base, __module__=base.__module__, __doc__=base.__doc__, **added)

    return decorate
