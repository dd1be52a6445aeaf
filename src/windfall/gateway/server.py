"""The gateway's HTTP server: the OpenAI API for sessions, and the token API of vLLM.

    POST /v1/chat/completions     messages, tools; streaming or not
    POST /v1/completions          text or token ids
    POST /inference/v1/generate   token ids in, token ids out
    GET  /v1/models
    POST /v1/reward               {"reward": 0.5}: the reward of the session, if the agent reports it itself

The key of a session (Authorization: Bearer KEY) is the only thing that names it: a request reaches this session and
nothing else. Keys are looked up by their hash, so the time of a lookup says nothing about other keys. Every error is in
OpenAI's format, also one that ends a stream. A canceled request does not cancel its call (session.py).
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from aiohttp import web

from windfall.envs.failures import MAX_REWARD
from windfall.gateway import protocol
from windfall.gateway.base import Sampler
from windfall.gateway.chunks import IdChunks, TextChunks
from windfall.gateway.protocol import ApiError, CallOptions
from windfall.gateway.session import CallInFlight, GatewaySession
from windfall.models.chat import Chat, check_length, most_chars
from windfall.models.history import Call, Segment

MAX_BODY_BYTES = 8 << 20

_LOG = logging.getLogger(__name__)


class Gateway:
    max_body_bytes = MAX_BODY_BYTES
    write_s: float | None = None
    """Time limit for a client to take the next part of a stream (seconds). None: as long as it wants."""

    def __init__(self, sampler: Sampler, tokenizer: Any, chat: Chat | None, stop: frozenset[int]) -> None:
        """`chat`: None for a model without a chat template. `stop`: the token ids that end a turn."""
        self._sampler, self._tokenizer, self._chat, self._stop = sampler, tokenizer, chat, stop
        self._max_chars = most_chars(tokenizer, sampler.context)
        if chat is not None:
            chat.max_chars = self._max_chars
        self._thread = ThreadPoolExecutor(1, "tokenizing")
        """Renders and tokenizes prompts, so that a long one does not hold up the event loop."""
        self._sessions: dict[str, GatewaySession] = {}
        """By the hash of its key."""
        self.app = web.Application(client_max_size=self.max_body_bytes, middlewares=[_errors])
        self._add_routes()

    def _add_routes(self) -> None:
        self.app.router.add_post("/v1/chat/completions", self._chat_completions)
        self.app.router.add_post("/v1/completions", self._completions)
        self.app.router.add_post("/inference/v1/generate", self._generate)
        self.app.router.add_post("/v1/reward", self._reward)
        self.app.router.add_get("/v1/models", self._models)
        self.app.router.add_get("/v1/models/{model:.+}", self._models)

    # Sessions, for the owner of the gateway.

    def open(self, id: str, *, max_tokens: int, turn_tokens: int = 0) -> GatewaySession:
        """Open a session. Its agent gets `session.key`. `max_tokens`: upper limit for the sampled tokens of all turns
        together. `turn_tokens`: for those of one turn; 0: none."""
        session = GatewaySession(
            id, self._sampler, self._chat, self._decode, in_thread=self._in_thread, max_tokens=max_tokens,
            turn_tokens=turn_tokens,
        )  # fmt: skip
        self._sessions[_hash(session.key)] = session
        return session

    async def close(self, session: GatewaySession) -> list[Segment]:
        """End a session: its key expires. Returns its segments."""
        self.expire(session)
        return await session.end()

    def expire(self, session: GatewaySession, why: str = "the agent ended") -> None:
        """The key of a session expires, and it accepts no more calls. Those in flight go on until `close`."""
        session.why_ended = session.why_ended or why
        self._sessions.pop(_hash(session.key), None)
        session.ended = True

    def _session(self, request: web.Request) -> GatewaySession:
        scheme, _, key = request.headers.get("Authorization", "").partition(" ")
        session = self._sessions.get(_hash(key.strip())) if scheme.lower() == "bearer" else None
        if session is None:
            raise ApiError(401, "this API key belongs to no open session", code="invalid_api_key")
        return session

    def _decode(self, ids: Sequence[int]) -> str:
        ids = ids[:-1] if ids and ids[-1] in self._stop else ids
        return self._tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)

    def _token_texts(self, ids: Sequence[int]) -> list[str]:
        return [self._tokenizer.decode([id], skip_special_tokens=False) for id in ids]

    async def _in_thread(self, place: Callable[[], Call]) -> Call:
        return await asyncio.get_running_loop().run_in_executor(self._thread, place)

    def _encode(self, text: str) -> list[int]:
        check_length(text, self._max_chars)
        return self._tokenizer.encode(text)

    # Requests.

    async def _open_call(self, request: web.Request) -> tuple[GatewaySession, str, dict[str, Any]]:
        """The session of a request, the key of its call (equal for requests that are repeated), and its body."""
        session, (key, body) = self._session(request), await _json(request)
        return session, key, body

    async def _models(self, request: web.Request) -> web.Response:
        self._session(request)
        model = {"id": self._sampler.model, "object": "model", "created": 0, "owned_by": "windfall"}
        if "model" not in request.match_info:
            return web.json_response({"object": "list", "data": [model]})
        if request.match_info["model"] != self._sampler.model:
            raise ApiError(404, f"there is no model '{request.match_info['model']}'", code="model_not_found")
        return web.json_response(model)

    async def _reward(self, request: web.Request) -> web.Response:
        session, (_, body) = self._session(request), await _json(request)
        session.reward = protocol.reward(body, MAX_REWARD)
        return web.json_response({"reward": session.reward})

    async def _chat_completions(self, request: web.Request) -> web.StreamResponse:
        session, key, body = await self._open_call(request)
        options = protocol.options(body, chat=True)
        flight = session.chat_call(key, body, options)
        if options.stream:
            return await self._stream(request, session, flight, self._text_chunks(flight, options, chat=True))
        await flight.done()
        answer = self._whole(flight, options, "chat.completion", chat=True)
        answer["choices"][0]["message"] = {"refusal": None, **(flight.message or {})}
        return await self._deliver(request, session, flight, answer)

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        session, key, body = await self._open_call(request)
        options, prompt = protocol.options(body, chat=False), protocol.one_prompt(body.get("prompt"))
        flight = session.ids_call(key, options, lambda: self._encode(prompt) if isinstance(prompt, str) else prompt)
        if options.stream:
            return await self._stream(request, session, flight, self._text_chunks(flight, options, chat=False))
        await flight.done()
        answer = self._whole(flight, options, "text_completion", chat=False)
        answer["choices"][0]["text"] = flight.text
        if options.return_token_ids:
            answer["choices"][0]["prompt_token_ids"] = answer.pop("prompt_token_ids")
        return await self._deliver(request, session, flight, answer)

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        session, key, body = await self._open_call(request)
        given = body.get("sampling_params") or {}
        if not isinstance(given, Mapping):
            raise ApiError(400, "sampling_params must be an object", param="sampling_params")
        wanted = {k: given[k] for k in ("n", "max_tokens", "stop", "logprobs") if given.get(k) is not None}
        wanted |= {k: body[k] for k in ("stream", "stream_options") if k in body}
        options = protocol.options({"max_tokens": None, **wanted}, chat=False)
        ids = protocol.prompt_ids(body.get("token_ids"), "token_ids")
        flight = session.ids_call(key, options, lambda: ids)
        if options.stream:
            return await self._stream(request, session, flight, IdChunks(flight, options, self._token_texts))
        await flight.done()
        logprobs = protocol.chat_logprobs(self._token_texts(flight.tokens), flight.logprobs)
        choice = {"index": 0, "token_ids": flight.tokens, "finish_reason": flight.finish, "logprobs": logprobs}
        answer = {"request_id": flight.id, "choices": [choice], "prompt_logprobs": None}
        return await self._deliver(request, session, flight, answer)

    # Answers.

    def _whole(self, flight: CallInFlight, options: CallOptions, kind: str, *, chat: bool) -> dict[str, Any]:
        answer = protocol.envelope(kind, flight.id, self._sampler.model)
        choice: dict[str, Any] = {"index": 0, "finish_reason": protocol.finish_reason(flight.finish, flight.message)}
        choice["logprobs"] = None
        if options.logprobs:
            build = protocol.chat_logprobs if chat else protocol.text_logprobs
            choice["logprobs"] = build(self._token_texts(flight.tokens), flight.logprobs)
        if options.return_token_ids:
            choice["token_ids"], answer["prompt_token_ids"] = flight.tokens, list(flight.prompt)
        answer["choices"] = [choice]
        answer["usage"] = protocol.usage(len(flight.prompt), len(flight.tokens))
        return answer

    async def _deliver(
        self, request: web.Request, session: GatewaySession, flight: CallInFlight, answer: dict[str, Any]
    ) -> web.StreamResponse:
        """Send the answer. Only if that works, the call is over: otherwise the client may ask for it again."""
        response = web.json_response(answer)
        await response.prepare(request)
        await response.write_eof()
        session.delivered(flight)
        return response

    def _text_chunks(self, flight: CallInFlight, options: CallOptions, *, chat: bool) -> TextChunks:
        return TextChunks(
            flight, options, chat=chat, model=self._sampler.model, decode=self._decode, token_texts=self._token_texts
        )

    async def _stream(
        self, request: web.Request, session: GatewaySession, flight: CallInFlight, chunks: TextChunks | IdChunks
    ) -> web.StreamResponse:
        """Send the turn in chunks. If it may have tool calls, which only its whole text shows, it is one chunk."""
        response: web.StreamResponse | None = None
        try:
            async for count in flight.progress():
                if response is None:
                    response = await _begin_stream(request, chunks.first())
                if not flight.tools:
                    await self._write(response, chunks.grown(count))
                    flight.sent = max(flight.sent, chunks.sent)
            if response is None:
                response = await _begin_stream(request, chunks.first())
            await self._write(response, chunks.last())
        except TimeoutError:  # a client that does not read would not read an error either
            raise
        except (Exception, asyncio.CancelledError) as e:  # whatever it is, the stream must say that it failed
            if response is None:
                raise
            await _send(response, [_api_error(request, e).body])
        else:
            session.delivered(flight)
            await response.write(b"data: [DONE]\n\n")
        await response.write_eof()
        return response

    async def _write(self, response: web.StreamResponse, chunks: list[dict[str, Any]]) -> None:
        async with asyncio.timeout(self.write_s):
            await _send(response, chunks)


async def _begin_stream(request: web.Request, chunks: list[dict[str, Any]]) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
    await response.prepare(request)
    await _send(response, chunks)
    return response


async def _send(response: web.StreamResponse, chunks: list[dict[str, Any]]) -> None:
    for chunk in chunks:
        await response.write(b"data: " + json.dumps(chunk).encode() + b"\n\n")


async def _json(request: web.Request) -> tuple[str, dict[str, Any]]:
    """The body of a request, and a key that is equal for requests that are repeated."""
    data = await request.read()
    try:
        body = json.loads(data)
    except (ValueError, RecursionError) as e:
        raise ApiError(400, f"the body is not JSON: {e}") from e
    if not isinstance(body, dict):
        raise ApiError(400, "the body is not a JSON object")
    return f"{request.path} {hashlib.blake2b(data).hexdigest()}", body


@web.middleware
async def _errors(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    """Answer every error in OpenAI's format."""
    try:
        return await handler(request)
    except (Exception, asyncio.CancelledError) as e:  # a client must get an answer even if there is a bug
        error = _api_error(request, e)
    return web.json_response(error.body, status=error.status)


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
        case web.HTTPException():
            return ApiError(error.status, f"{request.method} {request.path}: {error.reason}")
        case ConnectionError():  # no client is left to read this
            return ApiError(499, "the client has closed the connection")
        case _:
            _LOG.error("%s %s failed", request.method, request.path, exc_info=error)
            return ApiError(500, f"{request.method} {request.path}: {type(error).__name__}: {error}")


def _hash(key: str) -> str:
    return hashlib.sha256(key.encode(errors="surrogateescape")).hexdigest()
