"""One response while it is being made: its tokens, each position once and in order, over one or several turns.

    Episode.request()        what an engine has to do next
    Episode.take(...)        new tokens; a gap, a repeat or a token after the end is an error
    Episode.observe(ids)     the environment's words, tokens that nobody sampled
    Episode.close(reward)    the finished Response

Rule: `tokens` and `logprobs` always have the same length; the next token goes there. `runs` says of stretches of them
which version made them, -1 for an observation; together they are as long.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain, repeat

from windfall.types import Finish, Request, Response, Sampling, Turn


@dataclass(slots=True)
class Episode:
    id: str
    prompt: tuple[int, ...]
    seed: int
    max_tokens: int
    """The most tokens the whole response may have, observations included."""
    sampling: Sampling
    stop: frozenset[int]
    tokens: array[int] = field(default_factory=lambda: array("I"))
    logprobs: array[float] = field(default_factory=lambda: array("f"))
    runs: list[tuple[int, int]] = field(default_factory=list)
    """(version, how many tokens)."""
    turns: list[Turn] = field(default_factory=list)
    turn_start: int = 0
    finish: Finish | None = None

    def request(self) -> Request:
        """To begin, or to go on from the last token."""
        return Request(
            id=self.id, prompt=(*self.prompt, *self.tokens), position=len(self.tokens), seed=self.seed,
            max_tokens=self.max_tokens - len(self.tokens), sampling=self.sampling, stop=self.stop,
        )  # fmt: skip

    def take(
        self, position: int, tokens: Sequence[int], logprobs: Sequence[float], version: int, finish: Finish | None
    ) -> None:
        if self.finish is not None:
            raise ValueError(f"{self.id}: tokens came after its end")
        if position != len(self.tokens):
            raise ValueError(f"{self.id}: expected position {len(self.tokens)}, got {position}")
        if len(logprobs) != len(tokens):
            raise ValueError(f"{self.id}: {len(tokens)} tokens came with {len(logprobs)} log-probs")
        self.tokens.extend(tokens)
        self.logprobs.extend(logprobs)
        self.made_by(version, len(tokens))
        self.finish = finish

    def made_by(self, version: int, count: int) -> None:
        """The last `count` tokens are of this version."""
        if count == 0:
            return
        if self.runs and self.runs[-1][0] == version:
            count += self.runs.pop()[1]
        self.runs.append((version, count))

    @property
    def turn_tokens(self) -> list[int]:
        """What the policy said in the current turn."""
        return self.tokens[self.turn_start :].tolist()

    def observe(self, ids: Iterable[int]) -> bool:
        """Append an observation and open the next turn. False: there is no room left for an answer to it."""
        ids = list(ids)
        if len(self.tokens) + len(ids) >= self.max_tokens:
            self.finish = "length"
            return False
        self.tokens.extend(ids)
        self.logprobs.extend(repeat(0.0, len(ids)))
        self.made_by(-1, len(ids))
        self.turn_start = len(self.tokens)
        self.finish = None
        return True

    def close(self, reward: float | None) -> Response:
        assert self.finish is not None, f"{self.id} is still being generated"
        versions = tuple(chain.from_iterable(repeat(version, count) for version, count in self.runs))
        sampled = tuple(chain.from_iterable(repeat(version >= 0, count) for version, count in self.runs))
        assert len(versions) == len(self.tokens) == len(self.logprobs), f"{self.id}: lengths differ"
        return Response(
            id=self.id, prompt=self.prompt, tokens=tuple(self.tokens), logprobs=tuple(self.logprobs),
            sampled=sampled, versions=versions, finish=self.finish, reward=reward,
            turns=max(1, len(self.turns)),
        )  # fmt: skip
