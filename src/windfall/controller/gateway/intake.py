"""Receives the bodies of requests within limits: reads and parses them.

    key is valid ──▶ count the request ──▶ read ──▶ count values ──▶ parse ──▶ handle it
                          │ 429              │ 408, 413, 415, 429  │ 400      │ 400

Rules:
- The requests and the bytes in flight are limited, for each client and for all clients together. A request counts until
  its answer has ended, its bytes until its prompt is tokenized: what is sampled for minutes holds up no other body.
- A body waits for room before it is read any further, and is refused if there is none in `read_s`.
- The first SMALL_BYTES of a body need no room, so small bodies never wait for large ones, and a body of which only the
  start was sent holds up no other.
- A body must arrive within `read_s`. It must not be compressed.
- The number of JSON values in a body is limited, because nothing else runs in this process while Python parses a text,
  whatever the thread. Counting stops at the limit, and takes time in proportion to the size of the body. Large bodies
  are parsed in a thread, one after the other: other requests run in between.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
from collections.abc import AsyncIterator, Callable, Hashable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

from aiohttp import web

from windfall.controller.gateway.budget import Budget
from windfall.controller.gateway.protocol import MAX_ECHO, ApiError

MIN_BODY_BYTES, MAX_BODY_BYTES = 1 << 20, 8 << 20
BYTES_PER_TOKEN = 64
"""Upper limit for the size of a body, per token of the context."""
MIN_VALUES, VALUES_PER_TOKEN = 32_768, 2
"""Upper limit for the JSON values in a body: a fixed number, and a number per token of the context."""
ID_BYTES = 6
"""Bytes of a token id in a body, with its comma. A body with a list of prompts may be full of them."""
SMALL_BYTES = 64 << 10
CLIENT_BYTES, ALL_BYTES = 2 * MAX_BODY_BYTES, 32 * MAX_BODY_BYTES
CLIENT_REQUESTS, ALL_REQUESTS = 128, 4096
READ_S = 30.0

_STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"?', re.DOTALL)
"""A string in a JSON text, or one without an end: otherwise each quote in that would be tried as another start."""


class Body(NamedTuple):
    """The body of a request."""

    key: str
    """Equal for requests that are repeated."""
    fields: dict[str, Any]
    placed: Callable[[], None]
    """To be called when the prompt is tokenized: the bytes of the body count no longer."""


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
    bytes: Budget = field(default_factory=lambda: Budget(CLIENT_BYTES))


class Intake:
    def __init__(self, limits: IntakeLimits) -> None:
        self.limits = limits
        self._clients: dict[Hashable, _Client] = {}
        """Those with requests in flight."""
        self._requests, self._bytes = 0, Budget(ALL_BYTES)
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
        own.requests, self._requests = own.requests + 1, self._requests + 1
        room = _Room((own.bytes, self._bytes), self.limits.read_s)
        try:
            data = await self._read(request, room)
            if len(data) <= SMALL_BYTES:
                key, fields = self._parse(request.path, data)
            else:
                loop = asyncio.get_running_loop()
                key, fields = await loop.run_in_executor(self._thread, self._parse, request.path, data)
            del data
            yield Body(key, fields, partial(room.shrink, 0))
        finally:
            room.shrink(0)
            own.requests, self._requests = own.requests - 1, self._requests - 1
            if not own.requests:
                self._clients.pop(client, None)

    async def _read(self, request: web.Request, room: _Room) -> bytearray:
        limits, declared = self.limits, request.content_length
        encoding = request.headers.get("Content-Encoding", "identity").strip().lower()
        if encoding != "identity":
            raise ApiError(415, f"the content encoding {encoding[:MAX_ECHO]!r} is not supported; send plain JSON")
        if declared is not None and declared > limits.body_bytes:
            raise self._too_large()
        largest = limits.body_bytes if declared is None else declared
        data, loop = bytearray(), asyncio.get_running_loop()
        try:
            async with asyncio.timeout(limits.read_s) as deadline:
                async for piece in request.content.iter_any():
                    data += piece
                    if len(data) > limits.body_bytes:
                        raise self._too_large()
                    if len(data) > SMALL_BYTES and not room.held:
                        deadline.reschedule(None)
                        await room.reserve(largest)
                        deadline.reschedule(loop.time() + limits.read_s)
        except TimeoutError:
            raise ApiError(408, f"the body did not arrive within {limits.read_s:g} s", code="timeout") from None
        room.shrink(len(data))
        return data

    def _parse(self, path: str, data: bytes | bytearray) -> tuple[str, dict[str, Any]]:
        most = self.limits.values
        if len(data) > SMALL_BYTES and _has_more_values(data, most):
            what = f"the body has more than {most} JSON values, which is more than the context has room for"
            raise ApiError(400, what, code="context_length_exceeded")
        try:
            fields = json.loads(data.decode("utf-8-sig"))
        except (ValueError, RecursionError) as e:
            raise ApiError(400, f"the body is not JSON: {e}") from e
        if not isinstance(fields, dict):
            raise ApiError(400, "the body is not a JSON object")
        return f"{path} {hashlib.blake2b(data).hexdigest()}", fields

    def _too_large(self) -> ApiError:
        what = f"the body is larger than {self.limits.body_bytes} bytes, the limit of this server"
        return ApiError(413, what, code="context_length_exceeded")


class _Room:
    """The bytes that one request has reserved, in all budgets alike."""

    def __init__(self, budgets: tuple[Budget, ...], wait_s: float) -> None:
        self._budgets, self._wait_s = budgets, wait_s
        self._held: dict[Budget, int] = {}

    @property
    def held(self) -> bool:
        return bool(self._held)

    async def reserve(self, size: int) -> None:
        """Wait for room. Raises ApiError if there is none in time."""
        try:
            async with asyncio.timeout(self._wait_s):
                for budget in self._budgets:  # its own first: a client that waits for itself takes nothing from others
                    self._held[budget] = await budget.reserve(size)
        except TimeoutError:
            what = f"too many bytes of requests are in flight; waited {self._wait_s:g} s; try again later"
            raise ApiError(429, what, code="rate_limit_exceeded") from None

    def shrink(self, size: int) -> None:
        """Give back all but `size` bytes."""
        for budget, held in self._held.items():
            budget.settle(held - min(held, size))
            self._held[budget] = min(held, size)


def _has_more_values(data: bytes | bytearray, most: int) -> bool:
    """Whether a JSON text has more than `most` values, counted as commas and opening brackets outside of strings.

    >>> text = b'{"a": [1, 2], "b": "[,,"}'
    >>> _has_more_values(text, 4), _has_more_values(text, 5)
    (True, False)
    """
    if _count(data) < most:
        return False
    count, end = 0, 0
    for strings, string in enumerate(_STRING.finditer(data)):
        count += _count(data[end : string.start()])
        if count >= most or strings > 2 * most:  # a value and its name
            return True
        end = string.end()
    return count + _count(data[end:]) >= most


def _count(data: bytes | bytearray) -> int:
    return data.count(b",") + data.count(b"[") + data.count(b"{")
