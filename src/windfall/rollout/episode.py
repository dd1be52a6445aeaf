"""One response while it is being made: its tokens, each position once and in order, over one or several turns.

    Episode.request()        what an engine has to do next
    Episode.take(chunk)      new tokens; a gap, a repeat or a token after the end is an error
    Episode.observe(ids)     the environment's words, tokens that nobody sampled
    Episode.close(reward)    the finished Response

Rule: `tokens`, `logprobs`, `sampled` and `versions` always have the same length; the next chunk starts there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from windfall.types import Chunk, Finish, Request, Response, Sampling, Turn


@dataclass(slots=True)
class Episode:
    id: str
    prompt: tuple[int, ...]
    seed: int
    max_tokens: int
    """The most tokens the whole response may have, observations included."""
    sampling: Sampling
    stop: frozenset[int]
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    sampled: list[bool] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)
    turn_start: int = 0
    finish: Finish | None = None

    def request(self) -> Request:
        """To begin, or to go on from the last token."""
        return Request(
            id=self.id, prompt=(*self.prompt, *self.tokens), position=len(self.tokens), seed=self.seed,
            max_tokens=self.max_tokens - len(self.tokens), sampling=self.sampling, stop=self.stop,
        )  # fmt: skip

    def take(self, chunk: Chunk) -> None:
        if self.finish is not None:
            raise ValueError(f"{self.id}: tokens came after its end")
        if chunk.position != len(self.tokens):
            raise ValueError(f"{self.id}: expected position {len(self.tokens)}, got {chunk.position}")
        if len(chunk.logprobs) != len(chunk.tokens):
            raise ValueError(f"{self.id}: {len(chunk.tokens)} tokens came with {len(chunk.logprobs)} log-probs")
        self.tokens += chunk.tokens
        self.logprobs += chunk.logprobs
        self.sampled += [True] * len(chunk.tokens)
        self.versions += [chunk.version] * len(chunk.tokens)
        self.finish = chunk.finish

    @property
    def turn_tokens(self) -> list[int]:
        """What the policy said in the current turn."""
        return self.tokens[self.turn_start :]

    def observe(self, ids: Sequence[int]) -> bool:
        """Append an observation and open the next turn. False: there is no room left for an answer to it."""
        if len(self.tokens) + len(ids) >= self.max_tokens:
            self.finish = "length"
            return False
        self.tokens += ids
        self.logprobs += [0.0] * len(ids)
        self.sampled += [False] * len(ids)
        self.versions += [-1] * len(ids)
        self.turn_start = len(self.tokens)
        self.finish = None
        return True

    def close(self, reward: float | None) -> Response:
        assert self.finish is not None, f"{self.id} is still being generated"
        return Response(
            id=self.id, prompt=self.prompt, tokens=tuple(self.tokens), logprobs=tuple(self.logprobs),
            sampled=tuple(self.sampled), versions=tuple(self.versions), finish=self.finish, reward=reward,
            turns=max(1, len(self.turns)),
        )  # fmt: skip
