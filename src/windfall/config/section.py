"""What every section of a recipe shares: its base class, and the types of common values."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

Count = Annotated[int, Field(ge=1)]
Share = Annotated[float, Field(gt=0, le=1)]
Beta = Annotated[float, Field(ge=0, lt=1)]
Device = Literal["auto", "cpu", "cuda"] | Annotated[str, Field(pattern=r"^cuda:\d+$")]
FilePath = Annotated[Path, Field(strict=False)]
"""Not strict, because TOML has only strings, no paths."""


class Section(BaseModel):
    # Strict: a number in quotes, or `true` where a number belongs, is a mistake in the recipe.
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, use_attribute_docstrings=True)
