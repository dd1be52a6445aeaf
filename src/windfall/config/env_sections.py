"""The [env] section of a recipe: one class for every environment. See sections.py."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from windfall.config.section import Count, FilePath, Section

RewardName = Annotated[str, Field(pattern=r"^(math|exact|[^:]+\.py:\w+|[\w.]+:\w+)$")]


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


class DatasetEnv(Section):
    name: Literal["dataset"]
    path: FilePath
    """Data set: a JSONL or parquet file, a folder that `datasets` saved (save_to_disk), or a folder with the files of a
    Hugging Face repository. Nothing is downloaded. Parquet and arrow need the extra `windfall[data]`."""
    split: str | None = None
    """Split to train on, such as "train", "train[:1000]" or "train[10%:]". If left out, "train" or the only one."""
    subset: str | None = None
    """Subset (configuration) of a data set that has several, such as "main"."""
    filter: str = ""
    """Condition for the rows to use, such as `level == "hard" and len(question) < 500`: columns, literals, and, or,
    not, comparisons, in, len, lower, int, float. It is never run as Python. Empty keeps all rows."""
    columns: dict[Literal["prompt", "answer"], str] = Field(default={})
    """Names of the columns with the prompt (text, or a list of messages) and the correct answer, such as
    `{ prompt = "question", answer = "solution" }`. Those that are not named here are "prompt" and "answer"."""
    system_prompt: str | None = None
    """System message put before every prompt that does not have one."""
    instruction: str | None = None
    """Line appended to the last message of every prompt."""
    answer_after: str | None = None
    """Use only what follows the last occurrence of this text in the column with the answer, such as "####"."""
    rewards: list[RewardName] = Field(default=["math"], min_length=1)
    """Rewards of a response, which are added up: "math" (mathematically equal to the answer), "exact" (the same text or
    number), or functions as TRL calls them, "package.module:function" or "file.py:function"."""
    reward_weights: list[Annotated[float, Field(allow_inf_nan=False)]] = Field(default=[])
    """Weight of each of the `rewards`. Empty: all are 1."""
    held_out: float = Field(default=0.0, ge=0, lt=1)
    """Share of the rows that is kept for evaluation and never trained on, chosen by a hash of the prompt. Not together
    with a data set of its own in [eval]."""

    @model_validator(mode="after")
    def _weights_fit(self) -> DatasetEnv:
        if self.reward_weights and len(self.reward_weights) != len(self.rewards):
            raise ValueError(
                f"reward_weights has {len(self.reward_weights)} numbers for {len(self.rewards)} rewards; give one each"
            )
        if len(set(self.rewards)) < len(self.rewards):
            raise ValueError("a reward is named twice in rewards; give it a larger weight instead")
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
    ArithmeticEnv | GymEnv | JsonLinesEnv | DatasetEnv | GuessEnv | FrozenLakeEnv | CustomEnv,
    Field(discriminator="name"),
]
ENVS: dict[str, type[Section]] = {
    "arithmetic": ArithmeticEnv, "gym": GymEnv, "jsonl": JsonLinesEnv, "dataset": DatasetEnv, "guess": GuessEnv,
    "frozen_lake": FrozenLakeEnv, "custom": CustomEnv,
}  # fmt: skip
