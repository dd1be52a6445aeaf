"""Chooses where the environment of a recipe runs: in this process or in child processes."""

from __future__ import annotations

from typing import Any

from windfall import envs
from windfall.envs.base import EnvHost
from windfall.envs.in_process import InProcess
from windfall.envs.numbered import Numbered
from windfall.envs.process_pool.pool import EnvPool

AGENTS = ("agent", "verifiers")
"""Environments that are programs: launch/agents.py starts them."""
QUICK = ("arithmetic", "guess")
"""Environments of windfall whose calls take microseconds: a message to another process would cost ten times as much."""


def env_host(
    section: Any, seed: int, *, evaluation: dict[str, Any] | None = None, processes: int = 0
) -> EnvHost:  # fmt: skip
    """Create the host. `section` is an env section of windfall.config. For agents, it hosts their tasks. `evaluation`:
    a separate data set for the evaluation. `processes`: upper limit for child processes; 0 chooses it."""
    if section.name in AGENTS:
        tasks = getattr(section, "tasks", None)
        if tasks is None:
            return InProcess(Numbered(), name=section.name)
        return env_host(tasks, seed, evaluation=evaluation, processes=processes)
    if section.name in QUICK:
        return InProcess(envs.build(envs.section_dict(section), seed))
    return EnvPool(section, seed, evaluation=evaluation, processes=processes)


def recipe_host(recipe: Any) -> EnvHost:
    """Create the host for a recipe of windfall.config."""
    return env_host(
        recipe.env, recipe.run.seed, evaluation=evaluation_data(recipe), processes=recipe.rollout.reward_processes
    )


def evaluation_data(recipe: Any) -> dict[str, Any] | None:
    """The data set of the recipe's [eval] section, as plain data: what it leaves out is that of [env]. None: the
    evaluation has no data set of its own."""
    section, own = recipe.task_env, recipe.eval
    if section.name != "dataset" or (own.path is None and own.split is None and own.subset is None):
        return None
    same = own.path is None
    found = {
        "path": str(section.path if same else own.path),
        "split": own.split,
        "subset": own.subset or (section.subset if same else None),
        "filter": section.filter if own.filter is None else own.filter,
    }
    return {key: value for key, value in found.items() if value is not None}
