"""The [env] section of a recipe: one class for every environment. See sections.py."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from windfall.config.section import Count, FilePath, Section


class ArithmeticEnv(Section):
    name: Literal["arithmetic"]
    mean_steps: float = Field(default=6.0, gt=0)
    """Mean number of steps of a chain of sums after the first step. The number is exponentially distributed."""
    max_steps: Count = 16
    """Upper limit for the steps of one chain."""


class GymEnv(Section):
    name: Literal["gym"]
    task: str
    """Name of a reasoning-gym task, such as "chain_sum"."""
    options: dict[str, Any] = Field(default={})
    """Options of that reasoning-gym task, such as `{ min_terms = 2 }`."""
    instruction: str | None = None
    """Line appended to every question. If left out, the default instruction is used."""
    partial: bool = False
    """Use the task's partial score of the extracted answer as the reward, instead of only right or wrong."""


class JsonLinesEnv(Section):
    name: Literal["jsonl"]
    path: FilePath
    """File of tasks, one JSON object per line."""
    prompt_field: str = "prompt"
    """Name of the field that holds the prompt: text, or a list of messages with "role" and "content"."""
    answer_field: str = "answer"
    """Name of the field that holds the correct answer."""
    scoring: Literal["math", "exact"] = "math"
    """How answers are compared. "math": mathematically equal (math-verify); "exact": the same text."""
    eval_path: FilePath | None = None
    """File of tasks for evaluation only, in the same format; never trained on. Not together with `held_out`."""
    held_out: float = Field(default=0.0, ge=0, lt=1)
    """Share of the rows of `path` that is kept for evaluation and never trained on, chosen by a hash of the prompt. Not
    together with `eval_path`."""

    @model_validator(mode="after")
    def _one_evaluation_source(self) -> JsonLinesEnv:
        if self.eval_path is not None and self.held_out:
            raise ValueError("set eval_path or held_out, not both")
        return self


class GuessEnv(Section):
    name: Literal["guess"]
    low: int = 1
    """Smallest number that may have to be guessed."""
    high: int = 20
    """Largest number that may have to be guessed."""
    max_turns: Count = 6
    """Number of guesses allowed per task."""


class FrozenLakeEnv(Section):
    name: Literal["frozen_lake"]
    size: int = Field(default=4, ge=2, le=64)
    """Width and height of the map."""
    slippery: bool = False
    """Whether a move may slip to the side."""
    max_turns: Count = 12
    """Number of moves allowed per task."""
    frozen: float = Field(default=0.8, gt=0, le=1)
    """Chance that a field of the map is ice and not a hole."""


class CustomEnv(Section):
    name: Literal["custom"]
    factory: str = Field(pattern=r"^[\w.]+:\w+$")
    """Function that returns an Env, as "package.module:function". It is called with `seed` and the options."""
    options: dict[str, Any] = Field(default={})
    """Keyword arguments for the factory."""


Env = Annotated[
    ArithmeticEnv | GymEnv | JsonLinesEnv | GuessEnv | FrozenLakeEnv | CustomEnv, Field(discriminator="name")
]
ENVS: dict[str, type[Section]] = {
    "arithmetic": ArithmeticEnv, "gym": GymEnv, "jsonl": JsonLinesEnv, "guess": GuessEnv,
    "frozen_lake": FrozenLakeEnv, "custom": CustomEnv,
}  # fmt: skip
