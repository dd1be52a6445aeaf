"""A game of several turns: find the hidden number. The answer to each guess is 'higher' or 'lower'.

It is the smallest environment with observations: it needs no installation, and halving the range always wins.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from decimal import Decimal

from windfall.envs.scoring.extract import last_number
from windfall.errors import WindfallError
from windfall.types import Feedback, Task, Turn


class Guess:
    """`Guess(low=1, high=20, max_turns=6)`. The reward is 1.0 for a hit, minus `turn_cost` for every turn after the
    first. It is 0.0 if the turns or the tokens run out."""

    def __init__(
        self, low: int = 1, high: int = 20, max_turns: int = 6, seed: int = 0, *, turn_cost: float = 0.02
    ) -> None:
        if high <= low:
            raise WindfallError(f"low is {low} and high is {high}", where="guess", fix="high must be greater than low.")
        if max_turns < 1:
            raise WindfallError(f"max_turns is {max_turns}", where="guess", fix="It must be 1 or more.")
        if turn_cost < 0 or turn_cost * (max_turns - 1) >= 1:
            fix = "The reward for a hit in the last turn must be above 0, and at most that for a hit in the first."
            raise WindfallError(f"turn_cost is {turn_cost} for {max_turns} turns", where="guess", fix=fix)
        self._low = low
        self._high = high
        self._max_turns = max_turns
        self._seed = seed
        self._turn_cost = turn_cost

    def task(self, index: int) -> Task:
        digest = hashlib.blake2b(f"{self._seed}/{index}".encode(), digest_size=16).digest()
        hidden = self._low + int.from_bytes(digest, "big") % (self._high - self._low + 1)
        prompt = (
            f"I think of a whole number from {self._low} to {self._high}. Say one number. I answer with 'higher' or "
            f"'lower' until you find it. You have {self._max_turns} turns.\n"
        )
        return Task(id=f"guess/{self._seed}/{index}", prompt=prompt, answer=hidden)

    def feedback(self, task: Task, turns: Sequence[Turn]) -> Feedback:
        guess = last_number(turns[-1].text)
        if guess and Decimal(guess) == task.answer:
            return Feedback(reward=1.0 - self._turn_cost * (len(turns) - 1))
        if len(turns) >= self._max_turns:
            return Feedback(reward=0.0)
        hint = "say a number" if not guess else "higher" if Decimal(guess) < task.answer else "lower"
        # The hint gets its own line, because the policy's text may end anywhere. The reward counts if tokens run out.
        return Feedback(observation=f"\n{hint}\n", reward=0.0)
