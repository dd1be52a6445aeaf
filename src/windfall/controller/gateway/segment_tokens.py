"""The tokens of one segment of a session, and which of them its agent has received. Also rebuilds segments from the
journal.

An agent can be started again: after its process was killed, or after the controller was. It then makes its calls once
more, and a call with the same ids gets the turn that was sampled for these ids before:

    ids of the call ──▶ a turn that begins after exactly these ids? ── yes ──▶ that turn      (stored)
                                  │ no
                                  ├──▶ they continue the segment's last turn ──▶ sampled      (continues)
                                  └──▶ neither: the agent does something else this time, and the rest of the segment is
                                       not used. The call becomes a segment of its own.

Every trained token was sampled after exactly the ids that stand before it, in either case.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
import xxhash

from windfall.controller.ledger.episode import Episode
from windfall.controller.ledger.journal_format import Prompted, TurnCut, TurnGraded
from windfall.controller.ledger.journal_reader import History, TokenRun
from windfall.types import Finish, Response

UNLIMITED = 1 << 30
"""Limit of an episode until its next turn begins, which sets the real one."""


class TurnSpan(NamedTuple):
    """A complete turn: positions within the tokens of its segment."""

    start: int
    end: int
    finish: Finish


@dataclass(eq=False)
class SegmentTokens:
    number: int
    episode: Episode
    turns: list[TurnSpan] = field(default_factory=list)
    """The complete turns."""
    opened: bool = False
    """The episode is in the ledger. One from the journal is opened when a call goes beyond its complete turns."""
    received: list[TurnSpan] = field(default_factory=list)
    """The turns that the agent has asked for since it was last started."""
    restored: int = 0
    """Number of tokens, from the first one on, that came from the journal."""

    @property
    def used(self) -> int:
        """Number of tokens up to the end of the last turn that the agent received."""
        return self.received[-1].end if self.received else 0

    def stored(self, ids: Sequence[int], max_tokens: int) -> TurnSpan | None:
        """The complete turn that was sampled after exactly these ids."""
        start = len(ids) - len(self.episode.prompt)
        turn = next((t for t in self.turns if t.start == start and t.end - t.start <= max_tokens), None)
        return turn if turn is not None and self._begins_with(ids, start) else None

    def continues(self, ids: Sequence[int], max_tokens: int) -> bool:
        """Whether a turn after these ids continues the last one, or is the one that was interrupted."""
        position, have = len(ids) - len(self.episode.prompt), len(self.episode.tokens)
        if self.episode.finish is None:  # the journal has the beginning of this turn
            begun = have - self.episode.turn_start
            return position == self.episode.turn_start and begun < max_tokens and self._begins_with(ids, position)
        return position >= have and self._begins_with(ids, have)

    def _begins_with(self, ids: Sequence[int], count: int) -> bool:
        """Whether the ids are the prompt and then the first `count` tokens, possibly with more ids after them."""
        prompt = self.episode.prompt
        known = (*prompt, *self.episode.tokens[:count])
        return count >= 0 and tuple(ids[: len(known)]) == known

    def response(self, reward: float | None) -> Response:
        """The tokens that the agent received."""
        finish = self.received[-1].finish if self.received else "stop"
        return self.episode.response(reward, self.used, finish, max(1, len(self.received)), agent=True)


def joined(id: str, segments: Sequence[SegmentTokens], reward: float | None) -> Response:
    """One response with all its segments, in order. Segments without a sampled token are left out. Its turns are those
    of all segments, and it ended as the last segment did."""
    parts = [r for s in sorted(segments, key=lambda s: s.number) if (r := s.response(reward)).sampled_count]
    if not parts:
        return Response(
            id=id, prompt=(), tokens=(), logprobs=(), sampled=(), versions=(), finish="stop", reward=reward, agent=True
        )
    turns = sum(part.turns for part in parts)
    return replace(parts[0], id=id, more=tuple(parts[1:]), turns=turns, finish=parts[-1].finish)


def restore(number: int, past: History, episode: Episode) -> SegmentTokens | None:
    """Rebuild a segment from the journal. `episode` is empty and has no prompt yet. What comes after a damaged part is
    not used. None: the journal does not have the prompt."""
    segment, prompted = SegmentTokens(number, episode), False
    for event in past.get(episode.id, ()):
        if isinstance(event, Prompted) and event.position < 0:
            if prompted:
                break
            episode.prompt, prompted = _ids(event.tokens), True
        elif not prompted:
            break
        elif isinstance(event, Prompted):
            if episode.finish is None or event.position != len(episode.tokens):
                break
            episode.observe(_ids(event.tokens))
        elif isinstance(event, TokenRun):
            new = len(episode.tokens) - event.position
            if new < 0 or episode.finish is not None:
                break
            episode.take(len(episode.tokens), event.tokens[new:], event.logprobs[new:], event.version, event.finish)
            if event.finish is not None:
                segment.turns.append(TurnSpan(episode.turn_start, len(episode.tokens), event.finish))
        elif isinstance(event, TurnCut):
            if not episode.turn_start <= event.length <= len(episode.tokens):
                break
            _cut(segment, event.length)
    segment.restored = len(episode.tokens)
    return segment if prompted else None


def _cut(segment: SegmentTokens, length: int) -> None:
    episode = segment.episode
    if segment.turns and segment.turns[-1].start == episode.turn_start:
        segment.turns.pop()
    episode.cut(length)
    episode.finish = "stop"
    if length > episode.turn_start:
        segment.turns.append(TurnSpan(episode.turn_start, length, "stop"))


def finished(id: str, past: History, segments: Sequence[SegmentTokens]) -> Response | None:
    """The response if the journal has its reward and all tokens of it; otherwise None."""
    ends = [e for e in past.get(id, ()) if isinstance(e, TurnGraded)]
    if not ends or ends[-1].reward is None:
        return None
    by_number = {segment.number: segment for segment in segments}
    for number, used in ends[-1].segments:
        segment = by_number.get(number)
        if segment is None or not any(turn.start < used <= turn.end for turn in segment.turns):
            return None
        segment.received = [
            turn if turn.end <= used else TurnSpan(turn.start, used, "stop")  # its stream was closed in the middle
            for turn in segment.turns
            if turn.start < used
        ]
    chosen = [by_number[number] for number, _ in ends[-1].segments]
    return joined(id, chosen, ends[-1].reward)


def segment_id(session: str, segment: int) -> str:
    """The id of a segment in the ledger: the first one has the id of its response.

    >>> segment_id("7/0", 0), segment_id("7/0", 2)
    ('7/0', '7/0+2')
    """
    return session if segment == 0 else f"{session}+{segment}"


def segment_seed(seed: int, segment: int) -> int:
    """The seed of a segment. The first one has the seed of its response."""
    return seed if segment == 0 else xxhash.xxh3_64_intdigest(f"{seed}/segment {segment}".encode())


def _ids(data: bytes) -> tuple[int, ...]:
    return tuple(np.frombuffer(data, "<u4").tolist())
