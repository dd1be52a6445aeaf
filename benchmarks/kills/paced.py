"""Environments whose rewards wait while a file exists: a run that is held like this cannot end before it got all of its
signals, however fast its steps are."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from pathlib import Path

from windfall.envs.arithmetic import Arithmetic
from windfall.types import Feedback, Task, Turn

MOST_S = 5.0
"""A reward waits no longer than this."""


class Paced:
    """Arithmetic, as in the demo."""

    def __init__(self, seed: int, hold: str = "") -> None:
        self._env, self._hold = Arithmetic(seed=seed), hold

    def task(self, index: int) -> Task:
        return self._env.task(index)

    async def feedback(self, task: Task, turns: Sequence[Turn]) -> Feedback:
        await _wait_while(self._hold)
        return self._env.feedback(task, turns)


class Digits:
    """Rewards that differ, so that a random model learns from them."""

    def __init__(self, seed: int, hold: str = "") -> None:
        self._hold = hold

    def task(self, index: int) -> Task:
        return Task(id=f"digits/{index}", prompt=f"{index}=", answer="")

    async def feedback(self, task: Task, turns: Sequence[Turn]) -> Feedback:
        await _wait_while(self._hold)
        return Feedback(reward=sum(c.isdigit() for c in turns[-1].text) / 100)


async def _wait_while(hold: str) -> None:
    end_s = time.monotonic() + MOST_S
    while hold and Path(hold).exists() and time.monotonic() < end_s:
        await asyncio.sleep(0.02)
