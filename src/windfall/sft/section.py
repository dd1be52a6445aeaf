"""The section [sft]: the data of a supervised run, and how often it is used."""

from __future__ import annotations

from pydantic import Field

from windfall.recipe.section_base import Count, FilePath, Section


class SftSection(Section):
    """Supervised fine-tuning with `windfall sft` (docs/sft.md). Without `path`, a run is reinforcement learning, and
    this section has no effect."""

    path: FilePath | None = None
    """Data set: a JSONL or parquet file. The argument of `windfall sft` comes first."""
    epochs: Count = 1
    """How many times each row is trained on. `windfall sft` derives run.steps from it, unless --set gives that."""
    batch: Count = 32
    """Rows per optimizer update."""
    max_tokens: int = Field(default=0, ge=0)
    """Upper limit for the tokens of a row; the run refuses a data set with longer ones. 0: the context of the model."""
    held_out: int = Field(default=0, ge=0)
    """Rows at the end of the data set that are not trained on: the evaluation loss is theirs. 0 keeps none."""
    eval_path: FilePath | None = None
    """Data set for the evaluation loss, instead of `held_out`."""
    eval_every: int = Field(default=0, ge=0)
    """Steps between two evaluations. 0 evaluates only before the first and after the last step."""
