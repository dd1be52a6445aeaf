"""The TurnSampler of a run: every segment of a session is an Episode of the ledger, and workers generate its turns.

    turn 0 of a segment      Episode(prompt) ──▶ Dispatch.open ──────▶ workers ──▶ the turn ended
    a later turn             Episode.observe(new ids) ──▶ next_turn ──▶ workers ──▶ the turn ended
    a stop string was found  Dispatch.cut ──▶ later tokens are discarded, the worker is told to stop
    the session ended        close ──▶ one Response with a segment for each episode, and its rewards

Rules: the ids of an episode are those of its segment, which has one role. A lost worker is invisible here: the dispatch
continues the turn elsewhere. The seed of a segment is derived from the session's seed and the number of the segment, so
a session is a function of the recipe and of what its agent sent. The journal gets the ids of every call before its turn
is sampled, and it is flushed before the agent gets the turn.

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

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np

from windfall.controller.gateway.session import Progress, SampledTurn, TurnRequest
from windfall.controller.ledger.episode import Episode, segment_id, segment_seed, smallest
from windfall.controller.ledger.journal_format import History, Prompted, TokenRun, TurnCut, TurnGraded
from windfall.controller.rollout.dispatch import Dispatch
from windfall.errors import WindfallError
from windfall.types import Finish, Response, Sampling, policy_of

POLL_S = 0.02
"""Seconds between looks at the tokens of a turn that is being generated. It limits how finely an answer is streamed and
how many tokens are generated after a stop string."""
UNLIMITED = 1 << 30
"""Limit of an episode until its next turn begins, which sets the real one."""


class TurnSpan(NamedTuple):
    """A complete turn: positions within the tokens of its segment."""

    start: int
    end: int
    finish: Finish


@dataclass(eq=False)
class SegmentTokens:
    """The tokens of one segment, and which of them its agent has received."""

    number: int
    episode: Episode
    turns: list[TurnSpan] = field(default_factory=list)
    """The complete turns."""
    opened: bool = False
    """The episode is in the ledger. One from the journal is opened when a call goes beyond its complete turns."""
    received: list[TurnSpan] = field(default_factory=list)
    """The turns that the agent has asked for since it was last started."""
    caller: int | None = None
    """The segment of the gateway's history that this one belongs to. None: the agent has not asked for it since it was
    last started."""

    @property
    def used(self) -> int:
        """Number of tokens up to the end of the last turn that the agent received."""
        return self.received[-1].end if self.received else 0

    def tokens(self, turn: TurnSpan) -> tuple[list[int], list[float]]:
        """The tokens of a turn, and their log-probs."""
        span = slice(turn.start, turn.end)
        return self.episode.tokens[span].tolist(), self.episode.logprobs[span].tolist()

    def has(self, ids: Sequence[int], max_tokens: int) -> bool:
        """Whether a turn after these ids is one of this segment."""
        return self.stored(ids, max_tokens) is not None or self._continues(ids, max_tokens)

    def stored(self, ids: Sequence[int], max_tokens: int) -> TurnSpan | None:
        """The complete turn that was sampled after exactly these ids."""
        start = len(ids) - len(self.episode.prompt)
        turn = next((t for t in self.turns if t.start == start and t.end - t.start <= max_tokens), None)
        return turn if turn is not None and self._begins_with(ids, start) else None

    def _continues(self, ids: Sequence[int], max_tokens: int) -> bool:
        """Whether a turn after these ids continues the last one, or is the one that was interrupted."""
        position, have = len(ids) - len(self.episode.prompt), len(self.episode.tokens)
        if self.episode.finish is None:  # the journal has the beginning of this turn
            begun = have - self.episode.turn_start
            return position == self.episode.turn_start and begun < max_tokens and self._begins_with(ids, position)
        return position >= have and self._begins_with(ids, have)

    def _begins_with(self, ids: Sequence[int], count: int) -> bool:
        """Whether the ids are the prompt and then the first `count` tokens, possibly with more ids after them."""
        known = (*self.episode.prompt, *self.episode.tokens[:count])
        return count >= 0 and tuple(ids[: len(known)]) == known

    def response(self, reward: float | None) -> Response:
        """The tokens that the agent received."""
        finish = self.received[-1].finish if self.received else "stop"
        return self.episode.response(reward, self.used, finish, max(1, len(self.received)), agent=True)

    def replay(self, past: Sequence[Any]) -> None:
        """Restore the segment from the journal. What comes after a damaged part is not used. Without a prompt it
        matches no call."""
        episode = self.episode
        for event in past:
            if isinstance(event, Prompted) and event.position < 0:
                if episode.prompt:
                    break
                episode.prompt = tuple(_ids(event.tokens))
            elif not episode.prompt:
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
                if event.experts is not None:
                    episode.take_experts(event.experts.start, event.experts.data, event.experts.width)
                if event.finish is not None:
                    self.turns.append(TurnSpan(episode.turn_start, len(episode.tokens), event.finish))
            elif isinstance(event, TurnCut):
                if not episode.turn_start <= event.length <= len(episode.tokens):
                    break
                self._cut(event.length)

    def _cut(self, length: int) -> None:
        start = self.episode.turn_start
        self.turns = [turn for turn in self.turns if turn.start != start]
        self.episode.cut(length)
        self.episode.finish = "stop"
        if length > start:
            self.turns.append(TurnSpan(start, length, "stop"))


@dataclass(eq=False)
class _SessionTokens:
    """What the sampler knows of one session."""

    seed: int
    sampling: Callable[[str], Sampling]
    versions: Mapping[str, int]
    segments: list[SegmentTokens] = field(default_factory=list)
    """By number. Numbers may be missing, if the journal was damaged."""

    @property
    def used(self) -> list[SegmentTokens]:
        return [segment for segment in self.segments if segment.caller is not None]

    def of_caller(self, caller: int | None) -> list[SegmentTokens]:
        return [segment for segment in self.segments if segment.caller == caller]


class DispatchSampler:
    environment = "agent"
    """It owns its segments (dispatch.ResponseOwner)."""

    def __init__(self, dispatch: Dispatch, *, model: str, stop: Mapping[str, frozenset[int]]) -> None:
        """`stop`: by policy, the token ids that end a turn."""
        self.model = model
        self._dispatch = dispatch
        self._stop = stop
        self._sessions: dict[str, _SessionTokens] = {}
        self._waiting: dict[str, asyncio.Future[None]] = {}
        """By episode whose turn is being generated."""

    def vocabulary(self, policy: str) -> int:
        return self._dispatch.ledger.vocabularies[policy]

    # Sessions, for their owner.

    def open(
        self,
        session: str,
        seed: int,
        *,
        sampling: Callable[[str], Sampling],
        versions: Mapping[str, int] | None = None,
        past: History | None = None,
    ) -> Response | None:
        """Open a session. Its id is that of its response, such as "7/0". `sampling`: by policy. `versions`: by policy,
        the version that all its tokens must come from; those of others come from any version in the version window.
        `past`: what the journal has of its segments. Returns the response, and opens nothing, if the journal has all of
        it."""
        opened, past = _SessionTokens(seed, sampling, versions or {}), past or {}
        for number in sorted(int(id.partition("+")[2] or 0) for id in past):
            events = past[segment_id(session, number)]
            role = next((event.role for event in events if isinstance(event, Prompted)), "")
            if policy_of(role) in self._stop:
                self._add_segment(session, opened, number, (), role).replay(events)
        if (response := finished(session, past, opened.segments)) is not None:
            return response
        self._sessions[session] = opened
        return None

    def rewind(self, session: str) -> None:
        """The agent is started again. No turn may be in progress."""
        for segment in self._sessions[session].segments:
            segment.caller = None
            segment.received = []

    def close(
        self, session: str, reward: float | None, error: str = "", rewards: tuple[tuple[str, float], ...] = ()
    ) -> Response:
        """Close a session that has no turn in progress, and return its response. `error`: why it has no reward.
        `rewards`: by role."""
        s = self._sessions.pop(session)
        for segment in s.used:
            if segment.opened:
                self._dispatch.close(segment.episode.id)
        self._withdraw(s.of_caller(None))
        if self._dispatch.journal is not None:
            lengths = tuple((segment.number, segment.used) for segment in s.used if segment.used)
            graded = TurnGraded(id=session, reward=reward, error=error, segments=lengths, rewards=rewards)
            self._dispatch.journal.write_grade(graded)
        return joined(session, s.used, reward, rewards)

    def withdraw(self, session: str) -> None:
        """Close a session that the run no longer needs."""
        s = self._sessions.pop(session, None)
        if s is not None:
            self._withdraw(s.segments)

    def has_tokens(self, session: str) -> bool:
        """Whether anything was sampled for the session, now or before the controller was restarted."""
        return any(segment.episode.tokens for segment in self._sessions[session].segments)

    def oldest_versions(self, session: str) -> dict[str, int]:
        """By policy: the oldest version among the tokens that the agent has received or that are being generated."""
        found: list[tuple[str, int | None]] = []
        for s in self._sessions[session].used:
            policy = s.episode.policy
            if s.opened:
                found.append((policy, self._dispatch.ledger.oldest_version(s.episode.id)))
            found += [(policy, version) for version, _ in s.episode.version_runs if version >= 0]
        return smallest(found)

    def sampled(self, session: str) -> int:
        """Number of sampled tokens that the agent has received so far."""
        return sum(turn.end - turn.start for s in self._sessions[session].used for turn in s.received)

    def _withdraw(self, segments: Sequence[SegmentTokens]) -> None:
        self._dispatch.withdraw([segment.episode.id for segment in segments if segment.opened])

    # Turns, for the gateway.

    async def sample(self, request: TurnRequest, progress: Progress) -> SampledTurn:
        session = self._sessions.get(request.session)
        if session is None:
            raise WindfallError("this session has ended", where=f"response {request.session}")
        segment = self._place(session, request)
        turn = segment.stored(request.prompt, request.max_tokens)
        if turn is None:
            turn = await self._generate(segment, request, progress)
            segment.turns.append(turn)
        segment.received.append(turn)
        if self._dispatch.journal is not None:
            self._dispatch.journal.flush()  # what the agent does next depends on this turn
        tokens, logprobs = segment.tokens(turn)
        return SampledTurn(tokens=tuple(tokens), logprobs=tuple(logprobs), finish=turn.finish)

    def retract(self, request: TurnRequest) -> None:
        if (session := self._sessions.get(request.session)) is not None:  # otherwise it was withdrawn
            segment = session.of_caller(request.segment)[-1]
            start = len(request.prompt) - len(segment.episode.prompt)
            segment.received = [turn for turn in segment.received if turn.start < start]

    def _place(self, session: _SessionTokens, request: TurnRequest) -> SegmentTokens:
        """The segment that has this turn, or that it continues."""
        ids, limit = request.prompt, request.max_tokens
        own = session.of_caller(request.segment)
        if own and own[-1].has(ids, limit):
            return own[-1]
        known = () if own else session.of_caller(None)  # otherwise the agent does something else than before
        known = [s for s in known if s.episode.role == request.role]
        segment = next((s for s in known if s.episode.prompt == ids and s.has(ids, limit)), None)
        if segment is None:
            number = session.segments[-1].number + 1 if session.segments else 0
            segment = self._add_segment(request.session, session, number, ids, request.role)
            self._write_prompt(segment.episode, -1, ids)
        segment.caller = request.segment
        return segment

    def _add_segment(
        self, id: str, session: _SessionTokens, number: int, prompt: tuple[int, ...], role: str
    ) -> SegmentTokens:
        policy = policy_of(role)
        episode = Episode(
            id=segment_id(id, number),
            prompt=prompt,
            seed=segment_seed(session.seed, number),
            max_tokens=UNLIMITED,
            sampling=session.sampling(policy),
            stop=self._stop[policy],
            role=role,
            version=session.versions.get(policy),
        )
        session.segments.append(SegmentTokens(number, episode))
        return session.segments[-1]

    async def _generate(self, segment: SegmentTokens, request: TurnRequest, progress: Progress) -> TurnSpan:
        episode = segment.episode
        ended = self._waiting[episode.id] = asyncio.get_running_loop().create_future()
        self._begin(segment, request)
        start = seen = episode.turn_start
        kept: int | None = None
        try:
            while not ended.done() and kept is None:
                await asyncio.wait([ended], timeout=POLL_S)
                kept = progress(episode.tokens[seen:].tolist(), episode.logprobs[seen:].tolist())
                seen = len(episode.tokens)
            if ended.done():
                ended.result()
            if kept is not None:
                self._cut(episode.id, start + kept)
        except BaseException:  # canceled, or no worker can generate it: the segment ends before this turn
            if episode.id in self._dispatch.ledger.entries:  # otherwise the session was withdrawn
                self._cut(episode.id, start)
            raise
        finally:
            del self._waiting[episode.id]
        assert episode.finish is not None
        return TurnSpan(start, len(episode.tokens), episode.finish)

    def _begin(self, segment: SegmentTokens, request: TurnRequest) -> None:
        """Give the turn to the dispatch."""
        episode = segment.episode
        position = len(request.prompt) - len(episode.prompt)
        new = request.prompt[len(episode.prompt) + len(episode.tokens) :]
        episode.max_tokens = position + request.max_tokens
        if episode.finish is not None:
            assert episode.observe(new), f"{episode.id}: no room for a turn"
            if new:
                self._write_prompt(episode, position - len(new), new)
        if segment.opened:
            self._dispatch.next_turn(episode.id)
        else:
            segment.opened = True
            self._dispatch.open(episode, self)

    def _write_prompt(self, episode: Episode, position: int, ids: Sequence[int]) -> None:
        if self._dispatch.journal is not None:
            self._dispatch.journal.write_prompt(episode.id, position, ids, episode.role)

    def _cut(self, id: str, length: int) -> None:
        if self._dispatch.journal is not None:
            self._dispatch.journal.write_cut(id, length)
        self._dispatch.cut(id, length)

    # What happens to a segment (dispatch.ResponseOwner).

    def turn_ended(self, id: str) -> None:
        if (future := self._unfinished(id)) is not None:
            future.set_result(None)

    def rejected(self, id: str, why: str) -> None:
        if (future := self._unfinished(id)) is not None:
            future.set_exception(WindfallError(why, where=f"response {id}"))

    def _unfinished(self, id: str) -> asyncio.Future[None] | None:
        future = self._waiting.get(id)
        return None if future is None or future.done() else future


def joined(
    id: str, segments: Sequence[SegmentTokens], reward: float | None, rewards: tuple[tuple[str, float], ...] = ()
) -> Response:
    """One response with these segments. Segments without a sampled token are left out. Its turns are those
    of all segments. It ended as the last segment did; if several roles spoke, each segment has its own end."""
    parts = [r for s in segments if (r := s.response(reward)).sampled_count]
    if not parts:
        return Response(
            id=id, prompt=(), tokens=(), logprobs=(), sampled=(), versions=(), finish="stop", reward=reward, agent=True
        )
    turns = sum(part.turns for part in parts)
    last = parts[-1] if len({part.role for part in parts}) == 1 else parts[0]
    return replace(parts[0], id=id, more=tuple(parts[1:]), turns=turns, finish=last.finish, rewards=rewards)


def finished(id: str, past: History, segments: Sequence[SegmentTokens]) -> Response | None:
    """The response if the journal has its reward and all tokens of it; otherwise None."""
    ends = [e for e in past.get(id, ()) if isinstance(e, TurnGraded)]
    if not ends or (ends[-1].reward is None and not ends[-1].rewards):
        return None
    by_number = {segment.number: segment for segment in segments}
    lengths = [(by_number.get(number), length) for number, length in ends[-1].segments]
    known = [(s, length) for s, length in lengths if s is not None and any(turn.end == length for turn in s.turns)]
    if len(known) < len(lengths):
        return None
    for segment, length in known:
        segment.received = [turn for turn in segment.turns if turn.end <= length]
    return joined(id, [segment for segment, _ in known], ends[-1].reward, ends[-1].rewards)


def _ids(data: bytes) -> list[int]:
    return np.frombuffer(data, "<u4").tolist()
