"""A simulated environment: tasks are numbers, rewards are drawn by seed after a fixed time; there is no tokenizer. With
several turns, it answers each of them but the last with an observation, after a drawn time (core/draws.py). With roles,
the script says who speaks next, and every role that spoke gets a reward of its own. The conversation of every role but
the first begins with a prompt that no other response has."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from windfall.sim.core.draws import SessionShape, uniform
from windfall.sim.machines.decode import FILLER, OBSERVED, STOP
from windfall.types import Feedback, Task, Turn

BASE = 1 << 20
NUMBER_BITS = 32
"""The prompt of a conversation that a response begins has the number of that response in its low bits."""


class SimEnv:
    def __init__(self, *, seed: int, reward_mean: float, reward_s: float, sessions: SessionShape | None = None) -> None:
        self._seed, self._mean, self._reward_s = seed, reward_mean, reward_s
        self._sessions = sessions or SessionShape()

    def task(self, index: int) -> Task:
        role = self._sessions.follows(index, 0)
        return Task(id=f"sim/{index}", prompt=str(index), role=role or "")

    async def feedback(self, task: Task, turns: Sequence[Turn]) -> Feedback:
        """The next observation, or the rewards."""
        id_token, first = int(turns[0].text), turns[0].text
        rewards = {turn.role: self.reward(task.id, turn.role, first) for turn in turns}
        grade: dict[str, Any] = {"reward": rewards[""]} if "" in rewards else {"rewards": rewards}
        role = self._sessions.follows(id_token, len(turns))
        if role is not None:
            await asyncio.sleep(self._sessions.seconds(id_token, len(turns) - 1))
            said = [turn for turn in turns if turn.role == role]
            if said:
                observation = self._sessions.observation(int(said[0].text), len(said) - 1)
            else:
                observation = id_token + (len(turns) << NUMBER_BITS)
            return Feedback(observation=str(observation), role=role, **grade)
        if self._reward_s:
            await asyncio.sleep(self._reward_s)
        return Feedback(**grade)

    def reward(self, task: str, role: str, response: str) -> float:
        """0 or 1, the same for the same response in every variant. `response`: the text of its first turn."""
        name = f"{self._seed}/{task}/{response}"
        return float(uniform(f"{name}/{role}" if role else name) < self._mean)


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

    def observation(self, text: str, *, last: int | None = None) -> tuple[int, ...]:
        """`text`: the number of real tokens. It does not matter how the turn ended."""
        return (OBSERVED,) * -(-int(text) // self._granule)

    def decode(self, ids: Sequence[int], *, special: bool = False) -> str:
        """The first token of the response, which identifies it."""
        return str(ids[0])
