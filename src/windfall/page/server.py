"""The HTTP handlers of the page, on the controller's port while a run goes on.

    GET /page            the page itself                     GET /page/samples       the list of sampled responses
    GET /page/stream     the history, then its changes       GET /page/sample?at=N   one of them, with its tokens

Rules: every path needs the key (`?key=...`), also the page itself; it is derived from the run's token, so it does not
allow joining as a worker. Nothing can be changed through these paths. A request without the key gets status 403, with a
delay, and stays under the limits of link/listener.py for peers that have not authenticated.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any

from aiohttp import web

from windfall import html_page
from windfall.html_page import HEADERS, Handler
from windfall.page import document
from windfall.page.feed import MAX_VIEWERS, Feed
from windfall.page.samples import SampleFile


class PageServer:
    def __init__(self, feed: Feed, samples: SampleFile, key: str, *, title: str) -> None:
        self._feed = feed
        self._samples = samples
        self._key = key
        self._title = title
        self.welcome: Callable[[web.Request], None] = lambda request: None
        """Called with every request that has the key."""

    def handlers(self) -> dict[str, Handler]:
        paths: dict[str, Handler] = {
            "/page": self._page, "/page/stream": self._stream, "/page/samples": self._list, "/page/sample": self._sample
        }  # fmt: skip
        return html_page.guarded(paths, self._key, lambda request: self.welcome(request))

    async def _page(self, request: web.Request) -> web.Response:
        del request
        text = document.html({"live": True, "runs": []}, self._title)
        headers = {**HEADERS, "Content-Security-Policy": document.content_policy()}
        return web.Response(text=text, content_type="text/html", headers=headers)

    async def _stream(self, request: web.Request) -> web.StreamResponse:
        if self._feed.viewers >= MAX_VIEWERS:
            return web.Response(status=503, text=f"{MAX_VIEWERS} viewers are connected already\n", headers=HEADERS)
        response = web.StreamResponse(headers={**HEADERS, "Content-Type": "text/event-stream"})
        await response.prepare(request)
        try:
            with contextlib.suppress(ConnectionError, TimeoutError):
                assert request.transport is not None
                await self._feed.follow(response.write, request.transport)
        finally:
            if request.transport is not None:
                request.transport.abort()
        return response

    async def _list(self, request: web.Request) -> web.Response:
        del request
        return _json(await asyncio.to_thread(self._samples.index))

    async def _sample(self, request: web.Request) -> web.Response:
        try:
            at = int(request.query.get("at", ""))
        except ValueError:
            at = -1
        sample = await asyncio.to_thread(self._samples.read, at)
        return _json(sample) if sample else web.Response(status=404, text="no such response\n", headers=HEADERS)


def _json(value: Any) -> web.Response:
    return web.Response(text=html_page.as_json(value), content_type="application/json", headers=HEADERS)
