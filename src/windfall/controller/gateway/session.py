"""One session of the gateway: its history, its calls in flight, and its reward.

    call(body) ──▶ the same body in flight, and its client gone? ── yes ──▶ join it
                       │ no
                       └──▶ place in the history ──▶ reserve tokens ──▶ sampler ──▶ answer in the history ──▶ every
                            (in a thread)                                           client that waits

Rules:
- A call belongs to the session, not to the connection that asked for it. A client that loses its connection and asks
  again with the same body joins the call, as long as no client has received the answer. While that connection is
  open, the same body is another call: an agent that asks several times at once wants several samples.
- A client has received an answer once its end was written to the connection, or once a later call continues it.
- When the session ends, its calls are canceled, and only answers that a client received to their end are trained. The
  others are removed, also that of a stream that its client closed in the middle: an agent that wants to end a turn
  early names a stop string.
- A turn ends after the first stop string. The client gets the text before it; the ids include it.
- Prompts are rendered and tokenized in a thread, one after the other: a long one does not hold up the event loop.
- A call is for one role, whose policy answers it. Calls of other roles do not continue its segments, and each
  policy has tokens of its own.
"""

from __future__ import annotations

import asyncio
import hashlib
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

from windfall.controller.gateway import protocol
from windfall.controller.gateway.intake import Body
from windfall.controller.gateway.protocol import ApiError
from windfall.controller.gateway.voice import Voice
from windfall.controller.rollout.stop_strings import StopStrings
from windfall.errors import WindfallError
from windfall.models.chat import PromptTooLong
from windfall.models.history import PlacedCall, SessionHistory
from windfall.models.tool_calls import ParsedTurn, parse
from windfall.types import Finish, policy_of

Progress = Callable[[Sequence[int], Sequence[float]], int | None]
"""Called with the tokens of the turn that are new since the last call, which may be none, and their log-probs. If it
returns a number, the turn ends after that many tokens of the turn; later tokens are discarded."""
InThread = Callable[[Callable[[], PlacedCall]], Awaitable[PlacedCall]]
"""Runs a function in the thread for tokenizing."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TurnRequest:
    """One turn that is to be sampled."""

    session: str
    segment: int
    """Number of the segment within its session."""
    prompt: tuple[int, ...]
    """All ids before the turn."""
    max_tokens: int
    role: str = ""
    """The role that samples."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SampledTurn:
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish: Finish


class TurnSampler(Protocol):
    """What the gateway needs from the rest of windfall. It never sees text or messages."""

    model: str
    """Name in the API of a policy that has none."""

    def vocabulary(self, policy: str) -> int:
        """Number of token ids of the policy's model."""
        ...

    async def sample(self, request: TurnRequest, progress: Progress) -> SampledTurn:
        """Sample a turn. Raises WindfallError if that is not possible. Canceling it withdraws the turn."""
        ...

    def retract(self, request: TurnRequest) -> None:
        """The session has ended, and no client has received the answer to this request, the last one of its segment."""
        ...


class TokenLimits(NamedTuple):
    """Upper limits for what one policy samples in a session."""

    tokens: int
    """In all turns together."""
    turn: int = 0
    """In one turn. 0: none."""


class TokenBudget:
    """The tokens that a policy may still sample in a session, divided among its calls.

    A call reserves as much as it may use, and gives back what it did not use. If too little is left while other calls
    hold reservations, it waits, first come, first served: a call is never cut short or refused because of tokens that
    another call gives back later. So calls that name a limit (`max_tokens`, `rollout.turn_tokens`) run at the same time
    as long as their limits fit together; calls without one run one after the other.
    """

    def __init__(self, tokens: int) -> None:
        self._left = tokens
        """Tokens that are neither used nor reserved."""
        self._reserved = 0
        self._turn = asyncio.Lock()
        """Held by the first call that waits."""
        self._given_back = asyncio.Event()

    async def reserve(self, wanted: int) -> int:
        """Reserve `wanted`, or less if the budget has no more. 0: nothing is left."""
        async with self._turn:
            while self._left < wanted and self._reserved:
                self._given_back.clear()
                await self._given_back.wait()
            granted = min(wanted, self._left)
            self._left -= granted
            self._reserved += granted
            return granted

    def settle(self, reserved: int, used: int) -> None:
        """End a reservation of which `used` is gone for good."""
        self._left += reserved - used
        self._reserved -= reserved
        self._given_back.set()


class CallInFlight:
    """A call that is being sampled, or whose answer no client has received yet."""

    work: asyncio.Task[None]
    """Makes the answer."""

    def __init__(
        self, session: GatewaySession, key: str, role: str, tools: frozenset[str], options: protocol.CallOptions
    ) -> None:
        """`key`: that of its body."""
        self.session = session
        self.key = key
        self.client: asyncio.BaseTransport | None = None
        """The connection of the client that waits for it."""
        self.role = role
        self.voice = session.voices[policy_of(role)]
        self.tools = tools
        self.options = options
        self._stops = StopStrings(options.stop, self.voice.decode)
        self.call: PlacedCall | None = None
        """Its place in the history, once it has one."""
        self.prompt: tuple[int, ...] = ()
        self.tokens: list[int] = []
        self.logprobs: list[float] = []
        self.finish = ""
        self.text = ""
        """The text for the client, without a stop string."""
        self.message: dict[str, Any] | None = None
        self.delivered = False
        """A client has received the whole answer."""
        self.request: TurnRequest | None = None
        """What is sampled. None: the call may still be refused."""
        self._changed = asyncio.Event()

    @property
    def id(self) -> str:
        """The id in answers."""
        assert self.call is not None
        return self.session.answer_id or f"call-{self.call.segment.index}-{len(self.prompt)}"

    def notify(self) -> None:
        """Wake all that wait for a change."""
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def done(self) -> None:
        """Wait for the end of the call. Raises the error with which it ended."""
        await asyncio.shield(self.work)

    async def accepted(self) -> None:
        """Wait until the call is being sampled. Raises the error with which it ended before."""
        while self.request is None and not self.work.done():
            await self._changed.wait()
        if self.request is None:
            await self.done()

    async def progress(self) -> AsyncIterator[int]:
        """The number of tokens so far, whenever it has grown. Raises the error with which the call ends."""
        seen = 0
        while not self.work.done():
            if len(self.tokens) > seen:
                seen = len(self.tokens)
                yield seen
            else:
                await self._changed.wait()
        await self.done()

    def grow(self, tokens: Sequence[int], logprobs: Sequence[float]) -> int | None:
        """Add new tokens (Progress)."""
        if not tokens:
            return None
        self.tokens.extend(tokens)
        self.logprobs.extend(logprobs)
        self.notify()
        return self._stops.end("", self.tokens, 0)


class GatewaySession:
    def __init__(
        self,
        id: str,
        sampler: TurnSampler,
        voices: Mapping[str, Voice],
        limits: Mapping[str, TokenLimits],
        *,
        in_thread: InThread,
        answer_id: str = "",
    ) -> None:
        """`voices`, `limits`: by policy. `answer_id`: the id in all its answers; empty: that of the call."""
        self.id, self.key = id, f"sk-{secrets.token_urlsafe(32)}"
        self.history = SessionHistory({policy: voice.chat for policy, voice in voices.items()})
        self.voices = voices
        self._sampler = sampler
        self._in_thread = in_thread
        self._limits = limits
        self._budgets = {policy: TokenBudget(limit.tokens) for policy, limit in limits.items()}
        self.reward: float | None = None
        self.rewards: dict[str, float] = {}
        """Those that the agent has posted: for all roles that are not named, and by role."""
        self.ended, self.why_ended = False, ""
        self.ran_out = False
        """The last call was refused because the session or the context had no tokens left."""
        self.calls = 0
        """Number of calls that were not refused."""
        self._waiting = 0
        self._waited_s = 0.0
        self._waiting_since_s = 0.0
        """Number of unanswered calls; seconds in which there was at least one; when that number last changed."""
        self._in_flight: list[CallInFlight] = []
        self._placing = asyncio.Lock()
        self._connections: set[asyncio.BaseTransport] = set()
        """Those of clients that have sent its key. Some may be closed."""
        self.answer_id = answer_id

    def connected(self, transport: asyncio.BaseTransport | None, most: int) -> bool:
        """A client has sent the key on this connection. Returns False if there would be more than `most` open ones."""
        if transport is None or transport in self._connections:
            return True
        if len(self._connections) >= most:
            self._connections = {known for known in self._connections if not known.is_closing()}
        if len(self._connections) >= most:
            return False
        self._connections.add(transport)
        return True

    def call(
        self,
        body: Body,
        options: protocol.CallOptions,
        ids: Callable[[], Sequence[int]] | None,
        role: str = "",
        client: asyncio.BaseTransport | None = None,
    ) -> CallInFlight:
        """Join the same request that is in flight and whose client is gone, or start a call. `ids`: the prompt of a
        completion, called in the thread for tokenizing; None: the body is a chat. `client`: its connection."""
        flight = self._join_or_start(body, options, ids, role)
        flight.client = client
        return flight

    def _join_or_start(
        self, body: Body, options: protocol.CallOptions, ids: Callable[[], Sequence[int]] | None, role: str
    ) -> CallInFlight:
        if self.ended:
            raise ApiError(401, f"this session has ended: {self.why_ended}", code="invalid_api_key")
        for flight in self._in_flight:
            if flight.key == body.key and flight.client is not None and flight.client.is_closing():
                return flight
        if ids is not None:
            place = lambda: self.history.place_ids(ids(), role)  # noqa: E731
            return self._start(CallInFlight(self, body.key, role, frozenset(), options), place)
        if self.voices[policy_of(role)].chat is None:
            raise ApiError(400, "this model has no chat template; use /v1/completions", param="messages")
        messages, tools = protocol.chat(body.fields)
        names = frozenset(tool["function"]["name"] for tool in tools or ())
        place = lambda: self.history.place(messages, tools, role)  # noqa: E731
        return self._start(CallInFlight(self, body.key, role, names, options), place)

    def _start(self, flight: CallInFlight, place: Callable[[], PlacedCall]) -> CallInFlight:
        flight.work = asyncio.create_task(self._run(flight, place))
        flight.work.add_done_callback(lambda work: work.cancelled() or work.exception())  # its client may be gone
        flight.work.add_done_callback(lambda work: flight.notify())
        self._in_flight.append(flight)
        return flight

    async def _run(self, flight: CallInFlight, place: Callable[[], PlacedCall]) -> None:
        self._count_waiting(1)
        answered = False
        try:
            call = await self._place(flight, place)
            limit = await self._reserve(flight)
            try:
                self._answer(flight, call, await self._sample(flight, call, limit))
                answered = True
            finally:
                self._budgets[policy_of(flight.role)].settle(limit, len(flight.tokens) if answered else 0)
        except WindfallError as e:
            raise ApiError(503, f"the turn could not be sampled: {e.what}") from e
        finally:
            self._count_waiting(-1)
            if not answered:
                if flight.call is not None:
                    self.history.abandon(flight.call, begun=flight.request is not None)
                self._in_flight = [other for other in self._in_flight if other is not flight]

    async def _place(self, flight: CallInFlight, place: Callable[[], PlacedCall]) -> PlacedCall:
        """Give the call its place in the history."""
        try:
            async with self._placing:
                call = flight.call = await self._in_thread(place)
        except PromptTooLong as e:
            self.ran_out = True
            raise ApiError(400, e.what, code="context_length_exceeded", param="messages") from e
        except WindfallError as e:
            raise ApiError(400, f"{e.what}. {e.fix}", param="tools" if e.where == "tools" else "messages") from e
        flight.prompt = call.prompt
        for other in list(self._in_flight):
            if other is not flight and other.call is not None and other.call.segment is call.segment:
                self.delivered(other)  # this call has its answer in its prompt
        if not flight.prompt:
            raise ApiError(400, "the prompt is empty", param="prompt")
        new = call.new or call.segment.prompt
        vocabulary = self._sampler.vocabulary(policy_of(flight.role))
        if not 0 <= min(new) <= max(new) < vocabulary:
            what = f"token ids must be at least 0 and below {vocabulary}, the size of the vocabulary"
            raise ApiError(400, what, param="prompt")
        return call

    async def _reserve(self, flight: CallInFlight) -> int:
        """The upper limit for the tokens of the turn, reserved in the budget."""
        size, context, policy = len(flight.prompt), flight.voice.context, policy_of(flight.role)
        limits = [context - size, flight.options.max_tokens, self._limits[policy].turn or None]
        wanted = min(limit for limit in limits if limit is not None)
        granted = await self._budgets[policy].reserve(wanted) if wanted > 0 else 0
        self.ran_out = granted < 1
        if self.ran_out:
            what = f"the prompt has {size} tokens, and the context is {context}"
            what = what if wanted < 1 else "the session has no tokens left"
            raise ApiError(400, what, code="context_length_exceeded", param="messages")
        self.calls += 1
        return granted

    async def _sample(self, flight: CallInFlight, call: PlacedCall, limit: int) -> SampledTurn:
        flight.request = TurnRequest(
            session=self.id, segment=call.segment.index, prompt=flight.prompt, max_tokens=limit, role=flight.role
        )
        flight.notify()
        return await self._sampler.sample(flight.request, flight.grow)

    def _count_waiting(self, change: int) -> None:
        now_s = asyncio.get_running_loop().time()
        if self._waiting:
            self._waited_s += now_s - self._waiting_since_s
        self._waiting, self._waiting_since_s = self._waiting + change, now_s

    def waited_s(self, now_s: float) -> float:
        """Seconds in which the agent waited for the policy."""
        return self._waited_s + (now_s - self._waiting_since_s if self._waiting else 0.0)

    def _answer(self, flight: CallInFlight, call: PlacedCall, turn: SampledTurn) -> None:
        flight.tokens, flight.logprobs, flight.finish = list(turn.tokens), list(turn.logprobs), turn.finish
        text = flight.voice.decode(turn.tokens)
        found = min((at for s in flight.options.stop if (at := text.find(s)) >= 0), default=None)
        flight.text = text if found is None else text[:found]
        if call.messages:
            parsed = parse(flight.text, flight.tools)
            if flight.options.one_tool_call:
                parsed = replace(parsed, tool_calls=parsed.tool_calls[:1])
            flight.message = protocol.reply_message(parsed, self._call_ids(call, parsed))
        self.history.answer(call, turn.tokens, flight.message)

    def _call_ids(self, call: PlacedCall, parsed: ParsedTurn) -> list[str]:
        """Ids of nine letters and digits, which every template accepts; the same whenever the session is replayed."""
        name = f"{self.id}/{call.segment.index}/{len(call.segment.tokens)}"
        return [hashlib.blake2b(f"{name}/{n}".encode()).hexdigest()[:9] for n in range(len(parsed.tool_calls))]

    def delivered(self, flight: CallInFlight) -> None:
        """A client has received the whole answer: the same body is now another call."""
        flight.delivered = True
        self._in_flight = [other for other in self._in_flight if other is not flight]

    async def end(self) -> None:
        self.ended = True
        flights, self._in_flight = self._in_flight, []
        for flight in flights:
            flight.work.cancel()
        await asyncio.gather(*(flight.work for flight in flights), return_exceptions=True)
        for flight in flights:
            if flight.finish and not flight.delivered:
                assert flight.request is not None
                self._sampler.retract(flight.request)
