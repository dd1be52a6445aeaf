"""One response during its generation: its tokens, each position once and in order, over one or several turns. Pure. A
response with several segments has one Episode for each.

    Episode.take(...)              append new tokens; a gap, a repeat or a token after the end is an error
    Episode.observe(tokens)        append the environment's observation: tokens that the policy did not sample
    Episode.close(reward)          return the finished Response
    check_end(episode, frame, ...) check that a worker's frame ends the response exactly where it must end

Rule: `tokens` and `logprobs` always have the same length, which is the position of the next token. `version_runs`
covers the same positions: each run gives the version that generated a stretch of tokens, or -1 for an observation.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain, repeat
from typing import TypeVar

import xxhash

from windfall.chosen_experts import ChosenExperts
from windfall.link.messages import Tokens
from windfall.types import Finish, Response, Sampling, policy_of

K = TypeVar("K")
T = TypeVar("T")


class Malformed(ValueError):
    """A worker sent a frame that a correct worker never sends. No part of that frame was accepted."""


@dataclass(slots=True)
class Episode:
    id: str
    prompt: tuple[int, ...]
    seed: int
    max_tokens: int
    """Upper limit for the tokens of the whole response, observations included."""
    sampling: Sampling
    stop: frozenset[int]
    """Token ids that end a turn."""
    role: str = ""
    """The role that samples its tokens."""
    max_turn: int = 0
    """Upper limit for the sampled tokens of one turn. 0: only `max_tokens` limits it."""
    tokens: array[int] = field(default_factory=lambda: array("I"))
    logprobs: array[float] = field(default_factory=lambda: array("f"))
    version_runs: list[tuple[int, int]] = field(default_factory=list)
    """(version, number of tokens) of consecutive stretches; version -1 marks an observation."""
    engine_runs: list[tuple[str, int]] = field(default_factory=list)
    """(engine, number of tokens) of the sampled tokens at the end. Those before them are from a journal, which does not
    name the engine."""
    worker_runs: list[tuple[str, int]] = field(default_factory=list)
    """(worker, number of tokens) of the same tokens."""
    experts: ChosenExperts | None = None
    """Those of its leading tokens, from the first one of the prompt on, in a model with experts. None: not known."""
    version: int | None = None
    """Every token must come from this version; None: from any version in the version window."""
    turn_start: int = 0
    """Position of the first token of the current turn."""
    finish: Finish | None = None
    """Why the current turn ended. None while it is being generated."""

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
        _extend(self.version_runs, version, len(tokens))
        self.finish = finish

    def take_experts(self, start: int, data: bytes | bytearray | memoryview, width: int) -> None:
        """Add the chosen experts of tokens from position `start` on, where the prompt ends at 0."""
        if self.experts is None:
            self.experts = ChosenExperts(start=-len(self.prompt))
        self.experts.add(start, data, width)

    @property
    def experts_end(self) -> int:
        """Position after the last token whose chosen experts came, or will never come."""
        return -len(self.prompt) if self.experts is None else self.experts.end

    def record(self, count: int, version: int, engine: str, worker: str) -> None:
        """Record who generated the last `count` tokens."""
        _extend(self.version_runs, version, count)
        _extend(self.engine_runs, engine, count)
        _extend(self.worker_runs, worker, count)

    @property
    def policy(self) -> str:
        """The policy that samples its tokens."""
        return policy_of(self.role)

    @property
    def group(self) -> str:
        """The group within which engines may draft: "7" of "7/0", and of "7/0+1", which is a segment of an agent's
        response; "7@verifier" if it has a role, because conversations of other roles differ."""
        task = self.id.rpartition("/")[0]
        return f"{task}@{self.role}" if self.role else task

    @property
    def end(self) -> int:
        """Position at which the current turn must end."""
        return min(self.max_tokens, self.turn_start + self.max_turn) if self.max_turn else self.max_tokens

    @property
    def turn_tokens(self) -> list[int]:
        """The tokens that the policy sampled in the current turn."""
        return self.tokens[self.turn_start :].tolist()

    def cut(self, length: int) -> int:
        """Remove the tokens after the first `length`, all of the current turn, and return how many they were."""
        count = len(self.tokens) - length
        del self.tokens[length:], self.logprobs[length:]
        self.version_runs, self.engine_runs = _without(self.version_runs, count), _without(self.engine_runs, count)
        self.worker_runs = _without(self.worker_runs, count)
        if self.experts is not None:
            self.experts.cut(length - 1)  # the last token was not computed
        return count

    def observe(self, tokens: Iterable[int]) -> bool:
        """Append an observation and open the next turn. False: there is no room left for an answer to it."""
        tokens = list(tokens)
        if len(self.tokens) + len(tokens) >= self.max_tokens:
            self.finish = "length"
            return False
        self.tokens.extend(tokens)
        self.logprobs.extend(repeat(0.0, len(tokens)))
        _extend(self.version_runs, -1, len(tokens))
        self.turn_start = len(self.tokens)
        self.finish = None
        return True

    def close(self, reward: float | None, turns: int = 1) -> Response:
        """The finished response."""
        assert self.finish is not None, f"{self.id} is still being generated"
        return self.response(reward, len(self.tokens), self.finish, turns)

    def response(
        self, reward: float | None, length: int, finish: Finish, turns: int, *, agent: bool = False
    ) -> Response:
        """A response with the first `length` tokens."""
        versions = tuple(chain.from_iterable(repeat(version, count) for version, count in self.version_runs))[:length]
        sampled = tuple(version >= 0 for version in versions)
        assert len(versions) == length <= len(self.logprobs), f"{self.id}: lengths differ"
        return Response(
            id=self.id,
            prompt=self.prompt,
            tokens=tuple(self.tokens[:length]),
            logprobs=tuple(self.logprobs[:length]),
            sampled=sampled,
            versions=versions,
            finish=finish,
            reward=reward,
            turns=turns,
            engines=self._sources(self.engine_runs, sampled.count(True)),
            workers=self._sources(self.worker_runs, sampled.count(True)),
            agent=agent,
            role=self.role,
            experts=b"" if self.experts is None else self.experts.of(-len(self.prompt), length - 1),
        )

    def _sources(self, runs: Sequence[tuple[str, int]], sampled: int) -> tuple[tuple[str, int], ...]:
        """The runs of the first `sampled` sampled tokens, given `engine_runs` or `worker_runs`. Tokens from a journal
        come first, and their source is ""."""
        unknown = sum(n for version, n in self.version_runs if version >= 0) - sum(n for _, n in runs)
        known: list[tuple[str, int]] = []
        for source, count in (("", unknown), *runs):
            if taken := min(count, sampled):
                known.append((source, taken))
                sampled -= taken
        return tuple(known)


def segment_id(response: str, segment: int) -> str:
    """The id of a segment in the ledger: the first one has the id of its response.

    >>> segment_id("7/0", 0), segment_id("7/0", 2)
    ('7/0', '7/0+2')
    """
    return response if segment == 0 else f"{response}+{segment}"


def segment_seed(seed: int, segment: int) -> int:
    """The seed of a segment. The first one has the seed of its response."""
    return seed if segment == 0 else xxhash.xxh3_64_intdigest(f"{seed}/segment {segment}".encode())


def smallest(found: Iterable[tuple[K, int | None]]) -> dict[K, int]:
    """By key: the smallest of these numbers.

    >>> smallest([("solver", 3), ("verifier", None), ("solver", 2)])
    {'solver': 2}
    """
    out: dict[K, int] = {}
    for key, number in found:
        if number is not None:
            out[key] = min(number, out.get(key, number))
    return out


def _extend(runs: list[tuple[T, int]], value: T, count: int) -> None:
    """Append a run, or lengthen the last one if it has the same value."""
    if count == 0:
        return
    if runs and runs[-1][0] == value:
        count += runs.pop()[1]
    runs.append((value, count))


def _without(runs: Sequence[tuple[T, int]], left: int) -> list[tuple[T, int]]:
    """The runs without their last `left` tokens.

    >>> _without([("a", 3), ("b", 2)], 3)
    [('a', 2)]
    """
    out = list(runs)
    while left > 0 and out:
        value, count = out.pop()
        if count > left:
            out.append((value, count - left))
        left -= count
    return out


def check_end(episode: Episode, frame: Tokens, row: int, tokens: array[int], row_end: int) -> None:
    """Raise Malformed unless this row marks the end of the response if and only if the response ends with it.

    A turn ends with a stop token or with its last allowed token. `row_end` is the index in `tokens` after the
    last token of this row.
    """
    count = frame.counts[row] if frame.counts else 1
    length, finish = frame.positions[row] + count, frame.finished.get(row)
    if count > 1 and not episode.stop.isdisjoint(tokens[row_end - count : row_end - 1]):
        raise Malformed(f"{episode.id}: tokens after its stop token")
    if length > episode.end:
        raise Malformed(f"{episode.id}: {length} tokens, but at most {episode.end} are allowed")
    expected = "stop" if tokens[row_end - 1] in episode.stop else "length" if length == episode.end else None
    if finish != expected:
        raise Malformed(f"{episode.id}: finish is {finish!r} after {length} tokens, expected {expected!r}")
