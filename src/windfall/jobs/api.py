"""The service's HTTP api. JSON in, JSON out; an error is {"error": {"what", "where", "fix"}}.

    GET  /health                    no token                GET  /jobs/NAME           that job
    GET  /jobs                      what the token allows   POST /jobs/NAME/stop      ends it, resumable
    POST /jobs                      submits a job           POST /jobs/NAME/resume    continues it
    GET  /metrics                   for Prometheus          DELETE /jobs/NAME         deletes it, if it has ended
    GET  /page                      with its key            POST /machines/NAME       a machine that has joined reports

Rules: a request has the header `Authorization: Bearer TOKEN`. The fleet's token allows everything. A job's token allows
reading, ending, resuming and removing that job, but no change of its terms (share, priority, deadline, budget), and
nothing about others: a job that is not its own does not exist for it. Tokens are compared in constant time, and a wrong
one is answered late.
"""

from __future__ import annotations

import asyncio
import hmac
import math
import ssl as tls
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
from aiohttp import web

from windfall.errors import WindfallError
from windfall.jobs.machine.report import MachineReport
from windfall.jobs.machines import NameInUse
from windfall.jobs.service import Service
from windfall.jobs.store import NAME
from windfall.jobs.views import page
from windfall.link import invitation, network
from windfall.link.listener import Listener

REFUSAL_S = 0.5
"""Seconds until a request with a wrong token is answered."""
MAX_BODY_BYTES = 4 << 20
FLEET = ""
"""The owner of the fleet's token. The owner of a job's token is the name of the job."""


class Submit(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    recipe: str
    name: str
    share: float = 1.0
    priority: int = 0
    max_usd: float = 0.0
    deadline_s: float = 0.0
    directory: str = ""


class ResumeRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    max_usd: float | None = None


class NotAllowed(Exception):
    """The status and the error of a refused request."""

    def __init__(self, status: int, error: WindfallError) -> None:
        super().__init__(str(error))
        self.status, self.error = status, error


class Api:
    def __init__(self, service: Service) -> None:
        self._service = service
        self._listener = Listener()
        self.app = web.Application(middlewares=[self._answer_errors], client_max_size=MAX_BODY_BYTES)
        self.app.add_routes(
            [
                web.get("/health", self._health),
                web.get("/metrics", self._metrics),
                web.get("/jobs", self._list),
                web.post("/jobs", self._submit),
                web.get("/jobs/{name}", self._show),
                web.delete("/jobs/{name}", self._remove),
                web.post("/jobs/{name}/stop", self._stop),
                web.post("/jobs/{name}/resume", self._resume),
                web.post("/machines/{name}", self._report),
            ]
        )
        for path, handler in page.JobsPage(service.folder, service.token).handlers().items():
            self.app.router.add_get(path, self._shown(handler))

    async def open(self, host: str, port: int, ssl: tls.SSLContext | None = None) -> tuple[web.AppRunner, int]:
        fix = "Choose another port in the fleet's file, or stop the service that uses this one."
        return await self._listener.serve(self.app, host, port, ssl, fix)

    def close(self) -> None:
        self._listener.close()

    def authenticated(self, request: web.Request) -> None:
        """Lift the limits of a peer that has shown what it needs."""
        self._listener.authenticated(request.transport)

    def _shown(self, handler: page.Handler) -> page.Handler:
        """A page, which checks its key itself."""

        async def shown(request: web.Request) -> web.StreamResponse:
            response = await handler(request)
            if response.status == 200:
                self.authenticated(request)
            return response

        return shown

    # who asks

    async def _who(self, request: web.Request) -> str:
        """The job whose token the request has, or FLEET. Raises NotAllowed for any other."""
        given = request.headers.get("Authorization", "").removeprefix("Bearer ").encode(errors="replace")
        owner = None
        if hmac.compare_digest(given, self._service.token.encode()):
            owner = FLEET
        for name in self._service.store.jobs:  # all of them, whichever matches: time must say nothing
            try:
                token = self._service.job_token(name)
            except WindfallError:
                continue
            if hmac.compare_digest(given, token.encode()):
                owner = name
        if owner is None:
            await asyncio.sleep(REFUSAL_S)
            fix = "Give --token with the token in the service's folder, or that of the job."
            raise NotAllowed(401, WindfallError("this token is not known", where="Authorization", fix=fix))
        self.authenticated(request)
        return owner

    async def _fleet(self, request: web.Request) -> None:
        if await self._who(request) != FLEET:
            error = WindfallError("a job's token does not allow this", where="--token", fix="Use the fleet's token.")
            raise NotAllowed(403, error)

    async def _job(self, request: web.Request) -> str:
        """The name of a job that exists and that the request may act on."""
        who, name = await self._who(request), request.match_info["name"]
        if who not in (FLEET, name):
            raise NotAllowed(404, WindfallError(f"there is no job {name!r}", where="jobs"))
        self._service.store.get(name)
        return name

    # what is asked

    async def _health(self, request: web.Request) -> web.Response:
        del request
        return web.json_response({"status": "stopping" if self._service.stopping else "ok"})

    async def _list(self, request: web.Request) -> web.Response:
        who, found = await self._who(request), self._service.snapshot()
        if who != FLEET:
            found = {"time_s": found["time_s"], "devices": {}, "jobs": {who: found["jobs"][who]}}
        return web.json_response(found)

    async def _show(self, request: web.Request) -> web.Response:
        name = await self._job(request)
        used = {
            device: {"used_s": {name: times.get(name, 0) / 1e9}}
            for device, times in self._service.bill.devices().items()
        }
        described = self._service.describe(self._service.store.get(name))
        return web.json_response({"name": name, "devices": used, **described})

    async def _submit(self, request: web.Request) -> web.Response:
        await self._fleet(request)
        asked = await _body(request, Submit)
        for key in ("share", "max_usd", "deadline_s"):
            value = getattr(asked, key)
            if not math.isfinite(value) or value < 0 or (key == "share" and value == 0):
                raise WindfallError(
                    f"{key} = {value!r} is not possible", where=f"--{key}", fix="Give a positive number."
                )
        job = await self._service.submit(
            asked.recipe, name=asked.name, share=asked.share, priority=asked.priority, max_usd=asked.max_usd,
            deadline_s=asked.deadline_s, directory=asked.directory,
        )  # fmt: skip
        shown = self._service.describe(job)
        return web.json_response({"name": job.name, "token": self._service.job_token(job.name), **shown}, status=201)

    async def _stop(self, request: web.Request) -> web.Response:
        job = await self._service.stop_job(await self._job(request))
        return web.json_response({"name": job.name, **self._service.describe(job)})

    async def _remove(self, request: web.Request) -> web.Response:
        name = await self._job(request)
        await self._service.remove_job(name)
        return web.json_response({"name": name, "state": "removed"})

    async def _resume(self, request: web.Request) -> web.Response:
        name, max_usd = await self._job(request), (await _body(request, ResumeRequest)).max_usd
        if max_usd is not None and await self._who(request) != FLEET:
            what = "a job's token does not allow choosing what the job may spend"
            fix = "Use the fleet's token for --max-usd, or leave --max-usd out."
            raise NotAllowed(403, WindfallError(what, where="--max-usd", fix=fix))
        job = await self._service.resume_job(name, max_usd)
        return web.json_response({"name": job.name, **self._service.describe(job)})

    async def _report(self, request: web.Request) -> web.Response:
        await self._fleet(request)
        name, report = request.match_info["name"], await _body(request, MachineReport)
        if not NAME.fullmatch(name):
            raise WindfallError(
                f"{name!r} cannot be the name of a machine", where="--name", fix="Use letters and digits."
            )
        return web.json_response(await self._service.report(name, report))

    async def _metrics(self, request: web.Request) -> web.Response:
        await self._fleet(request)
        found, lines = self._service.snapshot(), ["# TYPE windfall_job_usd counter"]
        for name, job in found["jobs"].items():
            lines.append(f'windfall_job_usd{{job="{name}"}} {job["usd"]:.6f}')
            lines.append(f'windfall_job_step{{job="{name}",state="{job["state"]}"}} {job["step"]}')
            lines.append(f'windfall_job_tokens_per_s{{job="{name}"}} {job["tokens_per_s"]:.3f}')
        for device, state in found["devices"].items():
            lines.append(f'windfall_device_idle_s{{device="{device}"}} {state["idle_s"]:.3f}')
            for job, s in state["used_s"].items():
                lines.append(f'windfall_device_used_s{{device="{device}",job="{job}"}} {s:.3f}')
        headers = {"Content-Type": "text/plain; version=0.0.4; charset=utf-8"}
        return web.Response(text="\n".join(lines) + "\n", headers=headers)

    @web.middleware
    async def _answer_errors(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        try:
            return await handler(request)
        except NotAllowed as e:
            return _error(e.status, e.error)
        except WindfallError as e:
            return _error(409 if isinstance(e, NameInUse) else 400, e)
        except web.HTTPException as e:
            return _error(e.status, WindfallError(e.reason, where=f"{request.method} {request.path}"))


async def _body(request: web.Request, kind: type[Any]) -> Any:
    try:
        return msgspec.json.decode(await request.read() or b"{}", type=kind)
    except msgspec.DecodeError as e:
        raise WindfallError(f"invalid request: {e}", where=f"{request.method} {request.path}") from e


def _error(status: int, error: WindfallError) -> web.Response:
    return web.json_response({"error": {"what": error.what, "where": error.where, "fix": error.fix}}, status=status)


def url(host: str, port: int, *, secure: bool = False) -> str:
    """Where clients reach a service that listens on this host."""
    shown = invitation.own_address() if host in invitation.ALL_INTERFACES else host
    return f"{'https' if secure else 'http'}://{network.in_url(shown)}:{port}"
