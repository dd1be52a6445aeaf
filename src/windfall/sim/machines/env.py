"""A simulated environment: tasks are numbers, rewards are drawn by seed after a fixed time; there is no tokenizer. With
several turns, it answers each of them but the last with an observation, after a drawn time (core/draws.py)."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from windfall.sim.core.draws import SessionShape, uniform
from windfall.sim.machines.decode import FILLER, OBSERVED, STOP
from windfall.types import Feedback, Task, Turn

BASE = 1 << 20


class SimEnv:
    def __init__(self, *, seed: int, reward_mean: float, reward_s: float, sessions: SessionShape | None = None) -> None:
        self._seed, self._mean, self._reward_s = seed, reward_mean, reward_s
        self._sessions = sessions or SessionShape()

    def task(self, index: int) -> Task:
        return Task(id=f"sim/{index}", prompt=str(index))

    async def feedback(self, task: Task, turns: Sequence[Turn]) -> Feedback:
        """A reward of 0 or 1, the same for the same response in every variant."""
        reward = float(uniform(f"{self._seed}/{task.id}/{turns[0].text}") < self._mean)
        id_token, turn = int(turns[0].text), len(turns) - 1
        if len(turns) < self._sessions.turn_count(id_token):
            await asyncio.sleep(self._sessions.seconds(id_token, turn))
            return Feedback(observation=str(self._sessions.observation(id_token, turn)), reward=reward)
        if self._reward_s:
            await asyncio.sleep(self._reward_s)
        return Feedback(reward=reward)


class SimText:
    """Takes the place of models.text.Text."""

    stop = frozenset([STOP])

    def __init__(self, prompt_tokens: int, granule: int = 1) -> None:
        """`prompt_tokens` is in simulated tokens."""
        self._prompt_tokens, self._granule = prompt_tokens, granule

    def prompt(self, text: str) -> tuple[int, ...]:
        """The task's number, padded to the length of a prompt."""
        number, ids = int(text), []
        while number or not ids:
            ids.append(FILLER + 1 + number % BASE)
            number //= BASE
        return (*ids, *[FILLER] * (self._prompt_tokens - len(ids)))

    def observation(self, text: str, *, ended: bool = True) -> tuple[int, ...]:
        """`text`: the number of real tokens. It does not matter how the turn ended."""
        return (OBSERVED,) * -(-int(text) // self._granule)

    def decode(self, ids: Sequence[int]) -> str:
        """The first token of the response, which identifies it."""
        return str(ids[0])
