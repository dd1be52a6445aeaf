"""The gateway's HTTP server: the OpenAI API for sessions.

    POST /v1/chat/completions     messages, tools; streaming or not
    POST /v1/completions          text or token ids
    GET  /v1/models
    POST /v1/reward               {"reward": 0.5} or {"rewards": {"solver": 1.0, "verifier": 0.5}}: the rewards of the
                                  session, if the agent reports them itself

In a run with several policies, the field `model` of a call names the role that answers: a policy, or a policy and a
label ("player:black"). A run with one policy ignores the field, unless it is a label alone (":black").

The key of a session (Authorization: Bearer KEY) is the only thing that names it: a request reaches this session and
nothing else. Keys are looked up by their hash, so the time of a lookup says nothing about other keys. A key is checked
before the body is read; intake.py has the limits of bodies, link/listener.py those of connections without a key. Every
error is in OpenAI's format, also one that ends a stream, and the answer to what is not HTTP. A canceled request does
not cancel its call (session.py).
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import Awaitable, Callable, Coroutine, Hashable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from aiohttp import web

from windfall.controller.gateway import protocol
from windfall.controller.gateway.chunks import EventStream, TextChunks
from windfall.controller.gateway.intake import Body, Intake, IntakeLimits
from windfall.controller.gateway.protocol import MAX_ECHO, ApiError, CallOptions
from windfall.controller.gateway.session import CallInFlight, GatewaySession, TokenLimits, TurnSampler
from windfall.controller.gateway.voice import Voice
from windfall.envs.failures import MAX_REWARD, ROLE_CHARS
from windfall.link.listener import Listener
from windfall.models.history import PlacedCall
from windfall.types import policy_of

IDLE_S = 75.0
"""Seconds that a connection may be open between two requests."""
HEAD_S = 20.0
"""Seconds that a connection may be open before its first request has a valid key."""
MAX_WITHOUT_KEY = 1024
"""Largest number of such connections."""
CLOSE_S = 1.0
"""Seconds that handlers get to end when the gateway stops listening."""
MAX_CONNECTIONS = 256
"""Largest number of connections of one session."""
MAX_IGNORED = 64
"""Largest number of fields of calls that are named because they have no effect."""
LINGER_S = 5.0
"""Seconds to read and drop the rest of a body that was refused, so that its client gets to read the answer."""

_LOG = logging.getLogger(__name__)


class Gateway:
    write_s: float | None = None
    """Time limit for a client to take the next part of a stream (seconds). None: as long as it wants."""

    def __init__(self, sampler: TurnSampler, voices: Mapping[str, Voice], limits: IntakeLimits | None = None) -> None:
        """`voices`: by policy; the first one answers calls that name none. `limits`: those of bodies; None: as the
        contexts need them."""
        self._sampler = sampler
        self.voices = voices
        self._thread = ThreadPoolExecutor(1, "tokenizing")
        """Renders and tokenizes prompts, so that a long one does not hold up the event loop."""
        self._sessions: dict[str, GatewaySession] = {}
        """By the hash of its key."""
        self.on_ignored: Callable[[str], None] = lambda field: None
        """Called once with each field of calls that has no effect."""
        self._ignored: set[str] = set()
        self.intake = Intake(limits or IntakeLimits.for_context(max(voice.context for voice in voices.values())))
        self._listener: Listener | None = None
        self._runner: web.AppRunner | None = None
        self.app = web.Application(
            middlewares=[_errors, *self._middlewares()], client_max_size=self.intake.limits.body_bytes
        )
        self._add_routes()

    async def listen(
        self, host: str, port: int, fix: str, *, idle_s: float = IDLE_S, head_s: float = HEAD_S, **options: Any
    ) -> int:
        """Listen until `stop_listening`. Returns the port: 0 selects a free one. Raises WindfallError with `fix`.
        `options`: those of aiohttp's runner."""
        self._listener = Listener(max_unauthenticated=MAX_WITHOUT_KEY, auth_timeout_s=head_s)
        options = {"keepalive_timeout": idle_s, "lingering_time": LINGER_S, "shutdown_timeout": CLOSE_S, **options}
        self._runner, port = await self._listener.serve(self.app, host, port, None, fix, answer=_not_http, **options)
        return port

    async def stop_listening(self) -> None:
        if self._listener is not None and self._runner is not None:
            self._listener.close()
            await self._runner.cleanup()

    def _authenticated(self, request: web.Request) -> None:
        """The request has a valid key, or needs none."""
        if self._listener is not None:
            self._listener.authenticated(request.transport)

    def _middlewares(self) -> Sequence[Any]:
        """What handles a request before its body is read."""
        return ()

    def _add_routes(self) -> None:
        self._add_completions()
        self._add_post("/v1/reward", self._reward)

    def _add_completions(self) -> None:
        self._add_post("/v1/chat/completions", self._complete)
        self._add_post("/v1/completions", self._complete)
        self.app.router.add_get("/v1/models", self._models)
        self.app.router.add_get("/v1/models/{model:.+}", self._models)

    def _add_post(self, path: str, handle: Callable[[web.Request, Body], Awaitable[web.StreamResponse]]) -> None:
        """`handle` gets requests that have a valid key, with their bodies."""

        async def receive(request: web.Request) -> web.StreamResponse:
            client = self._client(request)
            try:
                async with self.intake.receive(request, client) as body:
                    return await handle(request, body)
            except ApiError as e:
                if e.code == "context_length_exceeded" and isinstance(client, GatewaySession):
                    client.ran_out = True
                raise

        self.app.router.add_post(path, receive)

    # Sessions, for the owner of the gateway.

    def open(self, id: str, limits: Mapping[str, TokenLimits]) -> GatewaySession:
        """Open a session. Its agent gets `session.key`. `limits`: by policy."""
        session = GatewaySession(id, self._sampler, self.voices, limits, in_thread=self._in_thread)
        self._sessions[_hash(session.key)] = session
        return session

    async def close(self, session: GatewaySession) -> None:
        """End a session: its key expires."""
        self.expire(session)
        await session.end()

    def expire(self, session: GatewaySession, why: str = "the agent ended") -> None:
        """The key of a session expires, and it accepts no more calls. Those in flight go on until `close`."""
        session.why_ended = session.why_ended or why
        self._sessions.pop(_hash(session.key), None)
        session.ended = True

    def _client(self, request: web.Request) -> Hashable:
        """Who sends a request, for limits. Raises ApiError if its key is wrong."""
        return self._session(request)

    def _session(self, request: web.Request) -> GatewaySession:
        scheme, _, key = request.headers.get("Authorization", "").partition(" ")
        session = self._sessions.get(_hash(key.strip())) if scheme.lower() == "bearer" else None
        if session is None:
            raise ApiError(401, "this API key belongs to no open session", code="invalid_api_key")
        if not session.connected(request.transport, MAX_CONNECTIONS):
            what = f"this session has more than {MAX_CONNECTIONS} connections; use them for several requests"
            raise ApiError(429, what, code="rate_limit_exceeded")
        self._authenticated(request)
        return session

    async def _in_thread(self, place: Callable[[], PlacedCall]) -> PlacedCall:
        return await asyncio.get_running_loop().run_in_executor(self._thread, place)

    # Requests.

    async def _models(self, request: web.Request) -> web.Response:
        self._client(request)
        names = [policy or self._sampler.model for policy in self.voices]
        models = [{"id": name, "object": "model", "created": 0, "owned_by": "windfall"} for name in names]
        if "model" not in request.match_info:
            return web.json_response({"object": "list", "data": models})
        if request.match_info["model"] not in names:
            raise ApiError(404, f"there is no model '{request.match_info['model']}'", code="model_not_found")
        return web.json_response(models[names.index(request.match_info["model"])])

    def _role(self, model: Any) -> str:
        """The role that a call asks for with its field `model`."""
        if not isinstance(model, str) or not model:
            return next(iter(self.voices))
        if policy_of(model) in self.voices and len(model) <= ROLE_CHARS:
            return model
        if "" in self.voices:
            return ""
        what = f"there is no model {model[:MAX_ECHO]!r}; the policies of this run are: {', '.join(self.voices)}"
        raise ApiError(404, what, code="model_not_found", param="model")

    def _model(self, flight: CallInFlight) -> str:
        """The model in answers."""
        return flight.role or self._sampler.model

    async def _reward(self, request: web.Request, body: Body) -> web.Response:
        session = self._session(request)
        session.reward, session.rewards = protocol.reward(body.fields, MAX_REWARD)
        return web.json_response({"reward": session.reward} | ({"rewards": session.rewards} if session.rewards else {}))

    async def _complete(self, request: web.Request, body: Body) -> web.StreamResponse:
        """Answer once all calls are known to be valid. Raises the error of one that is not."""
        chat = request.path.endswith("/chat/completions")
        options, choices = self._start(request, body, chat=chat)
        await asyncio.gather(*(choice.accepted() for choice in choices))
        return await (self._stream if options.stream else self._send)(request, choices, options, chat=chat)

    def _start(self, request: web.Request, body: Body, *, chat: bool) -> tuple[CallOptions, list[CallInFlight]]:
        """Start the calls whose answers are the choices of one answer."""
        session, options = self._session(request), protocol.options(body.fields, chat=chat)
        for field in sorted(protocol.without_effect(body.fields) - self._ignored):
            if len(self._ignored) < MAX_IGNORED:
                self._ignored.add(field)
                self.on_ignored(field)
        prompts = [""] if chat else protocol.prompts(body.fields.get("prompt"))
        role = self._role(body.fields.get("model"))
        ids = None if chat else partial(self.voices[policy_of(role)].ids, prompts[0])
        return options, [session.call(body, options, ids, role, request.transport)]

    # Answers.

    async def _send(
        self, request: web.Request, choices: Sequence[CallInFlight], options: CallOptions, *, chat: bool
    ) -> web.StreamResponse:
        """Send the whole answer. Only if that works, its calls are over: otherwise the client may ask for it again."""
        await asyncio.gather(*(choice.done() for choice in choices))
        kind, first = "chat.completion" if chat else "text_completion", choices[0]
        answer = protocol.envelope(kind, first.id, self._model(first))
        if chat and options.return_token_ids:
            answer["prompt_token_ids"] = list(first.prompt)
        answer["choices"] = [self._choice(n, flight, options, chat=chat) for n, flight in enumerate(choices)]
        answer["usage"] = _usage(choices, options.n)
        response = web.json_response(answer)
        await response.prepare(request)
        await response.write_eof()
        for flight in choices:
            flight.session.delivered(flight)
        return response

    def _choice(self, index: int, flight: CallInFlight, options: CallOptions, *, chat: bool) -> dict[str, Any]:
        reason = protocol.finish_reason(flight.finish, flight.message)
        choice: dict[str, Any] = {"index": index, "finish_reason": reason, "logprobs": None}
        if options.logprobs:
            build = protocol.chat_logprobs if chat else protocol.text_logprobs
            choice["logprobs"] = build(flight.voice.token_texts(flight.tokens), flight.logprobs)
        if options.return_token_ids:
            choice["token_ids"] = flight.tokens
            if not chat:
                choice["prompt_token_ids"] = list(flight.prompt)
        if chat:
            choice["message"] = {"refusal": None, **(flight.message or {})}
        else:
            choice["text"] = flight.text
        return choice

    async def _stream(
        self, request: web.Request, choices: Sequence[CallInFlight], options: CallOptions, *, chat: bool
    ) -> web.StreamResponse:
        """Send the choices of calls that are known to be valid in chunks, as they come."""
        stream = EventStream(request, self.write_s)
        chunks = [
            TextChunks(flight, options, chat=chat, model=self._model(flight), index=n)
            for n, flight in enumerate(choices)
        ]
        try:
            await _together([_send_choice(stream, flight, own) for flight, own in zip(choices, chunks, strict=True)])
            for flight in choices:
                flight.session.delivered(flight)
            await stream.send(chunks[0].usage(_usage(choices, options.n)))
        except TimeoutError:  # a client that does not read would not read an error either
            raise
        except (Exception, asyncio.CancelledError) as e:  # whatever it is, the stream must say that it failed
            if not stream.begun:
                raise
            await stream.send([_api_error(request, e).body])
            return await stream.end()
        return await stream.end(b"data: [DONE]\n\n")


async def _send_choice(stream: EventStream, flight: CallInFlight, chunks: TextChunks) -> None:
    """Send one choice. If it may have tool calls, which only its whole text shows, it is one chunk."""
    begun = False
    async for count in flight.progress():
        if not begun:
            begun = True
            await stream.send(chunks.first())
        if not flight.tools:
            await stream.send(chunks.grown(count))
    await stream.send([*([] if begun else chunks.first()), *chunks.last()])


async def _together(coroutines: Sequence[Coroutine[Any, Any, None]]) -> None:
    """Run coroutines to their end. The first error ends all of them."""
    tasks = [asyncio.create_task(coroutine) for coroutine in coroutines]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _usage(choices: Sequence[CallInFlight], n: int) -> dict[str, int]:
    """The tokens of an answer with `n` choices for each prompt: a prompt counts once."""
    prompts = sum(len(flight.prompt) for flight in choices[::n])
    return protocol.usage(prompts, sum(len(flight.tokens) for flight in choices))


@web.middleware
async def _errors(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    """Answer every error in OpenAI's format."""
    try:
        return await handler(request)
    except (Exception, asyncio.CancelledError) as e:  # a client must get an answer even if there is a bug
        error = _api_error(request, e)
    response = web.json_response(error.body, status=error.status)
    # A client must not use a connection again whose body was not read to its end, or that is one too many.
    if error.status == 429 or not request.content.is_eof():
        response.force_close()
    return response


def _api_error(request: web.Request, error: BaseException) -> ApiError:
    """The answer to an error of a handler. Raises the error again if this request was canceled."""
    match error:
        case ApiError():
            return error
        case asyncio.CancelledError():
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise error
            # The call was canceled, not this request: calls are canceled when their session ends.
            return ApiError(401, "this session has ended", code="invalid_api_key")
        case web.RequestPayloadError():  # its length or chunks are wrong
            return ApiError(400, f"the body cannot be read: {error}")
        case web.HTTPException():
            return ApiError(error.status, f"{request.method} {request.path}: {error.reason}")
        case ConnectionError():  # no client is left to read this
            return ApiError(499, "the client has closed the connection")
        case _:
            _LOG.error("%s %s failed", request.method, request.path, exc_info=error)
            return ApiError(500, f"{request.method} {request.path}: {type(error).__name__}: {error}")


def _not_http(status: int, why: str) -> web.Response:
    """The answer to a request that aiohttp cannot read."""
    return web.json_response(ApiError(status, f"the request is not HTTP: {why}").body, status=status)


def _hash(key: str) -> str:
    return hashlib.sha256(key.encode(errors="surrogateescape")).hexdigest()
