"""Chooses where the environment of the recipe's [env] section runs: in this process or in child processes."""

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


def env_host(section: Any, seed: int) -> EnvHost:
    """Create the host. `section` is an env section of windfall.config. For agents, it hosts their tasks."""
    if section.name in AGENTS:
        tasks = getattr(section, "tasks", None)
        return InProcess(Numbered()) if tasks is None else env_host(tasks, seed)
    if section.name in QUICK:
        return InProcess(envs.build(envs.section_dict(section), seed))
    return EnvPool(section, seed)
