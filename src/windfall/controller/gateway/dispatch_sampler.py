"""The TurnSampler of a run: every segment of a session is an Episode of the ledger, and workers generate its turns.

    turn 0 of a segment      Episode(prompt) ──▶ Dispatch.open ──────▶ workers ──▶ the turn ended
    a later turn             Episode.observe(new ids) ──▶ next_turn ──▶ workers ──▶ the turn ended
    a stop string was found  Dispatch.cut ──▶ later tokens are discarded, the worker is told to stop
    the session ended        close ──▶ one Response with a segment for each episode, and one reward

Rules: the ids of an episode are those of its segment. A lost worker is invisible here: the dispatch continues the turn
elsewhere. The seed of a segment is derived from the session's seed and the number of the segment, so a session is a
function of the recipe and of what its agent sent. The journal gets the ids of every call before its turn is sampled,
and it is flushed before the agent gets the turn. If the agent is started again, calls with the same ids get the same
turns (segment_tokens.py).
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from windfall.controller.gateway.base import Progress, SampledTurn, TurnRequest
from windfall.controller.gateway.segment_tokens import (
    UNLIMITED,
    SegmentTokens,
    TurnSpan,
    finished,
    joined,
    restore,
    segment_id,
    segment_seed,
)
from windfall.controller.ledger.episode import Episode
from windfall.controller.ledger.journal_reader import History
from windfall.controller.rollout.dispatch import Dispatch
from windfall.errors import WindfallError
from windfall.types import Response, Sampling

POLL_S = 0.02
"""Seconds between looks at the tokens of a turn that is being generated. It limits how finely an answer is streamed and
how many tokens are generated after a stop string."""


@dataclass(eq=False)
class _SessionTokens:
    """What the sampler knows of one session."""

    seed: int
    sampling: Sampling
    version: int | None
    current: dict[int, SegmentTokens] = field(default_factory=dict)
    """By segment of the gateway's history: the segment that its next turn continues."""
    used: list[SegmentTokens] = field(default_factory=list)
    """All segments that the agent has asked for since it was last started."""
    known: list[SegmentTokens] = field(default_factory=list)
    """Segments from before that, which it has not asked for again yet."""
    next_number: int = 0

    @property
    def all(self) -> list[SegmentTokens]:
        return [*self.used, *self.known]


class DispatchSampler:
    def __init__(
        self,
        dispatch: Dispatch,
        *,
        model: str,
        context: int,
        sampling: Sampling,
        stop: frozenset[int],
    ) -> None:
        """`sampling` is the default of `open`."""
        self.model, self.context = model, context
        self._dispatch = dispatch
        self._sampling = sampling
        self._stop = stop
        self._sessions: dict[str, _SessionTokens] = {}
        self._waiting: dict[str, asyncio.Future[None]] = {}
        """By episode whose turn is being generated."""

    @property
    def vocabulary(self) -> int:
        return self._dispatch.ledger.vocabulary

    # Sessions, for their owner.

    def open(
        self,
        session: str,
        seed: int,
        *,
        sampling: Sampling | None = None,
        version: int | None = None,
        past: History | None = None,
    ) -> Response | None:
        """Open a session. Its id is that of its response, such as "7/0". `version`: every token must come from this
        version; None: from any version in the version window. `past`: what the journal has of its segments. Returns the
        response, and opens nothing, if the journal has all of it."""
        opened = _SessionTokens(seed, sampling or self._sampling, version)
        for id in past or ():
            number = int(id.partition("+")[2] or 0)
            opened.next_number = max(opened.next_number, number + 1)
            if (segment := restore(number, past or {}, self._episode(session, opened, number, ()))) is not None:
                opened.known.append(segment)
        opened.known.sort(key=lambda segment: segment.number)
        if past and (response := finished(session, past, opened.known)) is not None:
            return response
        self._sessions[session] = opened
        return None

    def rewind(self, session: str) -> None:
        """The agent is started again. No turn may be in progress."""
        s = self._sessions[session]
        s.known, s.used, s.current = sorted(s.all, key=lambda segment: segment.number), [], {}
        for segment in s.known:
            segment.received = []

    def close(self, session: str, reward: float | None) -> Response:
        """Close a session that has no turn in progress, and return its response."""
        s = self._sessions.pop(session)
        for segment in s.used:
            if segment.opened:
                self._dispatch.close(segment.episode.id)
        self._withdraw([segment for segment in s.known if segment.opened])
        return joined(session, s.used, reward)

    def lengths(self, session: str) -> tuple[tuple[int, int], ...]:
        """Number of each segment of an open session, and how many of its tokens the agent has received."""
        segments = sorted(self._sessions[session].used, key=lambda segment: segment.number)
        return tuple((segment.number, segment.used) for segment in segments if segment.used)

    def withdraw(self, session: str) -> None:
        """Close a session that the run no longer needs."""
        s = self._sessions.pop(session, None)
        if s is not None:
            self._withdraw([segment for segment in s.all if segment.opened])

    def has_tokens(self, session: str) -> bool:
        """Whether anything was sampled for the session, now or before the controller was restarted."""
        return any(segment.episode.tokens for segment in self._sessions[session].all)

    def oldest_version(self, session: str) -> int | None:
        """The oldest version among the tokens that the agent has received or that are being generated."""
        found: list[int] = []
        for s in self._sessions[session].used:
            if s.opened and (version := self._dispatch.ledger.oldest_version(s.episode.id)) is not None:
                found.append(version)
            found += [version for version, _ in s.episode.version_runs if version >= 0]
        return min(found, default=None)

    def sampled(self, session: str) -> tuple[int, int]:
        """Number of sampled tokens that the agent has received so far, and how many of them came from the journal."""
        made = restored = 0
        for s in self._sessions[session].used:
            for turn in s.received:
                made += turn.end - turn.start
                restored += max(0, min(turn.end, s.restored) - turn.start)
        return made, restored

    def _withdraw(self, segments: list[SegmentTokens]) -> None:
        self._dispatch.withdraw([segment.episode.id for segment in segments])

    # Turns, for the gateway.

    async def sample(self, request: TurnRequest, progress: Progress) -> SampledTurn:
        session = self._sessions.get(request.session)
        if session is None:
            raise WindfallError("this session has ended", where=f"response {request.session}")
        segment = self._place(session, request)
        turn = segment.stored(request.prompt, request.max_tokens)
        if turn is None:
            turn = await self._generate(session, segment, request, progress)
            segment.turns.append(turn)
        else:
            tokens, logprobs = _span(segment.episode, turn)
            progress(tokens, logprobs)
        segment.received.append(turn)
        if self._dispatch.journal is not None:
            self._dispatch.journal.flush()  # what the agent does next depends on this turn
        tokens, logprobs = _span(segment.episode, turn)
        return SampledTurn(tokens=tuple(tokens), logprobs=tuple(logprobs), finish=turn.finish)

    def retract(self, request: TurnRequest, keep: int) -> None:
        """Only the first `keep` tokens of this turn are part of the response."""
        session = self._sessions.get(request.session)
        if session is None:
            return  # it was withdrawn
        segment = session.current[request.segment]
        start = len(request.prompt) - len(segment.episode.prompt)
        segment.received = [turn for turn in segment.received if turn.start < start]
        if keep:
            segment.received.append(TurnSpan(start, start + keep, "stop"))

    def _place(self, session: _SessionTokens, request: TurnRequest) -> SegmentTokens:
        """The segment that has this turn, or that it continues."""
        ids, limit = request.prompt, request.max_tokens
        segment = session.current.get(request.segment)
        if segment is not None and (segment.stored(ids, limit) or segment.continues(ids, limit)):
            return segment
        known = session.known if segment is None else ()  # else the agent does something else than before
        same = [s for s in known if s.episode.prompt == ids and (s.stored(ids, limit) or s.continues(ids, limit))]
        if same:
            segment = same[0]
            session.known.remove(segment)
        else:
            number, session.next_number = session.next_number, session.next_number + 1
            segment = SegmentTokens(number, self._episode(request.session, session, number, ids))
            if self._dispatch.journal is not None:
                self._dispatch.journal.write_prompt(segment.episode.id, -1, ids)
        session.current[request.segment] = segment
        session.used.append(segment)
        return segment

    def _episode(self, id: str, session: _SessionTokens, number: int, prompt: tuple[int, ...]) -> Episode:
        """An empty episode for segment `number`."""
        return Episode(
            id=segment_id(id, number),
            prompt=prompt,
            seed=segment_seed(session.seed, number),
            max_tokens=UNLIMITED,
            sampling=session.sampling,
            stop=self._stop,
            version=session.version,
        )

    async def _generate(
        self, session: _SessionTokens, segment: SegmentTokens, request: TurnRequest, progress: Progress
    ) -> TurnSpan:
        episode = segment.episode
        ended = self._waiting[episode.id] = asyncio.get_running_loop().create_future()
        self._begin(session, segment, request)
        start = seen = episode.turn_start
        kept: int | None = None
        try:
            while not ended.done() and kept is None:
                await asyncio.wait([ended], timeout=POLL_S)
                kept = progress(*_since(episode, seen))
                seen = len(episode.tokens)
            if ended.done():
                ended.result()
            if kept is not None:
                self._cut(episode.id, start + kept)
        except BaseException:  # canceled, or no worker can generate it: the segment ends before this turn
            if episode.id not in self._dispatch.ledger.entries:
                pass  # the session was withdrawn
            elif ended.cancelled() or not ended.done() or ended.exception() is None:
                self._cut(episode.id, start)
            else:
                self._dispatch.withdraw([episode.id])
                segment.opened = False
                episode.cut(start)
                episode.finish = "stop"
            raise
        finally:
            del self._waiting[episode.id]
        assert episode.finish is not None
        return TurnSpan(start, len(episode.tokens), episode.finish)

    def _begin(self, session: _SessionTokens, segment: SegmentTokens, request: TurnRequest) -> None:
        """Give the turn to the dispatch."""
        episode = segment.episode
        position = len(request.prompt) - len(episode.prompt)
        new = request.prompt[len(episode.prompt) + len(episode.tokens) :]
        episode.max_tokens = position + request.max_tokens
        if episode.finish is not None:
            assert episode.observe(new), f"{episode.id}: no room for a turn"
            if new and self._dispatch.journal is not None:
                self._dispatch.journal.write_prompt(episode.id, position - len(new), new)
        if segment.opened:
            self._dispatch.next_turn(episode.id)
        else:
            segment.opened = True
            self._dispatch.open(episode, self)

    def _cut(self, id: str, length: int) -> None:
        if self._dispatch.journal is not None:
            self._dispatch.journal.write_cut(id, length)
        self._dispatch.cut(id, length)

    def _wake(self, id: str, error: WindfallError | None) -> None:
        future = self._waiting.get(id)
        if future is None or future.done():
            return
        if error is None:
            future.set_result(None)
        else:
            future.set_exception(error)

    # What happens to a segment (dispatch.ResponseOwner).

    def turn_ended(self, id: str) -> None:
        self._wake(id, None)

    def rejected(self, id: str, why: str) -> None:
        self._wake(id, WindfallError(why, where=f"response {id}"))


def _since(episode: Episode, seen: int) -> tuple[list[int], list[float]]:
    """The tokens from position `seen` on, and their log-probs."""
    return episode.tokens[seen:].tolist(), episode.logprobs[seen:].tolist()


def _span(episode: Episode, turn: TurnSpan) -> tuple[list[int], list[float]]:
    return episode.tokens[turn.start : turn.end].tolist(), episode.logprobs[turn.start : turn.end].tolist()
