"""An answer that is sent as server-sent events. Several tasks may send to it; each list of events stays together."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import Any

from aiohttp import web


class EventStream:
    def __init__(self, request: web.Request, write_s: float | None) -> None:
        """`write_s`: time limit for a client to take one list of events (seconds). None: no limit."""
        self._request, self._write_s = request, write_s
        self._response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
        self._sending = asyncio.Lock()

    @property
    def begun(self) -> bool:
        """The client has got status 200."""
        return self._response.prepared

    async def send(self, events: Sequence[dict[str, Any]]) -> None:
        """Send events. The stream begins with the first call, even if it sends none. Raises TimeoutError if the client
        does not take them."""
        async with self._sending, asyncio.timeout(self._write_s):
            if not self.begun:
                await self._response.prepare(self._request)
            for event in events:
                await self._response.write(b"data: " + json.dumps(event).encode() + b"\n\n")

    async def end(self, last: bytes = b"") -> web.StreamResponse:
        async with asyncio.timeout(self._write_s):
            if last:
                await self._response.write(last)
            await self._response.write_eof()
        return self._response
