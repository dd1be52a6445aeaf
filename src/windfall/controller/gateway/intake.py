"""Receives the bodies of requests within limits: reads and parses them.

    key is valid ──▶ count the request and its bytes ──▶ read ──▶ count values ──▶ parse ──▶ handle it
                          │ 413, 415, 429                  │ 408, 413          │ 400      │ 400

Rules:
- The requests in flight and the bytes of their bodies are limited, for each client and for all clients together, until
  their answer has ended. A body of unknown length counts as one of the largest size.
- A body must arrive within `read_s`. It must not be compressed.
- The number of JSON values in a body is limited, because nothing else runs in this process while a text is parsed.
  Commas and opening brackets are counted, also within texts: a text with more of them does not fit into the context
  either.
"""

from __future__ import annotations

import asyncio
import codecs
import hashlib
from collections import Counter
from collections.abc import AsyncIterator, Hashable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec
from aiohttp import web

from windfall.controller.gateway.protocol import MAX_ECHO, ApiError

MIN_BODY_BYTES, MAX_BODY_BYTES = 1 << 20, 8 << 20
BYTES_PER_TOKEN = 64
"""Upper limit for the size of a body, per token of the context."""
MIN_VALUES, VALUES_PER_TOKEN = 32_768, 2
"""Upper limit for the JSON values in a body: a fixed number, and a number per token of the context."""
ID_BYTES = 6
"""Bytes of a token id in a body, with its comma. A body with a list of prompts may be full of them."""
CLIENT_REQUESTS, ALL_REQUESTS = 128, 4096
CLIENT_BYTES, ALL_BYTES = 64 << 20, 512 << 20
READ_S = 30.0
_ALL = object()
"""Stands for all clients together."""


class Body(NamedTuple):
    """The body of a request."""

    key: str
    """Equal for requests that are repeated."""
    fields: dict[str, Any]


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


class Intake:
    def __init__(self, limits: IntakeLimits) -> None:
        self.limits = limits
        self.requests: Counter[Hashable] = Counter()
        """By client, and for _ALL: the requests in flight."""
        self.bytes: Counter[Hashable] = Counter()

    @asynccontextmanager
    async def receive(self, request: web.Request, client: Hashable) -> AsyncIterator[Body]:
        """The body of a request, which is in flight until the context ends. `client`: the sender, whose key has been
        checked. Raises ApiError."""
        limits, encoding = self.limits, request.headers.get("Content-Encoding", "identity").strip().lower()
        if encoding != "identity":
            raise ApiError(415, f"the content encoding {encoding[:MAX_ECHO]!r} is not supported; send plain JSON")
        size = limits.body_bytes if request.content_length is None else request.content_length
        if size > limits.body_bytes:
            raise self._too_large()
        self._check(client, size, limits.client_requests, CLIENT_BYTES, "this session")
        self._check(_ALL, size, limits.requests, ALL_BYTES, "all sessions")
        self._count(client, 1, size)
        try:
            yield self._parse(request.path, await self._read(request))
        finally:
            self._count(client, -1, -size)

    def _check(self, whose: Hashable, size: int, requests: int, most_bytes: int, name: str) -> None:
        if self.requests[whose] >= requests or self.bytes[whose] + size > most_bytes:
            what = (
                f"{self.requests[whose]} requests of {name} with {self.bytes[whose]} bytes are in flight; the limit is "
                f"{requests} requests with {most_bytes} bytes; try again later"
            )
            raise ApiError(429, what, code="rate_limit_exceeded")

    def _count(self, client: Hashable, requests: int, size: int) -> None:
        for whose in (client, _ALL):
            self.requests[whose] += requests
            self.bytes[whose] += size
        if not self.requests[client]:
            del self.requests[client], self.bytes[client]

    async def _read(self, request: web.Request) -> bytes:
        try:
            async with asyncio.timeout(self.limits.read_s):
                return await request.read()
        except TimeoutError:
            raise ApiError(408, f"the body did not arrive within {self.limits.read_s:g} s", code="timeout") from None
        except web.HTTPRequestEntityTooLarge:
            raise self._too_large() from None

    def _too_large(self) -> ApiError:
        what = f"the body is larger than {self.limits.body_bytes} bytes, the limit of this server"
        return ApiError(413, what, code="context_length_exceeded")

    def _parse(self, path: str, data: bytes) -> Body:
        most = self.limits.values
        if data.count(b",") + data.count(b"[") + data.count(b"{") > most:
            what = f"the body has more than {most} JSON values, which is more than the context has room for"
            raise ApiError(400, what, code="context_length_exceeded")
        try:
            fields = msgspec.json.decode(data.removeprefix(codecs.BOM_UTF8), type=dict[str, Any])
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as e:
            raise ApiError(400, f"the body is not a JSON object: {e}") from e
        return Body(f"{path} {hashlib.blake2b(data).hexdigest()}", fields)
