"""Receives the bodies of requests within limits, decompresses and decodes them.

    key is valid ──▶ count the request and its bytes ──▶ read ──▶ decompress ──▶ decode
                          │ 413, 429                      │ 408, 413   │ 400, 413, 415   │ 400, 415

Large bodies are decompressed and decoded in a thread: the event loop answers others meanwhile.
A body counts for its account and for all accounts together until its request is answered. It counts with the bytes
that have arrived; once it is decompressed, with those. The SDK sends a request that was refused with 429 again, later.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
from collections import Counter
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from aiohttp import web

from windfall.tinker.calls import Refusal

MAX_BODY_BYTES = 64 << 20
"""Largest body, before and after decompression. The SDK sends larger batches in several requests."""
ACCOUNT_BYTES, ALL_BYTES = 256 << 20, 1 << 30
"""Bodies in flight. An account of one client sends at most 50 MB at the same time."""
LARGE_BYTES = 1 << 20
"""Bodies from this size on are decoded in a thread: 50 MiB take a second."""
READ_S = 60.0
T = TypeVar("T")
_ALL = ""
"""Stands for all accounts together."""


def zstd() -> Any:
    """The module that decompresses. None: it is not installed, and clients are told not to compress."""
    for name in ("compression.zstd", "backports.zstd"):
        with contextlib.suppress(ImportError):
            return importlib.import_module(name)
    return None


class BodyReader:
    def __init__(self, *, body_bytes: int = MAX_BODY_BYTES, read_s: float = READ_S) -> None:
        self._body_bytes, self._read_s = body_bytes, read_s
        self._bytes: Counter[str] = Counter()
        """Bytes in flight of each account, and of _ALL."""
        self._thread = ThreadPoolExecutor(1, "tinker bodies")

    def close(self) -> None:
        self._thread.shutdown(wait=False)

    @contextlib.asynccontextmanager
    async def receive(self, request: web.Request, account: str, decode: Callable[[bytes], T]) -> AsyncIterator[T]:
        """What the body of a request says, which is in flight until the context ends. Raises Refusal."""
        encoding = request.headers.get("Content-Encoding", "identity").strip().lower()
        size = 0

        def hold(now: int) -> None:
            """The body has this many bytes now."""
            nonlocal size
            self._check(account, now, now - size)
            self._count(account, now - size)
            size = now

        self._check(account, request.content_length or 0, request.content_length or 0)
        try:
            data = await self._read(request, hold)
            plain = await self._off_loop(len(data), self._plain, data, encoding)
            hold(len(plain))
            yield await self._off_loop(len(plain), decode, plain)
        finally:
            self._count(account, -size)

    def _check(self, account: str, size: int, more: int) -> None:
        """Raises Refusal if a body may not have this size, or if there is no room for `more` bytes."""
        if size > self._body_bytes:
            raise Refusal(413, f"the body is larger than {self._body_bytes >> 20} MiB, the limit of this server")
        for whose, most in ((account, ACCOUNT_BYTES), (_ALL, ALL_BYTES)):
            if self._bytes[whose] + more > most:
                what = f"{self._bytes[whose] >> 20} MiB of requests are being read, of at most {most >> 20}"
                raise Refusal(429, f"{what}; try again later")

    def _count(self, account: str, size: int) -> None:
        for whose in (account, _ALL):
            self._bytes[whose] += size
            if not self._bytes[whose]:
                del self._bytes[whose]

    async def _read(self, request: web.Request, hold: Callable[[int], None]) -> bytes:
        data = bytearray()
        try:
            async with asyncio.timeout(self._read_s):
                async for part in request.content.iter_any():
                    hold(len(data) + len(part))
                    data += part
        except TimeoutError:
            raise Refusal(408, f"the body did not arrive within {self._read_s:g} s") from None
        return bytes(data)

    async def _off_loop(self, size: int, work: Callable[..., T], *args: Any) -> T:
        """Do the work in the thread, if it is that of a large body."""
        if size < LARGE_BYTES:
            return work(*args)
        return await asyncio.get_running_loop().run_in_executor(self._thread, work, *args)

    def _plain(self, data: bytes, encoding: str) -> bytes:
        if encoding == "identity":
            return data
        module = zstd()
        if encoding != "zstd" or module is None:
            raise Refusal(415, f"the content encoding {encoding[:100]!r} is not supported; send plain bodies")
        reader = module.ZstdDecompressor()
        try:
            plain = reader.decompress(data, max_length=self._body_bytes + 1)
        except module.ZstdError as e:
            raise Refusal(400, f"the body cannot be decompressed: {e}") from None
        if not reader.eof and len(plain) <= self._body_bytes:
            raise Refusal(400, "the body cannot be decompressed: its end is missing")
        return plain
