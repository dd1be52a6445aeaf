"""The HTTP server of the Tinker API, for the SDKs 0.35 to 0.38 (docs/tinker.md).

    SDK ──request──▶ key ──▶ body (bodies.py) ──▶ call or question ──▶ TinkerService
        ◀─an id────                                                         │
        ──retrieve_future, again and again──▶ waits up to WAIT_S ◀──outcome─┘

Every request needs the key of an account (X-API-Key, or Authorization: Bearer), except for /healthz. An error is
{"detail": words}. The SDK shows it to its user, except for 402, 408, 409, 429 and 5xx, after which it sends the request
again: so these are only for what may be different later. What a model's call does wrong is not an error of its request
(calls.RefusedCall).

windfall's own client (client.py) sends calls as they are (calls.py), and gets results as they are, in msgpack:

    POST /windfall/call              a call                       {"request_id", "model_id"}, as for the SDK
    GET  /windfall/outcome/{id}      waits for its outcome        204 (not yet), or a result or FailedCall
    GET  /windfall/about                                          {"base", "context", "rank"}
    GET  /windfall/usage                                          what the account has used: usd, tokens, seconds
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from ssl import SSLContext
from typing import TYPE_CHECKING, Any

from aiohttp import web

from windfall.link.listener import Listener
from windfall.tinker import calls as c
from windfall.tinker.calls import Refusal
from windfall.tinker.disk.saved_weights import path_of
from windfall.tinker.wire import answers, listings, messages, requests
from windfall.tinker.wire import fields as f
from windfall.tinker.wire.bodies import MAX_BODY_BYTES, BodyReader, zstd

if TYPE_CHECKING:
    from windfall.tinker.accounts.keys import ApiAccount
    from windfall.tinker.disk.call_log import Entry
    from windfall.tinker.service import TinkerService

API = "/api/v1"
INLINE_BYTES = 1 << 20
"""A larger result is announced with its size first, so that a client can wait until it has memory for it."""
WAIT_S = 30.0
"""Seconds for which a request for a result waits. The SDK gives up after 45."""
CLOSE_S = 1.0
IDLE_S = 75.0
HEAD_S = 20.0
"""Seconds that a connection may be open before its first request has a valid key."""
MAX_WITHOUT_KEY = 1024
LINGER_S = 5.0
"""Seconds to read and drop the rest of a body that was refused, so that its client gets to read the answer."""
PROTOBUF, MSGPACK = "application/x-protobuf", "application/msgpack"
FAILED = "windfall-failed"
"""Header of a result in msgpack that is a FailedCall."""
OF_OTHERS = "this server has no {}: it is for one organization, whose accounts are in its file of keys"
CALLS = {
    "POST /create_model": requests.create_model,
    "POST /unload_model": requests.unload_model,
    "POST /load_weights": requests.load_weights,
    "POST /optim_step": requests.optim_step,
    "POST /save_weights": requests.save_weights,
    "POST /save_weights_for_sampler": requests.save_for_sampler,
    "POST /save_weights_external": requests.save_external,
    "POST /asample": requests.sample,
}
"""Requests in JSON that are calls, and what reads them."""
REFUSED = {
    "POST /create_custom_loss": "a loss runs on the client: call forward_backward_custom with a function",
    "POST /auth/token": "this server accepts API keys only (X-API-Key)",
    "DELETE /auth/apikey/me": "keys are managed by the operator of this server",
    "GET /audit": OF_OTHERS.format("audit log"),
    "GET /billing/usage/events": "this server keeps no bill by the hour: windfall.client has Client.usage(), and its "
    "operator `windfall top`",
    "PUT /sessions/{session}/project": OF_OTHERS.format("projects"),
    "GET /sessions/{session}/trace_export": "this server exports no traces; `windfall top` shows what it does",
    "GET /training_runs/{model}/checkpoints/{part}/{name}/external_weights_urls": "there are no external weights",
    "GET /training_runs/{model}/checkpoints/{part}/{name}/archive": "weights are folders on the disk of this server",
}
"""Requests that the SDK can make and this server does not support, and why."""
Answer = dict[str, Any]
Handler = Callable[["ApiAccount", Any, web.Request], Awaitable[Answer | web.Response]]
_LOG = logging.getLogger(__name__)


class TinkerServer:
    def __init__(self, service: TinkerService) -> None:
        self._service, self._bodies = service, BodyReader()
        self._listener: Listener | None = None
        self._runner: web.AppRunner | None = None
        self.app = web.Application(middlewares=[self._one_request], client_max_size=MAX_BODY_BYTES)
        self.app.router.add_get(f"{API}/healthz", _healthy)
        routes = {route: partial(self._answer, *found) for route, found in self._routes().items()}
        for route, answer in (routes | {route: partial(_refuse, why) for route, why in REFUSED.items()}).items():
            method, _, path = route.partition(" ")
            self.app.router.add_route(method, API + path, answer)

    def _routes(self) -> dict[str, tuple[Callable[[bytes], Any], Handler]]:
        """By method and path of a request: what decodes its body, and what answers it."""
        weights = "/training_runs/{model}/checkpoints/{part}/{name}"
        config = {
            "pjwt_auth_enabled": False, "parallel_fwdbwd_chunks": True, "proto_compress_fwdbwd": zstd() is not None,
            "sample_use_retrieve_futures": True, "sample_join_sampling_session": True,
            "create_model_via_load_weights": True, "custom_loss_server_side": False,
        }  # fmt: skip
        return {
            "POST /client/config": (bytes, partial(_say, config)),
            "POST /client/dynamic_config": (bytes, partial(_say, {"sample_cancel_enabled": True})),
            # What the SDK says of itself and of its user's errors is dropped.
            "POST /telemetry": (bytes, partial(_say, {"status": "accepted"})),
            "GET /get_server_capabilities": (bytes, self._capabilities),
            "GET /auth/apikey/me": (bytes, self._key),
            "GET /windfall/about": (bytes, self._about),
            "GET /windfall/usage": (bytes, self._usage),
            "POST /create_session": (f.CreateSession.read, self._create_session),
            "POST /session_heartbeat": (f.only("session_id"), self._heartbeat),
            "GET /sessions": (bytes, self._sessions),
            "POST /sessions/search": (f.SearchBody.read, self._search),
            "GET /sessions/{session}": (bytes, self._session),
            "POST /sessions/{session}/finish": (f.FinishBody.read, self._finish),
            **{route: (partial(requests.call, convert), self._submit) for route, convert in CALLS.items()},
            "POST /forward_backward": (requests.forward, self._submit),
            "POST /windfall/call": (requests.native, self._submit),
            "POST /retrieve_future": (f.RetrieveBody.read, self._retrieve),
            "POST /retrieve_futures": (f.RetrieveManyBody.read, self._retrieve_many),
            "GET /windfall/outcome/{request:.+}": (bytes, self._outcome),
            "POST /cancel_future": (f.only("request_id"), self._cancel),
            "POST /create_sampling_session": (f.CreateSampler.read, self._create_sampler),
            "POST /join_sampling_session": (f.only("sampling_session_id"), self._join_sampler),
            "GET /samplers/{sampler}": (bytes, self._sampler),
            "POST /get_info": (f.only("model_id"), self._info),
            "POST /weights_info": (f.only("tinker_path"), self._weights_info),
            "POST /copy_weights": (f.CopyWeightsBody.read, self._copy),
            "GET /training_runs": (bytes, self._training_runs),
            "GET /training_runs/{model}": (bytes, self._training_run),
            "GET /training_runs/{model}/checkpoints": (bytes, self._checkpoints_of_model),
            "GET /checkpoints": (bytes, self._checkpoints),
            "GET /billing/usage/checkpoints/current": (bytes, self._storage),
            f"DELETE {weights}": (bytes, self._delete),
            f"PUT {weights}/ttl": (f.TtlBody.read, self._set_ttl),
            f"POST {weights}/publish": (bytes, partial(self._publish, True)),
            f"DELETE {weights}/publish": (bytes, partial(self._publish, False)),
        }

    async def listen(self, host: str, port: int, fix: str, ssl: SSLContext | None = None) -> int:
        """Listen until `stop_listening`. Returns the port: 0 selects a free one. Raises WindfallError with `fix`."""
        messages.check_installed()
        self._listener = Listener(max_unauthenticated=MAX_WITHOUT_KEY, auth_timeout_s=HEAD_S)
        options: dict[str, Any] = {"keepalive_timeout": IDLE_S, "lingering_time": LINGER_S, "shutdown_timeout": CLOSE_S}
        self._runner, port = await self._listener.serve(self.app, host, port, ssl, fix, answer=_not_http, **options)
        return port

    async def stop_listening(self) -> None:
        if self._listener is not None and self._runner is not None:
            self._listener.close()
            await self._runner.cleanup()
        self._bodies.close()

    # every request

    @web.middleware
    async def _one_request(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        try:
            return await handler(request)
        except Exception as e:  # a client must get an answer even if there is a bug
            refusal = _refusal(request, e)
        response = _error(refusal.status, str(refusal))
        if not request.content.is_eof():
            response.force_close()
        return response

    async def _answer(
        self, decode: Callable[[bytes], Any], handler: Handler, request: web.Request
    ) -> web.StreamResponse:
        account = self._account(request)
        async with self._bodies.receive(request, account.name, decode) as asked:
            answer = await handler(account, asked, request)
        return answer if isinstance(answer, web.StreamResponse) else web.json_response(answer)

    def _account(self, request: web.Request) -> ApiAccount:
        scheme, _, token = request.headers.get("Authorization", "").partition(" ")
        bearer = token.strip() if scheme.lower() == "bearer" else ""
        account = self._service.keys.account(request.headers.get("X-API-Key") or bearer)
        if self._listener is not None:
            self._listener.authenticated(request.transport)
        return account

    # the client

    async def _capabilities(self, account: ApiAccount, asked: bytes, request: web.Request) -> Answer:
        terms = self._service.terms
        model = {"model_name": terms.base, "max_context_length": terms.context, "trainable": True, "sampleable": True}
        return {"supported_models": [model]}

    async def _about(self, account: ApiAccount, asked: bytes, request: web.Request) -> Answer:
        terms = self._service.terms
        return {"base": terms.base, "context": terms.context, "rank": terms.rank}

    async def _usage(self, account: ApiAccount, asked: bytes, request: web.Request) -> Answer:
        return dict(self._service.usage(account))

    async def _key(self, account: ApiAccount, asked: bytes, request: web.Request) -> Answer:
        return {"key_id": 0, "name": account.name, "note": "", "details": {}}

    # sessions

    async def _create_session(self, account: ApiAccount, asked: f.CreateSession, request: web.Request) -> Answer:
        session = await self._service.sessions.create(
            account, tags=asked.tags, metadata=asked.user_metadata, sdk=asked.sdk_version,
            name=asked.display_name or "",
        )  # fmt: skip
        answer = {"type": "create_session", "session_id": session.id}
        if asked.project_id is not None:
            answer["warning_message"] = "This server has no projects: project_id has no effect."
        return answer

    async def _heartbeat(self, account: ApiAccount, asked: str, request: web.Request) -> Answer:
        self._service.sessions.get(account, asked)
        return {"type": "session_heartbeat"}

    async def _sessions(self, account: ApiAccount, asked: bytes, request: web.Request) -> Answer:
        found, _ = listings.page(self._service.sessions.of(account), request.query, limit=20)
        return {"sessions": [session.id for session in found]}

    async def _search(self, account: ApiAccount, asked: f.SearchBody, request: web.Request) -> Answer:
        if asked.project_ids or (asked.owner or {}).get("type", "own") == "user":
            raise Refusal(400, "sessions are searched by session_id, display_name, user_metadata and status only")
        found = [session for session in self._service.sessions.of(account) if listings.matches(session, asked)]
        if asked.cursor is not None:
            ids = [session.id for session in found]
            last = asked.cursor.get("last_session_id", "")
            if last not in ids:
                raise Refusal(400, "cursor: its session has ended. Search from the beginning.")
            found = found[ids.index(last) + 1 :]
        some, saved = found[: asked.limit], self._service.weights.of(account)
        sessions = [self._models_of(account, session.id) for session in some]
        counts = [sum(1 for p in saved if p.model in models) for models in sessions]
        answer: dict[str, Any] = {"sessions": [listings.session(s, n) for s, n in zip(some, counts, strict=True)]}
        if len(found) > asked.limit:
            last = some[-1]
            answer["next_cursor"] = {"last_created_at": listings.when(last.created), "last_session_id": last.id}
        return answer

    def _models_of(self, account: ApiAccount, session: str) -> list[str]:
        return [model.id for model in self._service.models.of(account) if model.session == session]

    async def _session(self, account: ApiAccount, asked: bytes, request: web.Request) -> Answer:
        session = self._service.sessions.get(account, request.match_info["session"])
        samplers = [sampler.id for sampler in self._service.samplers.all.values() if sampler.session == session.id]
        of = {"training_run_ids": self._models_of(account, session.id), "sampler_ids": samplers}
        return of | listings.named(session)

    async def _finish(self, account: ApiAccount, asked: f.FinishBody, request: web.Request) -> Answer:
        try:
            await self._service.end_session(self._service.sessions.get(account, request.match_info["session"]))
        except Refusal as e:
            if e.status != 410:  # it has ended before
                raise
        return {}

    # calls

    async def _submit(self, account: ApiAccount, asked: tuple[c.Call, bytes], request: web.Request) -> Answer:
        call, body = asked
        entry = await self._service.submit(account, call, body)
        answer: Answer = {"request_id": entry.id} | ({"model_id": entry.model} if entry.model else {})
        if isinstance(call, c.SampleCall):
            answer["sample_sequence_ids"] = [f"{entry.id}/{n}" for n in range(call.n)]
        return answer

    async def _retrieve(self, account: ApiAccount, asked: f.RetrieveBody, request: web.Request) -> web.Response:
        outcome = await self._service.outcome(account, asked.request_id, WAIT_S)
        if isinstance(outcome, c.Pending):
            return web.json_response(answers.pending(asked.request_id, outcome), status=408)
        if isinstance(outcome, c.Done) and asked.allow_metadata_only and outcome.size > INLINE_BYTES:
            size = {"response_payload_size": outcome.size}
            return web.json_response({"status": "complete_metadata", "request_id": asked.request_id} | size)
        self._service.calls.retrieved(account, [asked.request_id])
        if isinstance(outcome, c.FailedCall):
            return web.json_response(answers.failed(outcome))
        answer = answers.of(outcome.result)
        if isinstance(answer, bytes):
            return web.Response(body=answer, content_type=PROTOBUF)
        return web.json_response(answer)

    async def _retrieve_many(self, account: ApiAccount, asked: f.RetrieveManyBody, request: web.Request) -> Answer:
        target = asked.target
        if target.type != "sampling_session":
            raise Refusal(400, f"target.type: {target.type[:100]!r} is not known. Known: sampling_session.")
        self._service.calls.retrieved(account, asked.retrieved_request_ids)
        wait_s = WAIT_S if asked.timeout is None else min(WAIT_S, asked.timeout)
        cursor, found = await self._service.completions(
            account, target.sampling_session_id, target.cloned_sampler_id, asked.prev_cursor, wait_s
        )
        return {"cursor": cursor, "completions": [_completion(entry) for entry in found]}

    async def _outcome(self, account: ApiAccount, asked: bytes, request: web.Request) -> web.Response:
        id = request.match_info["request"]
        outcome = await self._service.outcome(account, id, WAIT_S)
        if isinstance(outcome, c.Pending):
            return web.Response(status=204)
        self._service.calls.retrieved(account, [id])
        if isinstance(outcome, c.FailedCall):
            return web.Response(body=c.encode(outcome), content_type=MSGPACK, headers={FAILED: "1"})
        return web.Response(body=c.encode(outcome.result), content_type=MSGPACK)

    async def _cancel(self, account: ApiAccount, asked: str, request: web.Request) -> Answer:
        await self._service.cancel(account, asked)
        return {}

    # samplers

    async def _create_sampler(self, account: ApiAccount, asked: f.CreateSampler, request: web.Request) -> Answer:
        if not asked.model_path and not asked.base_model:
            raise Refusal(400, "expected model_path or base_model")
        sampler = await self._service.samplers.create(
            account, asked.session_id, asked.sampling_session_seq_id, path=asked.model_path or "",
            base=asked.base_model or "",
        )  # fmt: skip
        return {"type": "create_sampling_session", "sampling_session_id": sampler.id}

    async def _join_sampler(self, account: ApiAccount, asked: str, request: web.Request) -> Answer:
        number = await self._service.samplers.join(account, asked)
        return {"type": "join_sampling_session", "client_counter": number}

    async def _sampler(self, account: ApiAccount, asked: bytes, request: web.Request) -> Answer:
        sampler = self._service.samplers.get(account, request.match_info["sampler"])
        return {"sampler_id": sampler.id, "base_model": self._service.terms.base, "model_path": sampler.path or None}

    # models and their weights

    async def _info(self, account: ApiAccount, asked: str, request: web.Request) -> Answer:
        model = self._service.models.get(account, asked)
        terms = self._service.terms
        data = {"model_name": terms.base, "tokenizer_id": terms.tokenizer}
        lora = {"is_lora": True, "lora_rank": model.spec.rank, "model_name": terms.base}
        return {"type": "get_info", "model_id": model.id, "model_data": data} | lora

    async def _weights_info(self, account: ApiAccount, asked: str, request: web.Request) -> Answer:
        found = self._service.weights.get(account.name, asked)
        model = self._service.models.all[found.model]
        return listings.weights(self._service.terms.base, model.spec)

    async def _copy(self, account: ApiAccount, asked: f.CopyWeightsBody, request: web.Request) -> Answer:
        """The copy is the account's, whatever project it is for."""
        if request.headers.get("X-Tinker-Weights-Access-Token"):
            raise Refusal(400, f.NO_TOKENS)
        key = request.headers.get("X-Idempotency-Key", "")
        copy = await self._service.models.copy(account, asked.source_path, expires_s=asked.ttl_seconds, key=key)
        return {"tinker_path": copy.path}

    async def _training_runs(self, account: ApiAccount, asked: bytes, request: web.Request) -> Answer:
        _check_project(request.query)
        found, cursor = listings.page(self._service.models.of(account), request.query, limit=20)
        saved = self._service.weights.of
        return {"training_runs": [listings.training_run(m, saved(account, m.id)) for m in found], "cursor": cursor}

    async def _training_run(self, account: ApiAccount, asked: bytes, request: web.Request) -> Answer:
        model = self._service.models.get(account, request.match_info["model"])
        return listings.training_run(model, self._service.weights.of(account, model.id))

    async def _checkpoints_of_model(self, account: ApiAccount, asked: bytes, request: web.Request) -> Answer:
        model = self._service.models.get(account, request.match_info["model"])
        found = self._service.weights.of(account, model.id)
        return {"checkpoints": [listings.checkpoint(p) for p in found]}

    async def _checkpoints(self, account: ApiAccount, asked: bytes, request: web.Request) -> Answer:
        _check_project(request.query)
        found, cursor = listings.page(self._service.weights.of(account), request.query, limit=100)
        return {"checkpoints": [listings.checkpoint(p) for p in found], "cursor": cursor}

    async def _storage(self, account: ApiAccount, asked: bytes, request: web.Request) -> Answer:
        _check_project(request.query)
        return {"data": [listings.storage(account.name, self._service.weights.of(account))]}

    async def _delete(self, account: ApiAccount, asked: bytes, request: web.Request) -> Answer:
        await self._service.weights.delete(account, _path(request))
        return {}

    async def _set_ttl(self, account: ApiAccount, asked: f.TtlBody, request: web.Request) -> Answer:
        await self._service.weights.change(account, _path(request), expires_s=asked.ttl_seconds)
        return {}

    async def _publish(self, public: bool, account: ApiAccount, asked: bytes, request: web.Request) -> Answer:
        await self._service.weights.change(account, _path(request), public=public)
        return {}


async def _healthy(request: web.Request) -> web.Response:
    return web.json_response({"status": "ok"})


async def _say(answer: Answer, account: ApiAccount, asked: bytes, request: web.Request) -> Answer:
    return answer


async def _refuse(why: str, request: web.Request) -> web.Response:
    return _error(400, f"{request.method} {request.path}: {why}")


def _path(request: web.Request) -> str:
    """The weights that the path of a request names."""
    model, part, name = (request.match_info[key] for key in ("model", "part", "name"))
    return path_of(model, part, name)


def _check_project(query: Mapping[str, str]) -> None:
    if "project_id" in query:
        raise Refusal(400, "project_id: this server has no projects. Leave it out.")


def _completion(entry: Entry) -> dict[str, Any]:
    if entry.failed:
        return {"state": "failed", "request_id": entry.id}
    return {"state": "finished", "request_id": entry.id, "response_payload_uncompressed_size": entry.size}


def _refusal(request: web.Request, error: Exception) -> Refusal:
    match error:
        case Refusal():
            return error
        case web.RequestPayloadError() | ConnectionError():  # its length or chunks are wrong, or the client is gone
            return Refusal(400, f"the body cannot be read: {error}")
        case web.HTTPNotFound() | web.HTTPMethodNotAllowed():
            return Refusal(404, f"{request.method} {request.path}: there is no such request in the SDKs 0.35 to 0.38")
        case web.HTTPException():
            return Refusal(error.status, f"{request.method} {request.path}: {error.reason}")
        case _:
            _LOG.error("%s %s failed", request.method, request.path, exc_info=error)
            return Refusal(500, f"{request.method} {request.path}: {type(error).__name__}: {error}")


def _error(status: int, why: str) -> web.Response:
    return web.json_response({"detail": why}, status=status)


def _not_http(status: int, why: str) -> web.Response:
    return _error(status, f"the request is not HTTP: {why}")
