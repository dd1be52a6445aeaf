"""Responses with several turns in a simulation: how many turns each has, how long its environment works between them,
and how long the observations are. Pure. Everything follows from the first token of a response, which identifies it, so
every variant simulates the same sessions.

The number of turns is geometric; times and observations are log-normal. `windfall sim calibrate` prints the keys that
fit the log of a run.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import xxhash

from windfall.sim.core.draws import standard_normal, uniform


@dataclass(frozen=True, kw_only=True, slots=True)
class SessionShape:
    """
    >>> shape = SessionShape(turns=4.0, env_s=2.0, observation_tokens=100)
    >>> shape.turn_count(7) == shape.turn_count(7), shape.seconds(7, 0), shape.observation(7, 0)
    (True, 2.0, 100)
    >>> round(sum(shape.turn_count(n) for n in range(4000)) / 4000)
    4
    """

    turns: float = 1.0
    """Mean number of turns of a response."""
    env_s: float = 0.0
    """Median seconds between two turns."""
    env_sigma: float = 0.0
    """Standard deviation of the logarithm of that time."""
    observation_tokens: float = 1.0
    """Median length of an observation, in real tokens."""
    observation_sigma: float = 0.0

    def turn_count(self, id_token: int) -> int:
        if self.turns <= 1:
            return 1
        drawn = 1 - uniform(f"{id_token}/turns")
        return 1 + int(math.log(max(drawn, 1e-300)) / math.log(1 - 1 / self.turns))

    def seconds(self, id_token: int, turn: int) -> float:
        """Seconds that the environment works after this turn."""
        return self.env_s * math.exp(self.env_sigma * standard_normal(f"{id_token}/env/{turn}"))

    def observation(self, id_token: int, turn: int) -> int:
        """Real tokens of the observation after this turn."""
        normal = standard_normal(f"{id_token}/observation/{turn}") if self.observation_sigma else 0.0
        return max(1, round(self.observation_tokens * math.exp(self.observation_sigma * normal)))


def turn_seed(seed: int, turn: int) -> int:
    """The seed from which the length of a turn is drawn. The first turn has the seed of its response."""
    return seed if turn == 0 else xxhash.xxh3_64_intdigest(f"{seed}/turn {turn}".encode())
