"""The HTTP server of the Tinker API, for the SDKs 0.35 to 0.38 (docs/tinker.md).

    SDK ──request──▶ key ──▶ body (bodies.py) ──▶ call or question ──▶ TinkerService
        ◀─an id────                                                         │
        ──retrieve_future, again and again──▶ waits up to WAIT_S ◀──outcome─┘

Every request needs the key of an account (X-API-Key, or Authorization: Bearer), except for /healthz. An error is
{"detail": words}. The SDK shows it to its user, except for 402, 408, 409, 429 and 5xx, after which it sends the request
again: so these are only for what may be different later. What a model's call does wrong is not an error of its request
(calls.RefusedCall).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from ssl import SSLContext
from typing import TYPE_CHECKING, Any

from aiohttp import web

from windfall.link.listener import Listener
from windfall.tinker import calls as c
from windfall.tinker.calls import Refusal
from windfall.tinker.disk.saved_weights import path_of
from windfall.tinker.wire import answers, listings, messages, native, requests, samples
from windfall.tinker.wire import fields as f
from windfall.tinker.wire.bodies import MAX_BODY_BYTES, BodyReader, zstd

if TYPE_CHECKING:
    from windfall.tinker.accounts.keys import ApiAccount
    from windfall.tinker.disk.call_log import Entry
    from windfall.tinker.service import TinkerService

API = "/api/v1"
INLINE_BYTES = 1 << 20
"""A larger result is announced with its size first, so that a client can wait until it has memory for it."""
CLOSE_S = 1.0
IDLE_S = 75.0
HEAD_S = 20.0
"""Seconds that a connection may be open before its first request has a valid key."""
MAX_WITHOUT_KEY = 1024
LINGER_S = 5.0
"""Seconds to read and drop the rest of a body that was refused, so that its client gets to read the answer."""
PROTOBUF = "application/x-protobuf"
OF_OTHERS = "this server has no {}: it is for one organization, whose accounts are in its file of keys"
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
Handler = Callable[["ApiAccount", web.Request, bytes], Awaitable[Any]]
_LOG = logging.getLogger(__name__)


class TinkerServer:
    def __init__(self, service: TinkerService) -> None:
        self._service, self._bodies = service, BodyReader()
        self._thread = ThreadPoolExecutor(1, "tinker bodies")
        """Reads large bodies, so that they do not hold up the event loop."""
        self._listener: Listener | None = None
        self._runner: web.AppRunner | None = None
        self.app = web.Application(middlewares=[self._one_request], client_max_size=MAX_BODY_BYTES)
        self.app.router.add_get(f"{API}/healthz", _healthy)
        for route, handler in self._routes().items():
            method, _, path = route.partition(" ")
            self.app.router.add_route(method, API + path, partial(self._answer, handler))
        for route, why in REFUSED.items():
            method, _, path = route.partition(" ")
            self.app.router.add_route(method, API + path, partial(_refuse, why))

    def _routes(self) -> dict[str, Handler]:
        weights = "/training_runs/{model}/checkpoints/{part}/{name}"
        return {
            "POST /client/config": self._config,
            "POST /client/dynamic_config": self._dynamic_config,
            "POST /telemetry": self._telemetry,
            "GET /get_server_capabilities": self._capabilities,
            "GET /auth/apikey/me": self._key,
            "POST /create_session": self._create_session,
            "POST /session_heartbeat": self._heartbeat,
            "GET /sessions": self._sessions,
            "POST /sessions/search": self._search,
            "GET /sessions/{session}": self._session,
            "POST /sessions/{session}/finish": self._finish,
            "POST /create_model": partial(self._submit, requests.create_model),
            "POST /unload_model": partial(self._submit, requests.unload_model),
            "POST /load_weights": partial(self._submit, requests.load_weights),
            "POST /forward_backward": self._forward_backward,
            "POST /optim_step": partial(self._submit, requests.optim_step),
            "POST /save_weights": partial(self._submit, requests.save_weights),
            "POST /save_weights_for_sampler": partial(self._submit, requests.save_for_sampler),
            "POST /save_weights_external": partial(self._submit, requests.save_external),
            "POST /get_info": self._info,
            "POST /weights_info": self._weights_info,
            "POST /copy_weights": self._copy,
            "POST /create_sampling_session": self._create_sampler,
            "POST /join_sampling_session": self._join_sampler,
            "GET /samplers/{sampler}": self._sampler,
            "POST /asample": self._sample,
            "POST /retrieve_future": self._retrieve,
            "POST /retrieve_futures": self._retrieve_many,
            "POST /cancel_future": self._cancel,
            "GET /training_runs": self._training_runs,
            "GET /training_runs/{model}": self._training_run,
            "GET /training_runs/{model}/checkpoints": self._checkpoints_of_model,
            "GET /checkpoints": self._checkpoints,
            "GET /billing/usage/checkpoints/current": self._storage,
            f"DELETE {weights}": self._delete,
            f"PUT {weights}/ttl": self._set_ttl,
            f"POST {weights}/publish": partial(self._publish, True),
            f"DELETE {weights}/publish": partial(self._publish, False),
            **native.NativeRequests(self._service).routes(),
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
        self._thread.shutdown(wait=False)

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

    async def _answer(self, handler: Handler, request: web.Request) -> web.StreamResponse:
        account = self._account(request)
        async with self._bodies.receive(request, account.name) as body:
            answer = await handler(account, request, body)
        return answer if isinstance(answer, web.StreamResponse) else web.json_response(answer)

    def _account(self, request: web.Request) -> ApiAccount:
        scheme, _, token = request.headers.get("Authorization", "").partition(" ")
        bearer = token.strip() if scheme.lower() == "bearer" else ""
        account = self._service.keys.account(request.headers.get("X-API-Key") or bearer)
        if self._listener is not None:
            self._listener.authenticated(request.transport)
        return account

    # the client

    async def _config(self, account: ApiAccount, request: web.Request, body: bytes) -> dict[str, Any]:
        return {
            "pjwt_auth_enabled": False,
            "parallel_fwdbwd_chunks": True,
            "proto_compress_fwdbwd": zstd() is not None,
            "sample_use_retrieve_futures": True,
            "sample_join_sampling_session": True,
            "create_model_via_load_weights": True,
            "custom_loss_server_side": False,
        }

    async def _dynamic_config(self, account: ApiAccount, request: web.Request, body: bytes) -> dict[str, Any]:
        return {"sample_cancel_enabled": True}

    async def _telemetry(self, account: ApiAccount, request: web.Request, body: bytes) -> dict[str, Any]:
        """What the SDK says of itself and of its user's errors is dropped."""
        return {"status": "accepted"}

    async def _capabilities(self, account: ApiAccount, request: web.Request, body: bytes) -> dict[str, Any]:
        terms = self._service.terms
        model = {"model_name": terms.base, "max_context_length": terms.context, "trainable": True, "sampleable": True}
        return {"supported_models": [model]}

    async def _key(self, account: ApiAccount, request: web.Request, body: bytes) -> dict[str, Any]:
        return {"key_id": 0, "name": account.name, "note": "", "details": {}}

    # sessions

    async def _create_session(self, account: ApiAccount, request: web.Request, body: bytes) -> dict[str, Any]:
        fields = f.read(body, f.CreateSession)
        session = await self._service.sessions.create(
            account,
            tags=fields.tags,
            metadata=fields.user_metadata,
            sdk=fields.sdk_version,
            name=fields.display_name or "",
        )
        answer = {"type": "create_session", "session_id": session.id}
        if fields.project_id is not None:
            answer["warning_message"] = "This server has no projects: project_id has no effect."
        return answer

    async def _heartbeat(self, account: ApiAccount, request: web.Request, body: bytes) -> dict[str, Any]:
        self._service.sessions.get(account, f.read(body, f.SessionBody).session_id)
        return {"type": "session_heartbeat"}

    async def _sessions(self, account: ApiAccount, request: web.Request, body: bytes) -> dict[str, Any]:
        found, _ = listings.page(self._service.sessions.of(account), request.query, limit=20)
        return {"sessions": [session.id for session in found]}

    async def _search(self, account: ApiAccount, request: web.Request, body: bytes) -> dict[str, Any]:
        search = f.read(body, f.SearchBody)
        if search.project_ids or (search.owner or {}).get("type", "own") == "user":
            raise Refusal(400, "sessions are searched by session_id, display_name, user_metadata and status only")
        found = [session for session in self._service.sessions.of(account) if listings.matches(session, search)]
        if search.cursor is not None:
            ids = [session.id for session in found]
            last = search.cursor.get("last_session_id", "")
            if last not in ids:
                raise Refusal(400, "cursor: its session has ended. Search from the beginning.")
            found = found[ids.index(last) + 1 :]
        some, saved = found[: search.limit], self._service.weights.of(account)
        sessions = [self._models_of(account, session.id) for session in some]
        counts = [sum(1 for p in saved if p.model in models) for models in sessions]
        answer: dict[str, Any] = {"sessions": [listings.session(s, n) for s, n in zip(some, counts, strict=True)]}
        if len(found) > search.limit:
            last = some[-1]
            answer["next_cursor"] = {"last_created_at": listings.when(last.created), "last_session_id": last.id}
        return answer

    def _models_of(self, account: ApiAccount, session: str) -> list[str]:
        return [model.id for model in self._service.models.of(account) if model.session == session]

    async def _session(self, account: ApiAccount, request: web.Request, body: bytes) -> dict[str, Any]:
        session = self._service.sessions.get(account, request.match_info["session"])
        samplers = [sampler.id for sampler in self._service.samplers.all.values() if sampler.session == session.id]
        return {
            "training_run_ids": self._models_of(account, session.id),
            "sampler_ids": samplers,
            "user_metadata": session.info.get("metadata") or None,
            "display_name": session.info.get("name") or None,
        }

    async def _finish(self, account: ApiAccount, request: web.Request, body: bytes) -> dict[str, Any]:
        f.read(body, f.FinishBody)
        try:
            await self._service.end_session(self._service.sessions.get(account, request.match_info["session"]))
        except Refusal as e:
            if e.status != 410:  # it has ended before
                raise
        return {}

    # calls

    async def _submit(
        self, convert: Callable[[dict[str, Any]], c.Call], account: ApiAccount, request: web.Request, body: bytes
    ) -> dict[str, Any]:
        return await self._accept(account, requests.model_call(f.read_object(body), convert))

    async def _accept(self, account: ApiAccount, call: c.Call) -> dict[str, Any]:
        entry = await self._service.submit(account, call)
        return {"request_id": entry.id} | ({"model_id": entry.model} if entry.model else {})

    async def _forward_backward(self, account: ApiAccount, request: web.Request, body: bytes) -> dict[str, Any]:
        if (kind := request.content_type) != PROTOBUF:
            raise Refusal(415, f"the content type {kind[:100]!r} is not supported here. Use an SDK from 0.35 on.")
        loop = asyncio.get_running_loop()
        return await self._accept(account, await loop.run_in_executor(self._thread, samples.forward_call, body))

    async def _sample(self, account: ApiAccount, request: web.Request, body: bytes) -> dict[str, Any]:
        call = requests.sample(f.read_object(body))
        answer = await self._accept(account, call)
        return answer | {"sample_sequence_ids": answers.sequence_ids(answer["request_id"], call.n)}

    async def _retrieve(self, account: ApiAccount, request: web.Request, body: bytes) -> web.Response:
        fields = f.read(body, f.RetrieveBody)
        outcome = await self._service.outcome(account, fields.request_id, native.WAIT_S)
        if isinstance(outcome, c.Pending):
            return web.json_response(answers.pending(fields.request_id, outcome), status=408)
        if isinstance(outcome, c.Done) and fields.allow_metadata_only and outcome.size > INLINE_BYTES:
            size = {"response_payload_size": outcome.size}
            return web.json_response({"status": "complete_metadata", "request_id": fields.request_id} | size)
        self._service.calls.retrieved(account, [fields.request_id])
        if isinstance(outcome, c.FailedCall):
            return web.json_response(answers.failed(outcome))
        answer = answers.of(outcome.result)
        if isinstance(answer, bytes):
            return web.Response(body=answer, content_type=PROTOBUF)
        return web.json_response(answer)

    async def _retrieve_many(self, account: ApiAccount, request: web.Request, body: bytes) -> dict[str, Any]:
        fields = f.read(body, f.RetrieveManyBody)
        target = fields.target
        if target.type != "sampling_session":
            raise Refusal(400, f"target.type: {target.type[:100]!r} is not known. Known: sampling_session.")
        self._service.calls.retrieved(account, fields.retrieved_request_ids)
        wait_s = native.WAIT_S if fields.timeout is None else min(native.WAIT_S, fields.timeout)
        cursor, found = await self._service.completions(
            account, target.sampling_session_id, target.cloned_sampler_id, fields.prev_cursor, wait_s
        )
        return {"cursor": cursor, "completions": [_completion(entry) for entry in found]}

    async def _cancel(self, account: ApiAccount, request: web.Request, body: bytes) -> dict[str, Any]:
        await self._service.cancel(account, f.read(body, f.RequestBody).request_id)
        return {}

    # samplers

    async def _create_sampler(self, account: ApiAccount, request: web.Request, body: bytes) -> dict[str, Any]:
        fields = f.read(body, f.CreateSampler)
        if not fields.model_path and not fields.base_model:
            raise Refusal(400, "expected model_path or base_model")
        sampler = await self._service.samplers.create(
            account,
            fields.session_id,
            fields.sampling_session_seq_id,
            path=fields.model_path or "",
            base=fields.base_model or "",
        )
        return {"type": "create_sampling_session", "sampling_session_id": sampler.id}

    async def _join_sampler(self, account: ApiAccount, request: web.Request, body: bytes) -> dict[str, Any]:
        number = await self._service.samplers.join(account, f.read(body, f.SamplerBody).sampling_session_id)
        return {"type": "join_sampling_session", "client_counter": number}

    async def _sampler(self, account: ApiAccount, request: web.Request, body: bytes) -> dict[str, Any]:
        sampler = self._service.samplers.get(account, request.match_info["sampler"])
        return {"sampler_id": sampler.id, "base_model": sampler.base, "model_path": sampler.path or None}

    # models and their weights

    async def _info(self, account: ApiAccount, request: web.Request, body: bytes) -> dict[str, Any]:
        model = self._service.models.get(account, f.read(body, f.ModelBody).model_id)
        data = {"model_name": model.base, "tokenizer_id": self._service.terms.tokenizer}
        lora = {"is_lora": True, "lora_rank": model.spec.rank, "model_name": model.base}
        return {"type": "get_info", "model_id": model.id, "model_data": data} | lora

    async def _weights_info(self, account: ApiAccount, request: web.Request, body: bytes) -> dict[str, Any]:
        found = self._service.weights.get(account.name, f.read(body, f.PathBody).tinker_path)
        model = self._service.models.all[found.model]
        return listings.weights(model.base, model.spec)

    async def _copy(self, account: ApiAccount, request: web.Request, body: bytes) -> dict[str, Any]:
        """The copy is the account's, whatever project it is for."""
        fields = f.read(body, f.CopyWeightsBody)
        requests.check_token(fields.weights_access_token or request.headers.get("X-Tinker-Weights-Access-Token"))
        expires_s = None if fields.ttl_seconds is None else float(fields.ttl_seconds)
        key = request.headers.get("X-Idempotency-Key", "")
        copy = await self._service.copies.copy(account, fields.source_path, expires_s=expires_s, key=key)
        return {"tinker_path": copy.path}

    async def _training_runs(self, account: ApiAccount, request: web.Request, body: bytes) -> dict[str, Any]:
        _check_project(request.query)
        found, cursor = listings.page(self._service.models.of(account), request.query, limit=20)
        return {"training_runs": [self._run(account, model.id) for model in found], "cursor": cursor}

    async def _training_run(self, account: ApiAccount, request: web.Request, body: bytes) -> dict[str, Any]:
        return self._run(account, request.match_info["model"])

    def _run(self, account: ApiAccount, id: str) -> dict[str, Any]:
        return listings.training_run(self._service.models.get(account, id), self._service.weights.of(account, id))

    async def _checkpoints_of_model(self, account: ApiAccount, request: web.Request, body: bytes) -> dict[str, Any]:
        model = self._service.models.get(account, request.match_info["model"])
        found = self._service.weights.of(account, model.id)
        return {"checkpoints": [listings.checkpoint(p) for p in found]}

    async def _checkpoints(self, account: ApiAccount, request: web.Request, body: bytes) -> dict[str, Any]:
        _check_project(request.query)
        found, cursor = listings.page(self._service.weights.of(account), request.query, limit=100)
        return {"checkpoints": [listings.checkpoint(p) for p in found], "cursor": cursor}

    async def _storage(self, account: ApiAccount, request: web.Request, body: bytes) -> dict[str, Any]:
        _check_project(request.query)
        return {"data": [listings.storage(account.name, self._service.weights.of(account))]}

    async def _delete(self, account: ApiAccount, request: web.Request, body: bytes) -> dict[str, Any]:
        await self._service.weights.delete(account, _path(request))
        return {}

    async def _set_ttl(self, account: ApiAccount, request: web.Request, body: bytes) -> dict[str, Any]:
        ttl_s = f.read(body, f.TtlBody).ttl_seconds
        await self._service.weights.change(account, _path(request), expires_s=None if ttl_s is None else float(ttl_s))
        return {}

    async def _publish(self, public: bool, account: ApiAccount, request: web.Request, body: bytes) -> dict[str, Any]:
        await self._service.weights.change(account, _path(request), public=public)
        return {}


async def _healthy(request: web.Request) -> web.Response:
    return web.json_response({"status": "ok"})


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
        case web.RequestPayloadError():  # its length or chunks are wrong
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
