"""One session of the gateway: its history, its calls in flight, and its reward.

    call(body) ──▶ the same body in flight? ── yes ──▶ join it
                       │ no
                       └──▶ place in the history ──▶ sampler ──▶ answer in the history ──▶ every client that waits

Rules:
- A call belongs to the session, not to the connection that asked for it. A client that loses its connection and asks
  again with the same body joins the call, as long as no client has received the answer.
- When the session ends, its calls are canceled, and turns whose answer no client received are removed: they had no
  effect on the reward.
- A turn ends after the first stop string. The client gets the text before it; the ids include it.
"""

from __future__ import annotations

import asyncio
import hashlib
import secrets
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any

from windfall.errors import WindfallError
from windfall.gateway import protocol
from windfall.gateway.base import SampledTurn, Sampler, TurnRequest
from windfall.gateway.incremental_text import IncrementalText
from windfall.gateway.protocol import ApiError
from windfall.models.chat import Chat
from windfall.models.history import Call, History, Segment
from windfall.models.tool_calls import ParsedTurn, parse

MAX_CALLS = 64
"""Largest number of calls of one session that may be in flight."""


class CallInFlight:
    """A call that is being sampled, or whose answer no client has received yet."""

    def __init__(self, call: Call, tools: frozenset[str], stop: tuple[str, ...]) -> None:
        self.call, self.tools, self.stop = call, tools, stop
        self.prompt = call.prompt
        self.tokens: list[int] = []
        self.logprobs: list[float] = []
        self.finish = ""
        self.text = ""
        """The text for the client, without a stop string."""
        self.message: dict[str, Any] | None = None
        self.delivered = False
        self.searched: IncrementalText | None = None
        """The text in which stop strings are looked for."""
        self.changed = asyncio.Event()
        self.work: asyncio.Task[None] | None = None

    async def done(self) -> None:
        """Wait for the end of the call. Raises the error with which it ended."""
        assert self.work is not None
        await asyncio.shield(self.work)

    async def progress(self) -> AsyncIterator[int]:
        """The number of tokens so far, whenever it has grown. Raises the error with which the call ends."""
        assert self.work is not None
        seen = 0
        while not self.work.done():
            changed = self.changed
            if len(self.tokens) > seen:
                seen = len(self.tokens)
                yield seen
            else:
                waiting = asyncio.ensure_future(changed.wait())
                await asyncio.wait([waiting, self.work], return_when=asyncio.FIRST_COMPLETED)
                waiting.cancel()
        await self.done()


class GatewaySession:
    def __init__(
        self, id: str, sampler: Sampler, chat: Chat | None, decode: Callable[[Sequence[int]], str], *, max_tokens: int
    ) -> None:
        """`max_tokens`: upper limit for the sampled tokens of all turns together."""
        self.id, self.key = id, f"sk-{secrets.token_urlsafe(32)}"
        self.history = History(chat)
        self.chat, self._sampler, self._decode, self._left = chat, sampler, decode, max_tokens
        self.reward: float | None = None
        self.ended = False
        self.ran_out = False
        """A call was refused because the session had no tokens left."""
        self.calls = 0
        self._in_flight: dict[str, CallInFlight] = {}

    def chat_call(self, body: Mapping[str, Any], options: protocol.CallOptions) -> CallInFlight:
        if self.chat is None:
            raise ApiError(400, "this model has no chat template; use /v1/completions", param="messages")
        messages, tools = protocol.messages(body), protocol.tools(body)
        names = protocol.tool_names(tools)
        return self._join_or_start(body, options, names, lambda: self.history.place(messages, tools))

    def ids_call(self, body: Mapping[str, Any], options: protocol.CallOptions, ids: Sequence[int]) -> CallInFlight:
        return self._join_or_start(body, options, frozenset(), lambda: self.history.place_ids(ids))

    def _join_or_start(
        self, body: Mapping[str, Any], options: protocol.CallOptions, tools: frozenset[str], place: Callable[[], Call]
    ) -> CallInFlight:
        if self.ended:
            raise ApiError(401, "this session has ended", code="invalid_api_key")
        digest = _digest(body)
        if digest in self._in_flight:
            return self._in_flight[digest]
        if sum(c.work is not None and not c.work.done() for c in self._in_flight.values()) >= MAX_CALLS:
            raise ApiError(429, f"{MAX_CALLS} calls of this session are in flight", code="rate_limit_exceeded")
        try:
            call = place()
        except WindfallError as e:
            raise ApiError(400, f"{e.what}. {e.fix}", param="messages") from e
        room = min(self._sampler.context - len(call.prompt), self._left)
        limit = room if options.max_tokens is None else min(room, options.max_tokens)
        if limit < 1:
            self.history.abandon(call)
            self.ran_out = True
            what = f"the prompt has {len(call.prompt)} tokens, and the context is {self._sampler.context}"
            what = what if self._left > 0 else "the session has no tokens left"
            raise ApiError(400, what, code="context_length_exceeded", param="messages")
        self.calls += 1
        self._left -= limit  # what the turn does not use is given back
        flight = CallInFlight(call, tools, options.stop)
        flight.work = asyncio.create_task(self._run(flight, limit, digest))
        self._in_flight[digest] = flight
        return flight

    async def _run(self, flight: CallInFlight, limit: int, digest: str) -> None:
        call, answered = flight.call, False
        request = TurnRequest(
            session=self.id, segment=call.segment.index, turn=_turns(call.segment), prompt=flight.prompt,
            new=call.new or call.segment.prompt, max_tokens=limit,
        )  # fmt: skip
        try:
            turn = await self._sampler.sample(request, lambda tokens, logprobs: self._grow(flight, tokens, logprobs))
            self._answer(flight, turn)
            answered = True
        except WindfallError as e:
            raise ApiError(503, f"the turn could not be sampled: {e.what}") from e
        finally:
            self._left += limit - (len(flight.tokens) if answered else 0)
            if not answered:
                self.history.abandon(call, begun=True)
                self._in_flight.pop(digest, None)

    def _grow(self, flight: CallInFlight, tokens: Sequence[int], logprobs: Sequence[float]) -> int | None:
        known = len(flight.tokens)
        flight.tokens += tokens[known:]
        flight.logprobs += logprobs[known:]
        changed, flight.changed = flight.changed, asyncio.Event()
        changed.set()
        if not flight.stop:
            return None
        text = flight.searched = flight.searched or IncrementalText(self._decode)
        before = len(text.text)
        text.extend(tokens)
        new = text.text[max(0, before - max(map(len, flight.stop))) :] + text.held
        if _find(new, flight.stop) is None:
            return None
        count = len(tokens)
        while count > 1 and _find(self._decode(tokens[: count - 1]), flight.stop) is not None:
            count -= 1
        return count

    def _answer(self, flight: CallInFlight, turn: SampledTurn) -> None:
        flight.tokens, flight.logprobs, flight.finish = list(turn.tokens), list(turn.logprobs), turn.finish
        text = self._decode(turn.tokens)
        found = _find(text, flight.stop)
        flight.text = text if found is None else text[:found]
        call = flight.call
        if call.messages:
            parsed = parse(flight.text, flight.tools)
            flight.message = protocol.reply_message(parsed, self._call_ids(call, parsed))
        self.history.answer(call, turn.tokens, flight.message)

    def _call_ids(self, call: Call, parsed: ParsedTurn) -> list[str]:
        """Ids of nine letters and digits, which every template accepts; the same whenever the session is replayed."""
        name = f"{self.id}/{call.segment.index}/{len(call.segment.tokens)}"
        return [hashlib.blake2b(f"{name}/{n}".encode()).hexdigest()[:9] for n in range(len(parsed.tool_calls))]

    def delivered(self, flight: CallInFlight) -> None:
        """A client has received the whole answer: the same body is now another call."""
        flight.delivered = True
        self._in_flight = {digest: f for digest, f in self._in_flight.items() if f is not flight}

    async def end(self) -> list[Segment]:
        """End the session and return its segments that have sampled tokens."""
        self.ended = True
        flights, self._in_flight = list(self._in_flight.values()), {}
        for flight in flights:
            assert flight.work is not None
            flight.work.cancel()
        await asyncio.gather(*(f.work for f in flights if f.work is not None), return_exceptions=True)
        for flight in flights:
            if flight.finish and not flight.delivered:
                self.history.remove_turn(flight.call, len(flight.tokens))
        return [s for s in self.history.segments if any(s.sampled)]


def _turns(segment: Segment) -> int:
    """Number of sampled turns: stretches of sampled tokens."""
    return sum(s and not before for before, s in zip([False, *segment.sampled], segment.sampled, strict=False))


def _find(text: str, stop: Sequence[str]) -> int | None:
    """Where the first stop string begins."""
    return min((at for s in stop if (at := text.find(s)) >= 0), default=None)


def _digest(body: Mapping[str, Any]) -> str:
    return hashlib.blake2b(repr(sorted(body.items())).encode()).hexdigest()
