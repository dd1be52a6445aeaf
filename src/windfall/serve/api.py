"""The HTTP server of `windfall serve`: the OpenAI API, health and metrics.

    POST /v1/chat/completions     messages, tools; streaming or not
    POST /v1/completions          text or token ids
    GET  /v1/models
    GET  /health                  200, or 503 while the server drains or after its engine has failed
    GET  /metrics                 for Prometheus

It is the gateway (gateway/server.py) with a session of one call for every choice: the protocol, streams and tool calls
are the gateway's. Different from the gateway: a request decides how its tokens are sampled and how many choices it gets
(`n` for each prompt, several prompts), a field that cannot be honored is refused (request_fields.py), and a client that
goes away cancels its request.

Limits: those of bodies (gateway/intake.py), `max_requests` in flight, waiting or running (429 beyond it; every choice
counts as one), `read_s` seconds for a client to send its body, `write_s` seconds to take the next part of a stream, and
`request_s` seconds from the head of a request to the last byte of its answer. A client that is too slow is cut off, and
its request is canceled. A client without a valid key is refused before its body is read, so it occupies none of the
`max_requests`.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import secrets
import sys
from collections.abc import Awaitable, Callable, Hashable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Any

from aiohttp import web

from windfall.controller.gateway import protocol
from windfall.controller.gateway.intake import Body, IntakeLimits
from windfall.controller.gateway.protocol import MAX_ECHO, ApiError, CallOptions
from windfall.controller.gateway.server import CLOSE_S, Gateway
from windfall.controller.gateway.session import CallInFlight, GatewaySession, TokenLimits
from windfall.controller.gateway.voice import Voice
from windfall.models.chat import Chat
from windfall.serve import metrics, request_fields
from windfall.serve.call_sampler import CallSampler, Inbox, RequestChat, ServedModel
from windfall.serve.host import Host
from windfall.serve.request_fields import ServeFields

MAX_CHOICES = 128
"""Upper limit for `n`, as OpenAI's."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ServeLimits:
    api_key: str = ""
    """What clients must send; empty: nothing."""
    max_requests: int = 256
    request_s: float = 600.0
    read_s: float = 30.0
    write_s: float = 30.0


@dataclass
class RequestState:
    """A request that generates."""

    sessions: list[GatewaySession] = field(default_factory=list)
    choices: int = 1
    """Number of choices that count as requests in flight."""
    begun: bool = False
    """The first bytes of the answer were sent."""


_state: ContextVar[RequestState] = ContextVar("request")
"""State of the request that the present task handles."""


class ServeApi(Gateway):
    def __init__(
        self,
        host: Host,
        tokenizer: Any,
        chat: Chat | None,
        stop: frozenset[int],
        *,
        served: ServedModel,
        limits: ServeLimits | None = None,
    ) -> None:
        self._host = host
        self.served = served
        self._limits = limits or ServeLimits()
        self._in_flight = 0
        self.write_s = self._limits.write_s
        self.draining = ""
        """Why no request is accepted any more; empty while they are."""
        most, read_s = self._limits.max_requests, self._limits.read_s
        intake = IntakeLimits.for_context(served.context, batches=True, read_s=read_s, requests=most)
        self._inbox = Inbox()
        voices = {"": Voice(tokenizer, chat, stop, served.context)}
        super().__init__(CallSampler(host, served, stop, ServeFields(), self._inbox), voices, intake)
        self.app.on_response_prepare.append(_mark_begun)

    async def listen(self, host: str, port: int, fix: str, **options: Any) -> int:
        return await super().listen(host, port, fix, handler_cancellation=True, **options)

    def _middlewares(self) -> Sequence[Any]:
        return (self._one_request,)

    def _add_routes(self) -> None:
        self._add_completions()
        self.app.router.add_get("/health", self._health)
        self.app.router.add_get("/metrics", self._metrics)

    @property
    def has_key(self) -> bool:
        """Whether clients need a key."""
        return bool(self._limits.api_key)

    def _client(self, request: web.Request) -> Hashable:
        scheme, _, key = request.headers.get("Authorization", "").partition(" ")
        wanted = self._limits.api_key
        if wanted and not (scheme.lower() == "bearer" and hmac.compare_digest(_digest(key.strip()), _digest(wanted))):
            raise ApiError(401, "the API key is missing or wrong", code="invalid_api_key")
        self._authenticated(request)
        return request.transport  # all clients share a key

    def _start(self, request: web.Request, body: Body, *, chat: bool) -> tuple[CallOptions, list[CallInFlight]]:
        """Start one session with one call for every choice."""
        arrival_s = self._host.now_s()  # tokenizing counts, the client's upload does not
        fields = request_fields.read(body.fields, chat=chat)
        if fields.model not in (None, self.served.model):
            what = f"there is no model {fields.model[:MAX_ECHO]!r}; this is {self.served.model!r}"
            raise ApiError(404, what, code="model_not_found", param="model")
        options = protocol.options(body.fields, chat=chat, most=MAX_CHOICES)
        options = replace(options, one_tool_call=fields.parallel_tool_calls is False)
        prompts = [""] if chat else protocol.prompts(body.fields.get("prompt"), most=sys.maxsize)
        state = _state.get()
        self._count_choices(state, options.n * len(prompts))
        voice = self.voices[""]
        template = None if voice.chat is None else RequestChat(voice.chat, fields.chat_template_kwargs or {})
        voices = {"": replace(voice, chat=template)}
        answer_id = f"{'chatcmpl' if chat else 'cmpl'}-{secrets.token_hex(12)}"
        choices = list[CallInFlight]()
        for ids in [cache(partial(voice.ids, prompt)) for prompt in prompts]:  # tokenized once for all choices
            for number in range(options.n):
                sampler = CallSampler(
                    self._host, self.served, voice.stop, fields, self._inbox, number=number, arrival_s=arrival_s
                )
                session = GatewaySession(
                    secrets.token_hex(12),
                    sampler,
                    voices,
                    {"": TokenLimits(sys.maxsize)},
                    in_thread=self._in_thread,
                    answer_id=answer_id,
                )
                state.sessions.append(session)
                choices.append(session.call(body, options, None if chat else ids))
        return options, choices

    def _count_choices(self, state: RequestState, count: int) -> None:
        """Every choice counts as a request in flight. The request itself has been counted as one."""
        most = self._limits.max_requests
        if count > most:
            what = f"the answer would have {count} choices (n for each prompt); this server has at most {most} at once"
            raise ApiError(400, what, param="n")
        if self._in_flight + count - 1 > most:
            raise self._overloaded()
        state.choices = count
        self._in_flight += count - 1

    def _overloaded(self) -> ApiError:
        self._host.metrics.requests["overloaded"] += 1
        what = f"{self._in_flight} of at most {self._limits.max_requests} requests are in flight; try again later"
        return ApiError(429, what, code="rate_limit_exceeded")

    @web.middleware
    async def _one_request(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        """Limits of a request that generates, and its end: whatever happens, its call is over."""
        state = RequestState()
        _state.set(state)
        if request.method != "POST":
            return await handler(request)
        self._client(request)  # before anything is read or counted
        if self.draining or self._host.failed is not None:
            raise ApiError(503, self.draining or "the engine has failed", code="unavailable")
        if self._in_flight >= self._limits.max_requests:
            raise self._overloaded()
        self._in_flight += 1
        try:
            async with asyncio.timeout(self._limits.request_s):
                return await handler(request)
        except TimeoutError:
            if state.begun and request.transport is not None:
                request.transport.abort()  # the answer has begun, so there is no other way to end it
            raise ApiError(408, f"the request took longer than {self._limits.request_s:g} s", code="timeout") from None
        except ConnectionError:  # the client has gone away
            raise ApiError(499, "the client closed the connection") from None
        finally:
            self._in_flight -= state.choices
            await asyncio.gather(*(session.end() for session in state.sessions))

    async def _health(self, request: web.Request) -> web.Response:
        self._authenticated(request)  # it needs no key
        why = self.draining or ("the engine has failed" if self._host.failed is not None else "")
        return web.json_response({"status": why or "ok", "model": self.served.model}, status=503 if why else 200)

    async def _metrics(self, request: web.Request) -> web.Response:
        self._authenticated(request)  # it needs no key
        text = metrics.render(self._host.metrics, self._host.state())
        return web.Response(text=text, headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"})

    async def drain(self, timeout_s: float, why: str = "the server is shutting down") -> bool:
        """Accept no more requests, and wait for those in flight. Those that have not ended then get an error. Returns
        whether all have ended in time."""
        self.draining = why
        if drained := await self._wait_for_requests(timeout_s):
            return drained
        self._host.end_requests(why)
        await self._wait_for_requests(CLOSE_S)
        return drained

    async def _wait_for_requests(self, timeout_s: float) -> bool:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while self._in_flight:
                    await asyncio.sleep(0.02)
        return not self._in_flight


async def _mark_begun(request: web.Request, response: web.StreamResponse) -> None:
    del request, response
    if (state := _state.get(None)) is not None:  # None: the request was refused before
        state.begun = True


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode(errors="surrogateescape")).digest()
