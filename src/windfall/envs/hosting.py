"""Chooses where the environment of the recipe's [env] section runs: in this process or in child processes."""

from __future__ import annotations

from typing import Any

from windfall import envs
from windfall.envs.base import EnvHost
from windfall.envs.in_process import InProcess
from windfall.envs.process_pool.pool import EnvPool

QUICK = ("arithmetic", "guess")
"""Environments of windfall whose calls take microseconds: a message to another process would cost ten times as much."""


def env_host(section: Any, seed: int) -> EnvHost:
    """Create the host. `section` is an env section of windfall.config."""
    if section.name in QUICK:
        return InProcess(envs.build(envs.section_dict(section), seed))
    return EnvPool(section, seed)
