"""The gateway's HTTP server: the OpenAI API for sessions, and the token API of vLLM.

    POST /v1/chat/completions     messages, tools; streaming or not
    POST /v1/completions          text or token ids
    POST /inference/v1/generate   token ids in, token ids out
    GET  /v1/models
    POST /v1/reward               {"reward": 0.5}: the reward of the session, if the agent reports it itself

The key of a session (Authorization: Bearer KEY) is the only thing that names it: a request reaches this session and
nothing else. Keys are looked up by their hash, so the time of a lookup says nothing about other keys. Every error is in
OpenAI's format. A canceled request does not cancel its call (session.py).
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from aiohttp import web

from windfall.envs.failures import MAX_REWARD
from windfall.gateway import protocol
from windfall.gateway.base import Sampler
from windfall.gateway.incremental_text import IncrementalText
from windfall.gateway.protocol import ApiError, CallOptions
from windfall.gateway.session import CallInFlight, GatewaySession
from windfall.models.chat import Chat
from windfall.models.history import Segment

MAX_BODY_BYTES = 64 << 20


class Gateway:
    max_body_bytes = MAX_BODY_BYTES
    write_s: float | None = None
    """Time limit for a client to take the next part of a stream (seconds). None: as long as it wants."""

    def __init__(self, sampler: Sampler, tokenizer: Any, chat: Chat | None, stop: frozenset[int]) -> None:
        """`chat`: None for a model without a chat template. `stop`: the token ids that end a turn."""
        self._sampler, self._tokenizer, self._chat, self._stop = sampler, tokenizer, chat, stop
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

    def open(self, id: str, *, max_tokens: int) -> GatewaySession:
        """Open a session. Its agent gets `session.key`."""
        session = GatewaySession(id, self._sampler, self._chat, self._decode, max_tokens=max_tokens)
        self._sessions[_hash(session.key)] = session
        return session

    async def close(self, session: GatewaySession) -> list[Segment]:
        """End a session: its key expires. Returns its segments."""
        self._sessions.pop(_hash(session.key), None)
        return await session.end()

    def _session(self, request: web.Request) -> GatewaySession:
        scheme, _, key = request.headers.get("Authorization", "").partition(" ")
        session = self._sessions.get(_hash(key.strip())) if scheme.lower() == "bearer" else None
        if session is None:
            raise ApiError(401, "this API key belongs to no open session", code="invalid_api_key")
        return session

    def _decode(self, ids: Sequence[int]) -> str:
        ids = ids[:-1] if ids and ids[-1] in self._stop else ids
        return self._decode_all(ids)

    def _decode_all(self, ids: Sequence[int]) -> str:
        """The text of all ids, also of one that ends the turn."""
        return self._tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)

    def _id(self, flight: CallInFlight) -> str:
        """The id of an answer."""
        return f"call-{flight.call.segment.index}-{len(flight.prompt)}"

    def _token_texts(self, ids: Sequence[int]) -> list[str]:
        return [self._tokenizer.decode([id], skip_special_tokens=False) for id in ids]

    # Requests.

    async def _models(self, request: web.Request) -> web.Response:
        self._session(request)
        model = {"id": self._sampler.model, "object": "model", "created": 0, "owned_by": "windfall"}
        if "model" not in request.match_info:
            return web.json_response({"object": "list", "data": [model]})
        if request.match_info["model"] != self._sampler.model:
            raise ApiError(404, f"there is no model '{request.match_info['model']}'", code="model_not_found")
        return web.json_response(model)

    async def _reward(self, request: web.Request) -> web.Response:
        session, body = self._session(request), await _json(request)
        reward = body.get("reward")
        if isinstance(reward, bool) or not isinstance(reward, int | float) or not math.isfinite(reward):
            raise ApiError(400, "reward must be a number", param="reward")
        if abs(reward) > MAX_REWARD:
            raise ApiError(400, f"the magnitude of reward must be at most {MAX_REWARD:g}", param="reward")
        session.reward = float(reward)
        return web.json_response({"reward": session.reward})

    async def _chat_completions(self, request: web.Request) -> web.StreamResponse:
        session, body = self._session(request), await _json(request)
        options = protocol.options(body, chat=True)
        flight = session.chat_call(body, options)
        if options.stream:
            return await self._stream(request, session, flight, options, chat=True)
        await flight.done()
        answer = self._whole(flight, options, "chat.completion", chat=True)
        answer["choices"][0]["message"] = {"refusal": None, **(flight.message or {})}
        return await self._deliver(request, session, flight, answer)

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        session, body = self._session(request), await _json(request)
        options = protocol.options(body, chat=False)
        prompt = body.get("prompt")
        ids = self._tokenizer.encode(prompt) if isinstance(prompt, str) and prompt else prompt
        flight = session.ids_call(body, options, protocol.prompt_ids(ids, "prompt"))
        if options.stream:
            return await self._stream(request, session, flight, options, chat=False)
        await flight.done()
        answer = self._whole(flight, options, "text_completion", chat=False)
        answer["choices"][0]["text"] = flight.text
        if options.return_token_ids:
            answer["choices"][0]["prompt_token_ids"] = answer.pop("prompt_token_ids")
        return await self._deliver(request, session, flight, answer)

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        session, body = self._session(request), await _json(request)
        given = body.get("sampling_params") or {}
        if not isinstance(given, Mapping) or body.get("stream"):
            raise ApiError(400, "sampling_params must be an object, and stream is not supported", param="stream")
        wanted = {k: given[k] for k in ("n", "max_tokens", "stop", "logprobs") if given.get(k) is not None}
        options = protocol.options({"max_tokens": None, **wanted}, chat=False)
        flight = session.ids_call(body, options, protocol.prompt_ids(body.get("token_ids"), "token_ids"))
        await flight.done()
        logprobs = protocol.chat_logprobs(self._token_texts(flight.tokens), flight.logprobs)
        choice = {"index": 0, "token_ids": flight.tokens, "finish_reason": flight.finish, "logprobs": logprobs}
        answer = {"request_id": self._id(flight), "choices": [choice], "prompt_logprobs": None}
        return await self._deliver(request, session, flight, answer)

    # Answers.

    def _whole(self, flight: CallInFlight, options: CallOptions, kind: str, *, chat: bool) -> dict[str, Any]:
        answer = protocol.envelope(kind, self._id(flight), self._sampler.model)
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

    async def _stream(
        self, request: web.Request, session: GatewaySession, flight: CallInFlight, options: CallOptions, *, chat: bool
    ) -> web.StreamResponse:
        """Send the turn in chunks. If it may have tool calls, which only its whole text shows, it is one chunk."""
        chunks = _Chunks(self, flight, options, chat=chat)
        response: web.StreamResponse | None = None
        try:
            async for count in flight.progress():
                if response is None:
                    response = await _begin_stream(request, chunks.first())
                if not flight.tools:
                    async with asyncio.timeout(self.write_s):
                        await _send(response, chunks.grown(count))
        except ApiError as e:
            if response is None:
                raise
            await _send(response, [e.body])  # the status was sent already
            await response.write_eof()
            return response
        if response is None:
            response = await _begin_stream(request, chunks.first())
        async with asyncio.timeout(self.write_s):
            await _send(response, chunks.last())
        await response.write(b"data: [DONE]\n\n")
        await response.write_eof()
        session.delivered(flight)
        return response


class _Chunks:
    """Cuts the answer of one call into chunks."""

    def __init__(self, gateway: Gateway, flight: CallInFlight, options: CallOptions, *, chat: bool) -> None:
        self._gateway, self._flight, self._options, self._chat = gateway, flight, options, chat
        self._hold = max((len(s) - 1 for s in options.stop), default=0)
        """Characters that may be the start of a stop string."""
        self._sent_text, self._sent_tokens = 0, 0
        self._certain = IncrementalText(gateway._decode_all)
        kind = "chat.completion.chunk" if chat else "text_completion"
        self._envelope = protocol.envelope(kind, gateway._id(flight), gateway._sampler.model)

    def first(self) -> list[dict[str, Any]]:
        if not self._chat:
            return []
        chunk = self._chunk({"role": "assistant", "content": ""})
        if self._options.return_token_ids:
            chunk["prompt_token_ids"] = list(self._flight.prompt)
        return [chunk]

    def grown(self, count: int) -> list[dict[str, Any]]:
        """Chunks for the first `count` tokens, as far as their text is certain."""
        tokens = self._flight.tokens
        if tokens[count - 1] in self._gateway._stop:  # the last token of a turn is not part of its text
            count -= 1
        text = self._certain.extend(tokens[:count] if count < len(tokens) else tokens)
        return self._text(text[: len(text) - self._hold], count) if not self._certain.held else []

    def last(self) -> list[dict[str, Any]]:
        flight, message = self._flight, self._flight.message or {}
        content = (message.get("content") or "") if self._chat else flight.text
        chunks = self._text(content, len(flight.tokens))
        if calls := message.get("tool_calls"):
            chunks.append(self._chunk({"tool_calls": [{"index": n, **call} for n, call in enumerate(calls)]}))
        chunks.append(self._chunk({} if self._chat else "", protocol.finish_reason(flight.finish, flight.message)))
        if self._options.include_usage:
            counts = protocol.usage(len(flight.prompt), len(flight.tokens))
            chunks.append({**self._envelope, "choices": [], "usage": counts})
        return chunks

    def _text(self, text: str, count: int) -> list[dict[str, Any]]:
        new, tokens = text[self._sent_text :], self._flight.tokens[self._sent_tokens : count]
        logprobs = self._flight.logprobs[self._sent_tokens : count]
        wants_tokens = self._options.logprobs or self._options.return_token_ids
        if not new and not (tokens and wants_tokens):
            return []
        chunk = self._chunk({"content": new} if self._chat else new)
        choice = chunk["choices"][0]
        if self._options.logprobs:
            build = protocol.chat_logprobs if self._chat else protocol.text_logprobs
            choice["logprobs"] = build(self._gateway._token_texts(tokens), logprobs)
        if self._options.return_token_ids:
            choice["token_ids"] = tokens
            if not self._chat and self._sent_tokens == 0:
                choice["prompt_token_ids"] = list(self._flight.prompt)
        self._sent_text, self._sent_tokens = self._sent_text + len(new), count
        return [chunk]

    def _chunk(self, delta: Any, finish: str | None = None) -> dict[str, Any]:
        choice = {"index": 0, "delta" if self._chat else "text": delta, "logprobs": None, "finish_reason": finish}
        return {**self._envelope, "choices": [choice]}


async def _begin_stream(request: web.Request, chunks: list[dict[str, Any]]) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
    await response.prepare(request)
    await _send(response, chunks)
    return response


async def _send(response: web.StreamResponse, chunks: list[dict[str, Any]]) -> None:
    for chunk in chunks:
        await response.write(b"data: " + json.dumps(chunk).encode() + b"\n\n")


async def _json(request: web.Request) -> dict[str, Any]:
    try:
        body = json.loads(await request.read())
    except (ValueError, RecursionError) as e:
        raise ApiError(400, f"the body is not JSON: {e}") from e
    if not isinstance(body, dict):
        raise ApiError(400, "the body is not a JSON object")
    return body


@web.middleware
async def _errors(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    """Answer every error in OpenAI's format."""
    try:
        return await handler(request)
    except ApiError as e:
        error = e
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise  # this request was canceled
        error = ApiError(401, "this session has ended", code="invalid_api_key")  # its call was
    except web.HTTPException as e:
        error = ApiError(e.status, f"{request.method} {request.path}: {e.reason}")
    return web.json_response(error.body, status=error.status)


def _hash(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()
