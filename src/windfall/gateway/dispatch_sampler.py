"""The Sampler of a run: every segment of a session is an Episode of the ledger, and workers generate its turns.

    turn 0 of a segment      Episode(prompt) ──▶ Dispatch.open ──────▶ workers ──▶ the turn ended
    a later turn             Episode.observe(new ids) ──▶ next_turn ──▶ workers ──▶ the turn ended
    a stop string was found  Dispatch.cut ──▶ later tokens are discarded, the worker is told to stop
    the session ended        close ──▶ one Response for each segment, all with the same reward

Rules: the ids of an episode are those of its segment; a request that does not continue them is an error of the gateway.
A lost worker is invisible here: the dispatch continues the turn elsewhere. The seed of a segment is derived from the
session's seed and the number of the segment, so a session is a function of the recipe and of what its agent sent.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

import xxhash

from windfall.errors import WindfallError
from windfall.gateway.base import Progress, SampledTurn, TurnRequest
from windfall.ledger.episode import Episode
from windfall.rollout.dispatch import Dispatch, Listener
from windfall.types import Response, Sampling

POLL_S = 0.02
"""Seconds between looks at the tokens of a turn that is being generated. It limits how finely an answer is streamed and
how many tokens are generated after a stop string."""


@dataclass(eq=False)
class _SessionEpisodes:
    seed: int
    episodes: dict[int, Episode] = field(default_factory=dict)
    """By segment."""


class DispatchSampler:
    def __init__(
        self, dispatch: Dispatch, *, model: str, context: int, sampling: Sampling, stop: frozenset[int],
        version: int | None = None,
    ) -> None:  # fmt: skip
        """`version`: every token must come from this version; None: from any version in the version window."""
        self.model, self.context = model, context
        self._dispatch, self._sampling, self._stop, self._version = dispatch, sampling, stop, version
        self._sessions: dict[str, _SessionEpisodes] = {}
        self._waiting: dict[str, asyncio.Future[None]] = {}
        """By episode whose turn is being generated."""
        self._listener = Listener(
            turn_ended=lambda id: self._wake(id, None),
            rejected=lambda id, why: self._wake(id, WindfallError(why, where=f"response {id}")),
            version_gone=lambda id: self._wake(
                id, WindfallError(f"no worker holds version {version} any more", where=f"response {id}")
            ),
        )

    def open(self, session: str, seed: int) -> None:
        """Open a session. Its id is that of its response, such as "7/0"."""
        self._sessions[session] = _SessionEpisodes(seed)

    def close(self, session: str, reward: float | None) -> list[Response]:
        """Close a session that has no turn in progress: its segments as responses, in order. Segments without a sampled
        token are left out."""
        out: list[Response] = []
        for _, episode in sorted(self._sessions.pop(session).episodes.items()):
            self._dispatch.close(episode.id)
            response = episode.close(reward)
            if response.sampled_count:
                out.append(response)
        return out

    async def sample(self, request: TurnRequest, progress: Progress) -> SampledTurn:
        episode = self._begin(request)
        ended = self._waiting[episode.id] = asyncio.get_running_loop().create_future()
        start, kept = episode.turn_start, -1
        try:
            while not ended.done() and kept < 0:
                await asyncio.wait([ended], timeout=POLL_S)
                kept = self._report(episode, start, progress, kept)
            if ended.done():
                ended.result()
            if kept >= 0:
                self._dispatch.cut(episode.id, start + kept)
        except BaseException:  # canceled, or no worker can generate it: the segment ends before this turn
            if ended.cancelled() or not ended.done() or ended.exception() is None:
                self._dispatch.cut(episode.id, start)
            else:
                self._forget(request, episode)
            raise
        finally:
            del self._waiting[episode.id]
        assert episode.finish is not None
        tokens, logprobs = episode.tokens[start:].tolist(), episode.logprobs[start:].tolist()
        return SampledTurn(tokens=tuple(tokens), logprobs=tuple(logprobs), finish=episode.finish)

    def _report(self, episode: Episode, start: int, progress: Progress, kept: int) -> int:
        """Report new tokens. Returns how many to keep, or -1 if the turn goes on."""
        if len(episode.tokens) == start:
            return kept
        found = progress(episode.tokens[start:].tolist(), episode.logprobs[start:].tolist())
        return kept if found is None else found

    def _begin(self, request: TurnRequest) -> Episode:
        session = self._sessions[request.session]
        episode = session.episodes.get(request.segment)
        if episode is None:
            episode = session.episodes[request.segment] = Episode(
                id=segment_id(request.session, request.segment), prompt=request.prompt,
                seed=segment_seed(session.seed, request.segment), max_tokens=request.max_tokens,
                sampling=self._sampling, stop=self._stop, version=self._version,
            )  # fmt: skip
            self._dispatch.open(episode, self._listener)
            return episode
        before, have = len(episode.prompt) + len(episode.tokens), (*episode.prompt, *episode.tokens)
        assert request.prompt[:before] == have, f"{episode.id}: the request does not continue its tokens"
        new = request.prompt[before:]
        episode.max_tokens = len(episode.tokens) + len(new) + request.max_tokens
        assert episode.observe(new), f"{episode.id}: no room for a turn"
        self._dispatch.next_turn(episode.id)
        return episode

    def _forget(self, request: TurnRequest, episode: Episode) -> None:
        self._dispatch.withdraw([episode.id])
        self._sessions[request.session].episodes.pop(request.segment, None)

    def _wake(self, id: str, error: WindfallError | None) -> None:
        future = self._waiting.get(id)
        if future is None or future.done():
            return
        if error is None:
            future.set_result(None)
        else:
            future.set_exception(error)


def segment_id(session: str, segment: int) -> str:
    """The id of a segment in the ledger: the first one has the id of its response.

    >>> segment_id("7/0", 0), segment_id("7/0", 2)
    ('7/0', '7/0+2')
    """
    return session if segment == 0 else f"{session}+{segment}"


def segment_seed(seed: int, segment: int) -> int:
    """The seed of a segment. The first one has the seed of its response."""
    return seed if segment == 0 else xxhash.xxh3_64_intdigest(f"{seed}/segment {segment}".encode())
