"""A simulated environment: tasks are numbers, rewards are drawn by seed after a fixed time; there is no tokenizer."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from windfall.sim.core.service import uniform
from windfall.sim.machines.decode import FILLER, STOP
from windfall.types import Feedback, Task, Turn

BASE = 1 << 20


class SimEnv:
    def __init__(self, *, seed: int, reward_mean: float, reward_s: float) -> None:
        self._seed, self._mean, self._reward_s = seed, reward_mean, reward_s

    def task(self, index: int) -> Task:
        return Task(id=f"sim/{index}", prompt=str(index))

    async def feedback(self, task: Task, turns: Sequence[Turn]) -> Feedback:
        """A reward of 0 or 1, the same for the same response in every variant."""
        if self._reward_s:
            await asyncio.sleep(self._reward_s)
        return Feedback(reward=float(uniform(f"{self._seed}/{task.id}/{turns[-1].text}") < self._mean))


class SimText:
    """Takes the place of models.text.Text."""

    stop = frozenset([STOP])

    def __init__(self, prompt_tokens: int) -> None:
        """`prompt_tokens` is in simulated tokens."""
        self._prompt_tokens = prompt_tokens

    def prompt(self, text: str) -> tuple[int, ...]:
        """The task's number, padded to the length of a prompt."""
        number, ids = int(text), []
        while number or not ids:
            ids.append(FILLER + 1 + number % BASE)
            number //= BASE
        return (*ids, *[FILLER] * (self._prompt_tokens - len(ids)))

    def observation(self, text: str) -> tuple[int, ...]:
        raise AssertionError(f"a simulated environment has no observations: {text!r}")

    def decode(self, ids: Sequence[int]) -> str:
        """The first token of the response, which identifies it."""
        return str(ids[0])
