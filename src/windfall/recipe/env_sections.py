"""The [env] section of a recipe: one class for every environment. See sections.py."""

from __future__ import annotations

import re
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, Field, field_validator, model_validator

from windfall.recipe.section_base import Count, FilePath, FunctionName, Options, Section, suggested_name

MIN_MEMORY_MB = 128
MAX_SESSIONS = 4096
"""Default limit for open sessions: more than the responses of most runs, so that it only stops a leak."""


def _check_reward(name: str) -> str:
    if not re.fullmatch(r"math|exact|[^:]+\.py:\w+|[\w.]+:\w+", name):
        meant = suggested_name(name) or '"math", "exact", "package.module:function" or "file.py:function"'
        raise ValueError(f"write it as {meant}")
    return name


RewardName = Annotated[str, AfterValidator(_check_reward)]


class ArithmeticEnv(Section):
    name: Literal["arithmetic"]
    mean_steps: float = Field(default=6.0, gt=0)
    """Mean number of steps of a chain of sums after the first step. The number is exponentially distributed."""
    max_steps: Count = 16
    """Upper limit for the steps of one chain."""


class HostedEnv(Section):
    """An environment that runs in processes of its own, on this machine or on others."""

    servers: list[Annotated[str, Field(pattern=r"^(https?://)?[^/\s]+:\d+$")]] = Field(default=[])
    """Environment servers to use instead of processes on this machine, such as `["10.0.0.5:9000"]`: `windfall
    env-server` starts one on another machine. Calls and sessions are spread over them by load."""
    servers_token: FilePath | None = None
    """File with the token of these servers. `windfall token FILE` creates one."""

    @model_validator(mode="after")
    def _servers_have_a_token(self) -> Self:
        if self.servers and self.servers_token is None:
            raise ValueError(
                "servers need a token: set servers_token to the file that was given to windfall env-server"
            )
        if len(set(self.servers)) < len(self.servers):
            raise ValueError("a server is named twice in servers")
        return self


class GymEnv(HostedEnv):
    name: Literal["gym"]
    task: str
    """Name of a reasoning-gym task, such as "chain_sum"."""
    options: Options = Field(default={})
    """Options of that reasoning-gym task, such as `{ min_terms = 2 }`."""
    instruction: str | None = None
    """Line appended to every question. If left out, the default instruction is used."""
    partial: bool = False
    """Use the task's partial score of the extracted answer as the reward, instead of only right or wrong."""


class DatasetEnv(HostedEnv):
    name: Literal["dataset"]
    path: FilePath
    """Data set: a JSONL or parquet file, or a folder with the files of a Hugging Face repository. Nothing is
    downloaded. Parquet needs the extra `data`."""
    split: str | None = None
    """Split to train on, such as "train", "train[:1000]" or "train[10%:]". If left out, "train" or the only one."""
    subset: str | None = None
    """Subset (configuration) of a data set that has several, such as "main"."""
    columns: dict[Literal["prompt", "answer"], str] = Field(default={})
    """Names of the columns with the prompt (text, or a list of messages) and the correct answer, such as
    `{ prompt = "question", answer = "solution" }`. Those that are not named here are "prompt" and "answer". Reward
    functions get the answer as `answer`, too, in place of another column of that name."""
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
        given, wanted = len(self.reward_weights), len(self.rewards)
        if given and given != wanted:
            without = ", ".join(self.rewards[given:])
            fault = f"no weight for {without}" if given < wanted else f"{given - wanted} more than rewards"
            raise ValueError(f"reward_weights has {given} numbers for {wanted} rewards: {fault}; give one for each")
        if len(set(self.rewards)) < len(self.rewards):
            raise ValueError("a reward is named twice in rewards; give it a larger weight instead")
        return self


class CustomEnv(HostedEnv):
    name: Literal["custom"]
    factory: FunctionName
    """Function that returns an Env, as "package.module:function". It is called with `seed` and the options."""
    options: Options = Field(default={})
    """Keyword arguments for the factory."""
    memory_mb: int = Field(default=0, ge=0)
    """Upper limit for the address space of each process of this environment, in MiB. 0: no limit. The number of
    processes is limited by rollout.reward_processes."""
    max_sessions: Count = MAX_SESSIONS
    """Upper limit for the sessions of an environment with state that are open at the same time on one machine. A
    response that needs one more waits, which counts against no time limit. If the environment can be replayed, the
    session that has waited longest for its next turn is closed for it after 30 s."""


TaskEnv = Annotated[ArithmeticEnv | GymEnv | DatasetEnv | CustomEnv, Field(discriminator="name")]
"""Environments that can give an agent its tasks, and grade its answer."""


class AgentLimits(Section):
    """Limits of the processes of an agent."""

    concurrency: Count = 32
    """Upper limit for agents that run at the same time. Others wait; that time counts against no limit."""
    time_limit_s: float = Field(default=600.0, gt=0, allow_inf_nan=False)
    """Upper limit for the time of one agent, in seconds. Time in which it waits for the policy does not count."""
    memory_mb: int = Field(default=8192, ge=0)
    """Upper limit for the address space of one agent's process, in MiB: at least 128. 0 disables it."""
    restart: bool = True
    """Start an agent again if its process fails, or after the controller was killed; calls that it repeats get the same
    answers. If false, its response has no reward then."""
    failed_reward: Annotated[float, Field(allow_inf_nan=False)] | Literal["missing"] = "missing"
    """Reward of an agent that fails every try. "missing" gives it no reward: it is counted and not trained on."""
    context: int = Field(default=0, ge=0)
    """Upper limit for the tokens of a prompt and its turn together. 0 uses the model's context. `rollout.max_tokens`
    limits the sampled tokens of all turns of an agent together."""
    port: int = Field(default=0, ge=0, le=65535)
    """Port of the gateway, on this machine only. 0 chooses a free one."""
    directory: FilePath | None = None
    """Folder in which agents are imported and run. If left out, it is the folder in which the run was started."""
    isolation: Literal["auto", "strict", "off"] = "auto"
    """Whether agents are kept from reading the run's folder and from reaching other processes. "auto" does what the
    system allows, "strict" also uses what may keep agents from creating files in folders above the run's, and refuses
    to start if that is not enough; "off" is for agents that must trace or signal other processes. See
    docs/agents.md."""

    @field_validator("memory_mb")
    @classmethod
    def _memory_is_enough_to_start(cls, value: int) -> int:
        if 0 < value < MIN_MEMORY_MB:
            raise ValueError(f"a Python program does not start in {value} MiB; give at least {MIN_MEMORY_MB}, or 0")
        return value


class AgentEnv(AgentLimits):
    name: Literal["agent"]
    command: str | None = None
    """Command that is started for every response, such as "python my_agent.py". It gets the task as JSON on standard
    input, and prints its reward as the last line. Either `command` or `function`."""
    function: FunctionName | None = None
    """Function that is called for every response in a process of its own, as "package.module:function". It gets the
    task, and returns its reward. Either `command` or `function`."""
    options: Options = Field(default={})
    """Keyword arguments for `function`."""
    reward: Literal["agent", "grader"] = "agent"
    """Where the reward comes from. "agent": the agent returns it, prints it, or posts it to /v1/reward. "grader": the
    environment of `tasks` grades the text that the agent returns or prints last."""
    tasks: TaskEnv | None = None
    """Environment that gives the tasks: a section [env.tasks] with the keys of arithmetic, gym, dataset or
    custom. If left out, an agent gets only the number of its task."""

    @model_validator(mode="after")
    def _one_program(self) -> AgentEnv:
        if (self.command is None) == (self.function is None):
            raise ValueError("set either command or function")
        if self.reward == "grader" and self.tasks is None:
            raise ValueError('reward = "grader" needs a section [env.tasks]')
        return self


Env = Annotated[ArithmeticEnv | GymEnv | DatasetEnv | CustomEnv | AgentEnv, Field(discriminator="name")]
ENVS: dict[str, type[Section]] = {
    "arithmetic": ArithmeticEnv,
    "gym": GymEnv,
    "dataset": DatasetEnv,
    "custom": CustomEnv,
    "agent": AgentEnv,
}
