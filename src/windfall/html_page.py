"""A page as one HTML file: script, style and data inside it, nothing loaded from elsewhere.

Rules: text from a run is data, never markup. In the file it is JSON in which `<` is escaped, so it cannot end its
element; the script puts it into the page as text nodes only. A content security policy allows only the script with the
hash of our own, and no requests except to the server of the page.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import json
from collections.abc import Awaitable, Callable, Mapping
from html import escape
from typing import Any

from aiohttp import web

ICON = (
    "data:image/svg+xml,%3Csvg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 16 16'%3E"
    "%3Cpath fill='%2322c55e' d='M1 2h9v3H1z'/%3E%3Cpath fill='%23ef4444' d='M11 2h2v3h-2z'/%3E"
    "%3Cpath fill='%232563eb' d='M4 7h11v3H4zM1 12h7v3H1z'/%3E%3C/svg%3E"
)
"""The icon of the page. Without one, browsers ask the server for a file that it does not have."""
HEADERS = {
    "Cache-Control": "no-store",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}
"""Headers of every answer that the server of such a page gives."""
REFUSAL_S = 0.5
"""Seconds until a request with a wrong key is answered."""
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def content_policy(script: str) -> str:
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return (
        f"default-src 'none'; script-src 'sha256-{digest}'; style-src 'unsafe-inline'; img-src data:; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'"
    )


def as_json(data: Any) -> str:
    """JSON that is safe inside a <script> element.

    >>> as_json({"text": "</script>"})
    '{"text":"\\\\u003c/script>"}'
    """
    # Pure ASCII: a log may contain half a surrogate pair, which UTF-8 cannot represent.
    return json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")


def html(*, title: str, style: str, script: str, data: Any) -> str:
    """The script finds an empty element `app`, and the data in the element `data`."""
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{escape(content_policy(script))}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="referrer" content="no-referrer"><meta name="color-scheme" content="light dark">\n'
        f'<link rel="icon" href="{ICON}">'
        f"<title>{escape(title)}</title>\n<style>{style}</style></head>\n"
        '<body><div id="app"></div><noscript>This page needs JavaScript.</noscript>\n'
        f'<script id="data" type="application/json">{as_json(data)}</script>\n'
        f"<script>{script}</script>\n</body></html>\n"
    )


def guarded(
    handlers: Mapping[str, Handler], key: str, welcome: Callable[[web.Request], None] = lambda request: None
) -> dict[str, Handler]:
    """The same handlers, by path, for requests that have the key. `welcome` is called with each of these."""

    def guard(handler: Handler) -> Handler:
        async def handle(request: web.Request) -> web.StreamResponse:
            given = request.query.get("key", "")
            if not hmac.compare_digest(given.encode(errors="replace"), key.encode()):
                await asyncio.sleep(REFUSAL_S)
                text = "This page needs its key. Use the complete link that windfall printed.\n"
                return web.Response(status=403, text=text, headers=HEADERS)
            welcome(request)
            return await handler(request)

        return handle

    return {path: guard(handler) for path, handler in handlers.items()}
