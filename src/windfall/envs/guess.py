"""A game of several turns: find the hidden number, told 'higher' or 'lower' after each guess.

The smallest environment that uses observations: nothing to install, and halving the range always wins.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from decimal import Decimal

from windfall.envs.scoring.extract import last_number
from windfall.errors import WindfallError
from windfall.types import Feedback, Task, Turn


class Guess:
    """`Guess(low=1, high=20, max_turns=6)`: 1.0 for a hit, less `turn_cost` for every turn after the first; 0.0 when
    the turns or the tokens run out."""

    def __init__(
        self, low: int = 1, high: int = 20, max_turns: int = 6, seed: int = 0, *, turn_cost: float = 0.02
    ) -> None:
        where = "guess"
        if high <= low:
            raise WindfallError(f"low is {low} and high is {high}", where=where, fix="high must be more than low.")
        if max_turns < 1:
            raise WindfallError(f"max_turns is {max_turns}", where=where, fix="It must be 1 or more.")
        if turn_cost < 0 or turn_cost * (max_turns - 1) >= 1:
            raise WindfallError(
                f"a turn_cost of {turn_cost} over {max_turns} turns",
                where=where,
                fix="A hit in the last turn must still be worth more than 0, and no more than one in the first.",
            )
        self._low, self._high, self._max_turns, self._seed, self._turn_cost = low, high, max_turns, seed, turn_cost

    def task(self, index: int) -> Task:
        digest = hashlib.blake2b(f"{self._seed}/{index}".encode(), digest_size=16).digest()
        hidden = self._low + int.from_bytes(digest, "big") % (self._high - self._low + 1)
        prompt = (
            f"I think of a whole number from {self._low} to {self._high}. Say one number. I answer with 'higher' or "
            f"'lower' until you find it. You have {self._max_turns} turns.\n"
        )
        return Task(id=f"guess/{self._seed}/{index}", prompt=prompt, answer=hidden)

    def feedback(self, task: Task, turns: Sequence[Turn]) -> Feedback:
        said = last_number(turns[-1].text)
        if said and Decimal(said) == task.answer:
            return Feedback(reward=1.0 - self._turn_cost * (len(turns) - 1))
        if len(turns) >= self._max_turns:
            return Feedback(reward=0.0)
        hint = "say a number" if not said else "higher" if Decimal(said) < task.answer else "lower"
        # On a line of its own: the policy's text may end anywhere. Out of tokens is as bad as out of turns.
        return Feedback(observation=f"\n{hint}\n", reward=0.0)
