"""Chooses where the environment of a recipe runs: in this process, in child processes, or on environment servers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from windfall import envs
from windfall.envs.base import HELD_OUT, EnvHost
from windfall.envs.in_process import InProcess
from windfall.envs.process_pool.pool import EnvPool
from windfall.envs.remote.client import EnvServers
from windfall.recipe.sections import Recipe
from windfall.types import Feedback, Task, Turn

OUTPUT = "env.log"
"""File in the folder of a run with what the environment prints."""

Log = Callable[..., None]
"""Gets the name and the fields of an event."""


def recipe_host(recipe: Recipe, log: Log = lambda name, **fields: None, folder: Path | None = None) -> EnvHost:
    """Create the host for the environment of a recipe; for agents, that of their tasks. `folder`: that of the run,
    which gets what the environment prints; None shows a little of it on standard error."""
    section: Any = recipe.task_env
    seed = recipe.run.seed
    if section.name == "agent":  # controller/gateway/agents.py starts it
        return InProcess(Numbered(), name=section.name)
    if section.name == "arithmetic":  # its calls take microseconds: a message to another process costs ten times that
        return InProcess(envs.build(envs.section_dict(section), seed))
    evaluation = evaluation_data(recipe)
    if section.servers:
        return EnvServers(section, seed, evaluation=evaluation, log=log)
    output = None if folder is None else folder / OUTPUT
    processes = recipe.rollout.reward_processes
    return EnvPool(section, seed, evaluation=evaluation, processes=processes, output=output)


def evaluation_data(recipe: Recipe) -> dict[str, Any] | None:
    """The data set of the recipe's [eval] section, as plain data: what it leaves out is that of [env]. None: the
    evaluation has no data set of its own."""
    section: Any = recipe.task_env
    own = recipe.eval
    if section.name != "dataset" or (own.path is None and own.split is None and own.subset is None):
        return None
    same = own.path is None
    found = {
        "path": str(section.path if same else own.path),
        "split": own.split,
        "subset": own.subset or (section.subset if same else None),
    }
    return {key: value for key, value in found.items() if value is not None}


class Numbered:
    """An Env whose tasks are only numbers, for agents that bring their own tasks."""

    def task(self, index: int) -> Task:
        name = f"held-out {index - HELD_OUT}" if index >= HELD_OUT else f"{index}"
        return Task(id=name, prompt=f"task {name}")

    def feedback(self, task: Task, turns: Sequence[Turn]) -> Feedback:
        return Feedback(reward=0.0)  # called by a trial of the environment only: agents bring their own rewards
