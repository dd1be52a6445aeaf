"""The HTTP server of `windfall serve`: the OpenAI API, health and metrics.

    POST /v1/chat/completions     messages, tools; streaming or not
    POST /v1/completions          text or token ids
    GET  /v1/models
    GET  /health                  200, or 503 while the server drains or after its engine has failed
    GET  /metrics                 for Prometheus

It is the gateway (gateway/server.py) with a session of one call for every request: the protocol, streams and tool calls
are the gateway's. Different from the gateway: a request decides how its tokens are sampled, and a client that goes away
cancels its request.

Limits: `max_body_bytes` of a body, `max_requests` in flight, waiting or running (429 beyond it), `read_s` seconds for a
client to send its body, `write_s` seconds to take the next part of a stream, and `request_s` seconds from the first
byte of a request to the last byte of its answer. A client that is too slow is cut off, and its request is canceled. A
client without a valid key is refused before its body is read, so it occupies none of the `max_requests`. A connection
without a whole request for `IDLE_S` is closed (`runner`).
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import secrets
import sys
from collections.abc import Awaitable, Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from aiohttp import web

from windfall.errors import WindfallError
from windfall.gateway.base import Progress, SampledTurn, TurnRequest
from windfall.gateway.protocol import ApiError
from windfall.gateway.server import Gateway
from windfall.gateway.session import GatewaySession
from windfall.models.chat import Chat
from windfall.serve import metrics, sampling_options
from windfall.serve.host import Host
from windfall.serve.sampling_options import SamplingOptions
from windfall.types import Chunk, Finish, Request

IDLE_S = 75.0
"""Seconds that a connection may be open between two requests, or before the head of its first one is complete."""
CLOSE_S = 1.0
"""Seconds that handlers get to end after the drain."""
MIN_BODY_BYTES, MAX_BODY_BYTES = 1 << 20, 8 << 20
BYTES_PER_TOKEN = 64
"""Upper limit for the size of a body, per token of the context. Parsing holds up all streams, about 10 ms per MiB."""
MAX_ECHO = 100
"""Characters of a client's text that an error repeats at most."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ServedModel:
    model: str
    """Name of the model in the API."""
    context: int
    """Largest number of tokens of prompt and answer together."""
    vocabulary: int


@dataclass(frozen=True, kw_only=True, slots=True)
class ServeLimits:
    api_key: str = ""
    """What clients must send; empty: nothing."""
    max_requests: int = 256
    request_s: float = 600.0
    read_s: float = 30.0
    write_s: float = 30.0


class _CallSampler:
    """Samples one call on the host's serving engine."""

    def __init__(self, host: Host, served: ServedModel, stop: frozenset[int]) -> None:
        self.model, self.context, self.vocabulary = served.model, served.context, served.vocabulary
        self._host, self._stop = host, stop
        self.options: SamplingOptions | None = None
        self.arrival_s: float | None = None
        """When the body of the request had arrived, by the host's clock."""
        self.over = False
        """The client has its answer, or has gone away."""

    def read(self, body: Mapping[str, Any]) -> None:
        """Check the fields of a request that concern sampling."""
        model = body.get("model")
        if model is not None and not isinstance(model, str):
            raise ApiError(400, "model must be text", param="model")
        if model not in (None, self.model):
            what = f"there is no model {model[:MAX_ECHO]!r}; this is {self.model!r}"
            raise ApiError(404, what, code="model_not_found", param="model")
        self.options = sampling_options.read(body)

    def retract(self, request: TurnRequest, keep: int) -> None:
        """Nothing is kept of a call that was canceled: `sample` has canceled its request."""
        del request, keep

    async def sample(self, request: TurnRequest, progress: Progress) -> SampledTurn:
        assert self.options is not None
        loop, arrived = asyncio.get_running_loop(), asyncio.Queue[Chunk | WindfallError]()

        def listen(what: Chunk | WindfallError) -> None:
            with contextlib.suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(arrived.put_nowait, what)

        seed = secrets.randbits(63) if self.options.seed is None else self.options.seed
        stop = frozenset() if self.options.ignore_eos else self._stop
        asked = Request(
            id=request.session, prompt=request.prompt, seed=seed, max_tokens=request.max_tokens,
            sampling=self.options.sampling, stop=stop,
        )  # fmt: skip
        self._host.submit(asked, listen, arrival_s=self.arrival_s)
        finish: Finish | None = None
        tokens, logprobs, known = list[int](), list[float](), 0
        try:
            while finish is None:
                what = await arrived.get()
                if isinstance(what, WindfallError):
                    raise what
                tokens += what.tokens
                logprobs += what.logprobs
                finish = what.finish
                if finish is None and not arrived.empty():
                    continue  # report several tokens at once
                kept = progress(tokens[known:], logprobs[known:])
                known = len(tokens)
                if kept is not None:  # a stop string was found, or the session ends
                    del tokens[kept:], logprobs[kept:]
                    if finish is None and not self.over:
                        self._host.cancel(asked.id, "stop")
                    finish = "stop"
        finally:
            self._host.cancel(asked.id)  # no effect on a request that has ended
        return SampledTurn(tokens=tuple(tokens), logprobs=tuple(logprobs), finish=finish)


@dataclass
class _RequestState:
    session: GatewaySession | None = None
    sampler: _CallSampler | None = None
    arrival_s: float | None = None
    begun: bool = False
    """The first bytes of the answer were sent."""


_state: ContextVar[_RequestState] = ContextVar("request")
"""State of the request that the present task handles."""


class ServeApi(Gateway):
    def __init__(
        self, host: Host, tokenizer: Any, chat: Chat | None, stop: frozenset[int], *, served: ServedModel,
        limits: ServeLimits | None = None,
    ) -> None:  # fmt: skip
        self._host, self.served, self._limits = host, served, limits or ServeLimits()
        self._in_flight = 0
        self.write_s = self._limits.write_s
        self.max_body_bytes = min(MAX_BODY_BYTES, max(MIN_BODY_BYTES, BYTES_PER_TOKEN * served.context))
        self.draining = ""
        """Why no request is accepted any more; empty while they are."""
        super().__init__(_CallSampler(host, served, stop), tokenizer, chat, stop)
        self.app.middlewares.append(self._one_request)
        self.app.on_response_prepare.append(_mark_begun)

    def runner(self, idle_s: float = IDLE_S) -> web.AppRunner:
        """What listens for this application."""
        return web.AppRunner(
            self.app, handler_cancellation=True, access_log=None, keepalive_timeout=idle_s, shutdown_timeout=CLOSE_S
        )

    def _add_routes(self) -> None:
        add = self.app.router
        add.add_post("/v1/chat/completions", self._chat_completions)
        add.add_post("/v1/completions", self._completions)
        add.add_get("/v1/models", self._models)
        add.add_get("/v1/models/{model:.+}", self._models)
        add.add_get("/health", self._health)
        add.add_get("/metrics", self._metrics)

    @property
    def has_key(self) -> bool:
        """Whether clients need a key."""
        return bool(self._limits.api_key)

    def _check_key(self, request: web.Request) -> None:
        scheme, _, key = request.headers.get("Authorization", "").partition(" ")
        wanted = self._limits.api_key
        if wanted and not (scheme.lower() == "bearer" and hmac.compare_digest(_digest(key.strip()), _digest(wanted))):
            raise ApiError(401, "the API key is missing or wrong", code="invalid_api_key")

    def _session(self, request: web.Request) -> GatewaySession:
        self._check_key(request)
        state, sampler = _state.get(), _CallSampler(self._host, self.served, self._stop)
        sampler.arrival_s = state.arrival_s
        session = GatewaySession(
            secrets.token_hex(12), sampler, self._chat, self._decode, in_thread=self._in_thread, max_tokens=sys.maxsize
        )
        session.answer_id = f"{'chatcmpl' if request.path.endswith('/chat/completions') else 'cmpl'}-{session.id}"
        state.session, state.sampler = session, sampler
        return session

    async def _open_call(self, request: web.Request) -> tuple[GatewaySession, str, dict[str, Any]]:
        session, key, body = await super()._open_call(request)
        sampler = _state.get().sampler
        assert sampler is not None
        sampler.read(body)
        return session, key, body

    @web.middleware
    async def _one_request(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        """Limits of a request that generates, and its end: whatever happens, its call is over."""
        state = _RequestState()
        _state.set(state)
        if request.method != "POST":
            return await handler(request)
        self._check_key(request)  # before anything is read or counted
        if self.draining or self._host.failed is not None:
            raise ApiError(503, self.draining or "the engine has failed", code="unavailable")
        if self._in_flight >= self._limits.max_requests:
            self._host.metrics.ended("overloaded")
            what = f"{self._limits.max_requests} requests are in flight; try again later"
            raise ApiError(429, what, code="rate_limit_exceeded")
        self._in_flight += 1
        try:
            await self._read_body(request)
            state.arrival_s = self._host.now_s()  # tokenizing counts, the client's upload does not
            async with asyncio.timeout(self._limits.request_s):
                return await handler(request)
        except TimeoutError:
            if state.begun and request.transport is not None:
                request.transport.abort()  # the answer has begun, so there is no other way to end it
            raise ApiError(408, f"the request took longer than {self._limits.request_s:g} s", code="timeout") from None
        except ConnectionError:  # the client has gone away
            raise ApiError(499, "the client closed the connection") from None
        finally:
            self._in_flight -= 1
            if state.sampler is not None:
                state.sampler.over = True
            if state.session is not None:
                await state.session.end()

    async def _read_body(self, request: web.Request) -> None:
        try:
            async with asyncio.timeout(self._limits.read_s):
                await request.read()  # aiohttp keeps it for the handler
        except TimeoutError:
            what = f"the body did not arrive within {self._limits.read_s:g} s"
            raise ApiError(408, what, code="timeout") from None

    async def _health(self, request: web.Request) -> web.Response:
        del request
        why = self.draining or ("the engine has failed" if self._host.failed is not None else "")
        return web.json_response({"status": why or "ok", "model": self.served.model}, status=503 if why else 200)

    async def _metrics(self, request: web.Request) -> web.Response:
        del request
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
