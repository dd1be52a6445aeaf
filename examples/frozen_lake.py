"""FrozenLake of gymnasium as text: walk over the ice to the goal, one move per turn. Every task is another map.

The policy sees the map as letters, or only the fields next to it, and answers with a direction. The reward is
gymnasium's: 1 at the goal, 0 in a hole, and 0 if the moves or the tokens run out.
"""

from __future__ import annotations

import hashlib
import importlib.util
import re
from collections.abc import Sequence
from typing import Any

from windfall.errors import WindfallError, install_command
from windfall.types import Feedback, Task

MOVES = ("left", "down", "right", "up")
"""In the order of gymnasium's actions."""
OFFSETS = ((0, -1), (1, 0), (0, 1), (-1, 0))
"""What each move adds to row and column."""
FIELDS = "SFHG-"
"""The letters for start, ice, hole, goal and shore. The first four are gymnasium's."""
RULES = {
    "map": "You are P on a frozen lake. Walk over the ice ({1}) to the goal ({3}) and avoid the holes ({2}).",
    "neighbors": "You are on a frozen lake. You see what is next to you: ice ({1}), a hole ({2}), the shore ({4}), the "
    "start ({0}) or the goal ({3}). Walk to the goal and avoid the holes.",
}


class FrozenLake:
    """An environment with sessions. `frozen` is the chance that a field of the map is ice, not a hole. `moves` are the
    words for left, down, right and up. `fields` are the letters for start, ice, hole, goal and shore. `view` is what
    the policy sees: the "map", or only the "neighbors" of its field. `rules`: explain the game in the prompt."""

    def __init__(
        self,
        size: int = 4,
        slippery: bool = False,
        max_turns: int = 12,
        frozen: float = 0.8,
        *,
        seed: int = 0,
        moves: Sequence[str] = MOVES,
        fields: str = FIELDS,
        view: str = "map",
        rules: bool = True,
    ) -> None:
        if importlib.util.find_spec("gymnasium") is None:
            fix = f"Install it: {install_command('gymnasium')}"
            raise WindfallError("gymnasium is not installed", where="examples/frozen_lake.py", fix=fix)
        if len({move.lower() for move in moves}) != len(MOVES):
            fix = "Give four different words, for left, down, right and up."
            raise WindfallError(f"the moves are {', '.join(moves)}", where="env.options.moves", fix=fix)
        self._size = size
        self._slippery = slippery
        self._max_turns = max_turns
        self._frozen = frozen
        self._seed = seed
        self._moves = [move.lower() for move in moves]
        self._view = view
        self._rules = rules
        self._fields = fields

    def task(self, index: int) -> Task:
        from gymnasium.envs.toy_text.frozen_lake import generate_random_map  # pyright: ignore[reportMissingImports]

        seed = int.from_bytes(hashlib.blake2b(f"{self._seed}/{index}".encode(), digest_size=4).digest(), "big")
        rows = generate_random_map(size=self._size, p=self._frozen, seed=seed)
        rules = RULES[self._view].format(*self._fields)
        rules += f" In every turn, say one word: {_listed(self._moves)}{self._meaning()}. "
        rules += f"You have {self._max_turns} turns.\n"
        prompt = f"{rules if self._rules else ''}{self.draw(rows, 0)}\n"
        return Task(id=f"frozen_lake/{self._seed}/{index}", prompt=prompt, answer={"map": rows, "seed": seed})

    def open(self, task: Task) -> LakeWalk:
        return LakeWalk(self, task.answer["map"], task.answer["seed"], self._slippery, self._max_turns)

    def draw(self, rows: list[str], at: int) -> str:
        """What the policy sees at field number `at`."""
        letters = str.maketrans(FIELDS, self._fields)
        if self._view == "map":
            return _drawing([row.translate(letters) for row in rows], at)
        there = [field.translate(letters) for field in _neighbors(rows, at)]
        return " ".join(f"{move}:{field}" for move, field in zip(self._moves, there, strict=True))

    def move(self, text: str) -> int | None:
        """The number of the last move that the text names."""
        found = re.findall("|".join(map(re.escape, self._moves)), text.lower())
        return self._moves.index(found[-1]) if found else None

    def hint(self) -> str:
        """The line for a policy that named no move."""
        return f"Say {_listed(self._moves)}.\n" if self._rules else ""

    def _meaning(self) -> str:
        """What words that are not directions mean."""
        return "" if tuple(self._moves) == MOVES else f" (for {_listed(MOVES)})"


class LakeWalk:
    """One walk. The ice slips by a generator that is seeded with the task, so a replay slips in the same places."""

    def __init__(self, lake: FrozenLake, rows: list[str], seed: int, slippery: bool, max_turns: int) -> None:
        import gymnasium  # pyright: ignore[reportMissingImports]

        self._env: Any = gymnasium.make("FrozenLake-v1", desc=rows, is_slippery=slippery, max_episode_steps=10**6)
        self._env.reset(seed=seed)
        self._lake = lake
        self._rows = rows
        self._left = max_turns
        self._at = 0

    def step(self, text: str) -> Feedback:
        """Make the last move that the text names. A text without a move uses up its turn."""
        self._left -= 1
        move = self._lake.move(text)
        if move is not None:
            self._at, reward, ended, _, _ = self._env.step(move)
            if ended:
                return Feedback(reward=float(reward))
        if self._left == 0:
            return Feedback(reward=0.0)
        hint = self._lake.hint() if move is None else ""
        return Feedback(observation=f"\n{hint}{self._lake.draw(self._rows, int(self._at))}\n", reward=0.0)

    def close(self) -> None:
        self._env.close()


def _listed(words: Sequence[str]) -> str:
    return f"{', '.join(words[:-1])} or {words[-1]}"


def _drawing(rows: list[str], at: int) -> str:
    """The map, with the player as P.

    >>> print(_drawing(["SF", "HG"], 1))
    SP
    HG
    """
    text = "\n".join(rows)
    position = at + at // len(rows[0])  # a line break after every row
    return text[:position] + "P" + text[position + 1 :]


def _neighbors(rows: list[str], at: int) -> list[str]:
    """The field that each move leads to; "-" is the shore.

    >>> _neighbors(["SF", "HG"], 1)
    ['S', 'G', '-', '-']
    """
    y, x = divmod(at, len(rows[0]))
    there = [(y + dy, x + dx) for dy, dx in OFFSETS]
    return [rows[a][b] if 0 <= a < len(rows) and 0 <= b < len(rows[0]) else "-" for a, b in there]
