"""What every section of a recipe is, and the types that several share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

Count = Annotated[int, Field(ge=1)]
Share = Annotated[float, Field(gt=0, le=1)]
Beta = Annotated[float, Field(ge=0, lt=1)]
FilePath = Annotated[Path, Field(strict=False)]
"""TOML has no paths, only strings."""


class Section(BaseModel):
    # Strict: a number in quotes, or `true` for a number, is somebody's mistake.
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, use_attribute_docstrings=True)
