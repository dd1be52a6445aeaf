"""The requests of windfall's own client (client.py): calls as they are (calls.py), in msgpack.

    POST /windfall/call              a call                       {"request": id, "model": id}
    GET  /windfall/outcome/{id}      waits for its outcome        204 (not yet), or a result or FailedCall in msgpack
    POST /windfall/sampler           {session, seq, path}         {"sampler": id}; an empty path is the base
    GET  /windfall/about                                          {"base", "context", "rank"}
    GET  /windfall/usage                                          what the account has used: usd, tokens, seconds

ClientSessions are those of the SDK's requests.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

import msgspec
from aiohttp import web

from windfall.tinker import calls as c
from windfall.tinker.wire import fields as f

if TYPE_CHECKING:
    from windfall.tinker.accounts.keys import ApiAccount
    from windfall.tinker.service import TinkerService

WAIT_S = 30.0
"""Seconds for which a request for a result waits. The SDK gives up after 45."""
MSGPACK = "application/msgpack"
FAILED = "windfall-failed"
"""Header of a result that is a FailedCall."""


class NewSampler(msgspec.Struct):
    session: str
    seq: int
    path: str = ""


class NativeRequests:
    def __init__(self, service: TinkerService) -> None:
        self._service = service

    def routes(self) -> dict[str, Callable[[ApiAccount, web.Request, bytes], Awaitable[Any]]]:
        return {
            "POST /windfall/call": self._call,
            "GET /windfall/outcome/{request:.+}": self._outcome,
            "POST /windfall/sampler": self._sampler,
            "GET /windfall/about": self._about,
            "GET /windfall/usage": self._usage,
        }

    async def _call(self, account: ApiAccount, request: web.Request, body: bytes) -> dict[str, Any]:
        try:
            call = c.decode_call(body)
        except (msgspec.MsgspecError, ValueError) as e:
            raise c.Refusal(400, f"the body is no call in msgpack: {e}. Use windfall.client of this version.") from e
        entry = await self._service.submit(account, call)
        return {"request": entry.id, "model": entry.model}

    async def _outcome(self, account: ApiAccount, request: web.Request, body: bytes) -> web.Response:
        id = request.match_info["request"]
        match await self._service.outcome(account, id, WAIT_S):
            case c.Pending():
                return web.Response(status=204)
            case c.FailedCall() as failed:
                self._service.calls.retrieved(account, [id])
                return web.Response(body=c.encode(failed), content_type=MSGPACK, headers={FAILED: "1"})
            case c.Done(result=result):
                self._service.calls.retrieved(account, [id])
                return web.Response(body=c.encode(result), content_type=MSGPACK)

    async def _sampler(self, account: ApiAccount, request: web.Request, body: bytes) -> dict[str, Any]:
        asked = f.read(body, NewSampler)
        base = "" if asked.path else self._service.terms.base
        found = await self._service.samplers.create(account, asked.session, asked.seq, path=asked.path, base=base)
        return {"sampler": found.id}

    async def _about(self, account: ApiAccount, request: web.Request, body: bytes) -> dict[str, Any]:
        terms = self._service.terms
        return {"base": terms.base, "context": terms.context, "rank": terms.rank}

    async def _usage(self, account: ApiAccount, request: web.Request, body: bytes) -> dict[str, Any]:
        return self._service.usage(account)
