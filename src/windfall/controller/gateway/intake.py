"""Receives the bodies of requests within limits: reads and parses them.

    key is valid ──▶ count the request ──▶ read ──▶ count values ──▶ parse ──▶ handle it
                          │ 429              │ 408, 413, 415, 429  │ 400      │ 400

Rules:
- The requests in flight are limited, for each client and for all clients together, until their answer has ended.
- A large body (over SMALL_BYTES, or of unknown length) is in hand from its first byte until its prompt is tokenized: at
  most one of each client, and MAX_LARGE of all. Another one waits for at most `read_s`. So small bodies never wait for
  large ones, and what is sampled for minutes holds up no other body.
- A body must arrive within `read_s`. It must not be compressed.
- The number of JSON values in a body is limited, because nothing else runs in this process while Python parses a text,
  whatever the thread. Commas and opening brackets are counted, also within texts: a text with more of them does not fit
  into the context either. Large bodies are parsed in a thread, one after the other: other requests run in between.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Hashable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from aiohttp import web

from windfall.controller.gateway.protocol import MAX_ECHO, ApiError

MIN_BODY_BYTES, MAX_BODY_BYTES = 1 << 20, 8 << 20
BYTES_PER_TOKEN = 64
"""Upper limit for the size of a body, per token of the context."""
MIN_VALUES, VALUES_PER_TOKEN = 32_768, 2
"""Upper limit for the JSON values in a body: a fixed number, and a number per token of the context."""
ID_BYTES = 6
"""Bytes of a token id in a body, with its comma. A body with a list of prompts may be full of them."""
SMALL_BYTES = 64 << 10
MAX_LARGE = 32
CLIENT_REQUESTS, ALL_REQUESTS = 128, 4096
READ_S = 30.0


class Body(NamedTuple):
    """The body of a request."""

    key: str
    """Equal for requests that are repeated."""
    fields: dict[str, Any]
    placed: Callable[[], Awaitable[None]]
    """To be called when the prompt is tokenized: the body is no longer in hand."""


@dataclass(frozen=True, kw_only=True, slots=True)
class IntakeLimits:
    body_bytes: int
    values: int
    read_s: float = READ_S
    client_requests: int = CLIENT_REQUESTS
    requests: int = ALL_REQUESTS

    @classmethod
    def for_context(cls, tokens: int, *, batches: bool = False, **more: Any) -> IntakeLimits:
        """Limits that leave room for every prompt that fits into a context of this many tokens. `batches`: a body may
        have a list of such prompts."""
        size = min(MAX_BODY_BYTES, max(MIN_BODY_BYTES, BYTES_PER_TOKEN * tokens))
        values = MIN_VALUES + VALUES_PER_TOKEN * tokens
        return cls(body_bytes=size, values=max(values, size // ID_BYTES if batches else 0), **more)


@dataclass(slots=True)
class _Client:
    requests: int = 0
    large: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held by its large body that is in hand."""


class Intake:
    def __init__(self, limits: IntakeLimits) -> None:
        self.limits = limits
        self._clients: dict[Hashable, _Client] = {}
        """Those with requests in flight."""
        self._requests = 0
        self._large = asyncio.Semaphore(MAX_LARGE)
        self._thread = ThreadPoolExecutor(1, "parsing")

    @asynccontextmanager
    async def receive(self, request: web.Request, client: Hashable) -> AsyncIterator[Body]:
        """The body of a request, which is in flight until the context ends. `client`: the sender, whose key has been
        checked. Raises ApiError."""
        own = self._clients.get(client) or _Client()
        for count, most, whose in (
            (own.requests, self.limits.client_requests, "this session"),
            (self._requests, self.limits.requests, "all sessions"),
        ):
            if count >= most:
                what = f"{count} requests of {whose} are in flight, which is the limit; try again later"
                raise ApiError(429, what, code="rate_limit_exceeded")
        self._clients[client] = own
        own.requests += 1
        self._requests += 1
        try:
            async with AsyncExitStack() as in_hand:
                key, fields = await self._receive(request, own, in_hand)
                yield Body(key, fields, in_hand.aclose)
        finally:
            own.requests -= 1
            self._requests -= 1
            if not own.requests:
                self._clients.pop(client, None)

    async def _receive(self, request: web.Request, own: _Client, in_hand: AsyncExitStack) -> tuple[str, dict[str, Any]]:
        declared, read_s = request.content_length, self.limits.read_s
        encoding = request.headers.get("Content-Encoding", "identity").strip().lower()
        if encoding != "identity":
            raise ApiError(415, f"the content encoding {encoding[:MAX_ECHO]!r} is not supported; send plain JSON")
        self._check_size(declared or 0)
        large = declared is None or declared > SMALL_BYTES
        try:
            async with asyncio.timeout(read_s):
                if large:  # first its own: a client that waits for itself takes nothing from others
                    await in_hand.enter_async_context(own.large)
                    await in_hand.enter_async_context(self._large)
        except TimeoutError:
            what = f"too many large requests are in flight; waited {read_s:g} s; try again later"
            raise ApiError(429, what, code="rate_limit_exceeded") from None
        data = bytearray()
        try:
            async with asyncio.timeout(read_s):
                async for piece in request.content.iter_any():
                    data += piece
                    self._check_size(len(data))
        except TimeoutError:
            raise ApiError(408, f"the body did not arrive within {read_s:g} s", code="timeout") from None
        if not large:
            return self._parse(request.path, data)
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._parse, request.path, data)

    def _parse(self, path: str, data: bytearray) -> tuple[str, dict[str, Any]]:
        most = self.limits.values
        if data.count(b",") + data.count(b"[") + data.count(b"{") > most:
            what = f"the body has more than {most} JSON values, which is more than the context has room for"
            raise ApiError(400, what, code="context_length_exceeded")
        try:
            fields = json.loads(data.decode("utf-8-sig"))
        except (ValueError, RecursionError) as e:
            raise ApiError(400, f"the body is not JSON: {e}") from e
        if not isinstance(fields, dict):
            raise ApiError(400, "the body is not a JSON object")
        return f"{path} {hashlib.blake2b(data).hexdigest()}", fields

    def _check_size(self, size: int) -> None:
        if size > self.limits.body_bytes:
            what = f"the body is larger than {self.limits.body_bytes} bytes, the limit of this server"
            raise ApiError(413, what, code="context_length_exceeded")
