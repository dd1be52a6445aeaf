"""From the recipe's [env] section to where its environment runs."""

from __future__ import annotations

from typing import Any

from windfall import envs
from windfall.envs.base import EnvHost
from windfall.envs.in_process import InProcess
from windfall.envs.process_pool.pool import EnvPool

QUICK = ("arithmetic", "guess")
"""Ours, bounded, and over in microseconds: a message to another process would cost ten times as much."""


def hosted(section: Any, seed: int) -> EnvHost:
    """`section` is one of the env sections of windfall.config."""
    if section.name in QUICK:
        return InProcess(envs.build(envs.plain(section), seed))
    return EnvPool(section, seed)
