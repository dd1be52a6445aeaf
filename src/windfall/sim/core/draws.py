"""Random numbers that depend only on a name, and what is drawn with them: the lengths of responses and, if they have
several turns, how many, how long the environment works between them, and how long the observations are. Pure.

The number of turns is geometric; times and observations are log-normal. Everything follows from the seed or the first
token of a response, which identifies it, so every variant simulates the same responses.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import xxhash


@dataclass(frozen=True, kw_only=True, slots=True)
class LogNormalLengths:
    """Log-normal response lengths. `alike` is the correlation of the logarithms within a group.

    >>> lengths = LogNormalLengths(median=100, sigma=0.7, alike=1.0)
    >>> lengths.draw(1, group=7) == lengths.draw(2, group=7) != lengths.draw(1, group=8)
    True
    """

    median: float
    sigma: float
    alike: float = 0.0
    least: int = 2

    def draw(self, seed: int, group: int = 0) -> int:
        normal = _correlated_normal(seed, group, self.alike)
        return max(self.least, round(self.median * math.exp(self.sigma * normal)))


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasuredLengths:
    """Response lengths drawn from a list of measured ones, by the response's seed and group.

    >>> MeasuredLengths(lengths=(10, 20, 30)).draw(1) in (10, 20, 30)
    True
    """

    lengths: Sequence[int]
    """Measured lengths, sorted."""
    alike: float = 0.0

    def draw(self, seed: int, group: int = 0) -> int:
        normal = _correlated_normal(seed, group, self.alike)
        share = (1 + math.erf(normal / math.sqrt(2))) / 2
        return max(1, self.lengths[min(len(self.lengths) - 1, int(share * len(self.lengths)))])


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
    script: tuple[tuple[str, float], ...] = ()
    """Roles in order, each with the probability that it follows. Empty: there are no roles."""

    @property
    def continues(self) -> bool:
        """Whether a conversation may have several turns."""
        return self.turns > 1 or len({role for role, _ in self.script}) < len(self.script)

    def follows(self, id_token: int, turn: int) -> str | None:
        """The role that speaks in this turn of the response; None if the response has ended.

        >>> shape = SessionShape(script=(("solver", 1.0), ("verifier", 1.0), ("solver:again", 0.0)))
        >>> [shape.follows(7, turn) for turn in range(4)]
        ['solver', 'verifier', None, None]
        """
        if not self.script:
            return "" if turn < self.turn_count(id_token) else None
        if turn >= len(self.script):
            return None
        role, probability = self.script[turn]
        return role if turn == 0 or uniform(f"{id_token}/follows/{turn}") < probability else None

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


def _correlated_normal(seed: int, group: int, alike: float) -> float:
    return math.sqrt(alike) * standard_normal(f"g{group}") + math.sqrt(1 - alike) * standard_normal(str(seed))


@lru_cache(maxsize=1 << 14)
def standard_normal(name: str) -> float:
    """A standard normal sample for this name. Cached, because all siblings use the sample of their group."""
    a, b = uniform(f"{name}/a"), uniform(f"{name}/b")
    return math.sqrt(-2 * math.log(max(a, 1e-300))) * math.cos(2 * math.pi * b)


def uniform(name: str) -> float:
    """A number from 0 to 1 that depends only on the name. It is the same in every process."""
    return xxhash.xxh3_64_intdigest(name.encode()) / 2.0**64
