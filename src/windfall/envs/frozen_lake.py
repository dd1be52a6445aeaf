"""FrozenLake of gymnasium as text: walk over the ice to the goal, one move per turn. Every task is another map.

The policy sees the map as letters and answers with a direction. The reward is gymnasium's: 1 at the goal, 0 in a hole,
and 0 if the moves or the tokens run out.
"""

from __future__ import annotations

import hashlib
import importlib.util
import re
from typing import Any

from windfall.errors import WindfallError
from windfall.types import Feedback, Task

MOVES = {"left": 0, "down": 1, "right": 2, "up": 3}
"""The numbers of gymnasium's actions."""
_WORD = re.compile("|".join(MOVES), re.IGNORECASE)


class FrozenLake:
    """An environment with sessions. `frozen` is the chance that a field of the map is ice, not a hole."""

    def __init__(
        self, size: int = 4, slippery: bool = False, max_turns: int = 12, frozen: float = 0.8, *, seed: int = 0
    ) -> None:
        if importlib.util.find_spec("gymnasium") is None:
            fix = "Install it: pip install 'windfall[gymnasium]'"
            raise WindfallError("gymnasium is not installed", where="env.name", fix=fix)
        self._size, self._slippery, self._max_turns, self._frozen, self._seed = size, slippery, max_turns, frozen, seed

    def task(self, index: int) -> Task:
        from gymnasium.envs.toy_text.frozen_lake import generate_random_map  # pyright: ignore[reportMissingImports]

        seed = int.from_bytes(hashlib.blake2b(f"{self._seed}/{index}".encode(), digest_size=4).digest(), "big")
        rows = generate_random_map(size=self._size, p=self._frozen, seed=seed)
        prompt = (
            "You are P on a frozen lake. Walk over the ice (F) to the goal (G) and avoid the holes (H). In every turn, "
            f"say one word: left, down, right or up. You have {self._max_turns} turns.\n{_drawing(rows, 0)}\n"
        )
        return Task(id=f"frozen_lake/{self._seed}/{index}", prompt=prompt, answer={"map": rows, "seed": seed})

    def open(self, task: Task) -> LakeWalk:
        return LakeWalk(task.answer["map"], task.answer["seed"], self._slippery, self._max_turns)


class LakeWalk:
    """One walk. The ice slips by a generator that is seeded with the task, so a replay slips in the same places."""

    def __init__(self, rows: list[str], seed: int, slippery: bool, max_turns: int) -> None:
        import gymnasium  # pyright: ignore[reportMissingImports]

        self._env: Any = gymnasium.make("FrozenLake-v1", desc=rows, is_slippery=slippery, max_episode_steps=10**6)
        self._env.reset(seed=seed)
        self._rows, self._left, self._at = rows, max_turns, 0

    def step(self, text: str) -> Feedback:
        """Make the last move that the text names. A text without a move uses up its turn."""
        self._left -= 1
        words = _WORD.findall(text)
        if words:
            self._at, reward, ended, _, _ = self._env.step(MOVES[words[-1].lower()])
            if ended:
                return Feedback(reward=float(reward))
        if self._left == 0:
            return Feedback(reward=0.0)
        hint = "" if words else "Say left, down, right or up.\n"
        return Feedback(observation=f"\n{hint}{_drawing(self._rows, int(self._at))}\n", reward=0.0)

    def close(self) -> None:
        self._env.close()


def _drawing(rows: list[str], at: int) -> str:
    """The map, with the player as P.

    >>> print(_drawing(["SF", "HG"], 1))
    SP
    HG
    """
    text = "\n".join(rows)
    position = at + at // len(rows[0])  # a line break after every row
    return text[:position] + "P" + text[position + 1 :]
