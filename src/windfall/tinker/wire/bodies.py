"""Receives the bodies of requests within limits, and decompresses them.

    key is valid ──▶ count the request and its bytes ──▶ read ──▶ decompress
                          │ 413, 429                      │ 408, 413   │ 400, 413, 415

A body counts for its account and for all accounts together until its request is answered: with its largest size while
it is read, then with its size. The SDK sends a request that was refused with 429 again, later.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web

from windfall.tinker.calls import Refusal

MAX_BODY_BYTES = 64 << 20
"""Largest body, before and after decompression. The SDK sends larger batches in several requests."""
ACCOUNT_BYTES, ALL_BYTES = 256 << 20, 1 << 30
"""Bodies in flight. An account of one client sends at most 50 MB at the same time."""
READ_S = 60.0
_ALL = ""
"""Stands for all accounts together."""


def zstd() -> Any:
    """The module that decompresses. None: it is not installed, and clients are told not to compress."""
    try:
        from compression import zstd  # pyright: ignore[reportMissingImports]
    except ImportError:
        try:
            from backports import zstd  # pyright: ignore[reportMissingImports]
        except ImportError:
            return None
    return zstd


class BodyReader:
    def __init__(self, *, body_bytes: int = MAX_BODY_BYTES, read_s: float = READ_S) -> None:
        self._body_bytes, self._read_s = body_bytes, read_s
        self._bytes: Counter[str] = Counter()
        """Bytes in flight of each account, and of _ALL."""

    @asynccontextmanager
    async def receive(self, request: web.Request, account: str) -> AsyncIterator[bytes]:
        """The body of a request, which is in flight until the context ends. Raises Refusal."""
        encoding = request.headers.get("Content-Encoding", "identity").strip().lower()
        size = request.content_length if request.body_exists else 0  # a request for an outcome waits, and has none
        if size is None or (size and encoding != "identity"):
            size = self._body_bytes
        if size > self._body_bytes:
            raise self._too_large()
        for whose, most in ((account, ACCOUNT_BYTES), (_ALL, ALL_BYTES)):
            if self._bytes[whose] + size > most:
                what = f"{self._bytes[whose] >> 20} MiB of requests are being read, of at most {most >> 20}"
                raise Refusal(429, f"{what}; try again later")
        self._count(account, size)
        try:
            plain = self._plain(await self._read(request), encoding)
            self._count(account, len(plain) - size)
            size = len(plain)
            yield plain
        finally:
            self._count(account, -size)

    def _count(self, account: str, size: int) -> None:
        for whose in (account, _ALL):
            self._bytes[whose] += size
            if not self._bytes[whose]:
                del self._bytes[whose]

    async def _read(self, request: web.Request) -> bytes:
        try:
            async with asyncio.timeout(self._read_s):
                return await request.read()
        except TimeoutError:
            raise Refusal(408, f"the body did not arrive within {self._read_s:g} s") from None
        except web.HTTPRequestEntityTooLarge:
            raise self._too_large() from None

    def _plain(self, data: bytes, encoding: str) -> bytes:
        if encoding == "identity":
            return data
        module = zstd()
        if encoding != "zstd" or module is None:
            raise Refusal(415, f"the content encoding {encoding[:100]!r} is not supported; send plain bodies")
        reader = module.ZstdDecompressor()
        try:
            plain = reader.decompress(data, max_length=self._body_bytes)
        except module.ZstdError as e:
            raise Refusal(400, f"the body cannot be decompressed: {e}") from None
        if not reader.eof:
            if len(plain) == self._body_bytes:
                raise self._too_large()
            raise Refusal(400, "the body cannot be decompressed: its end is missing")
        return plain

    def _too_large(self) -> Refusal:
        return Refusal(413, f"the body is larger than {self._body_bytes >> 20} MiB, the limit of this server")
