"""The process of `windfall up`: the service and its port, until it is stopped.

The first Ctrl-C or SIGTERM stops and saves all jobs; the second kills their processes at once. Either way they continue
when the service is started again, and so they do after `kill -9`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import time
from pathlib import Path

from aiohttp import web

from windfall import errors
from windfall import run_folder as folders
from windfall.errors import WindfallError, unwritable
from windfall.jobs import api as apis
from windfall.jobs import service as services
from windfall.jobs.service import Service
from windfall.jobs.settings import FleetSettings
from windfall.jobs.views import page
from windfall.link import listener, tls
from windfall.recipe.fleet import Fleet

LOCK_S = 10.0
"""Seconds to wait for a service that is just ending."""


def main(settings: FleetSettings) -> int:
    try:
        settings.folder.mkdir(parents=True, exist_ok=True)
    except OSError as e:
        raise unwritable("the folder of the service", settings.folder, e, "Choose another one with --folder.") from e
    try:
        with folders.owned(settings.folder, "service", timeout_s=LOCK_S):
            asyncio.run(errors.guard(_run(settings)))
    except OSError as e:
        if errors.file_system_error(e, settings.folder) is None:
            raise
        full = errors.is_disk_full(e)
        fix = "Free space on its disk." if full else "Check the permissions of it and of its folder."
        fix += " Then start the service again: it continues all jobs."
        raise unwritable("the files of the service", Path(e.filename or settings.folder), e, fix) from e
    return 0


async def _run(settings: FleetSettings) -> None:
    listener.raise_file_limit()
    service = Service(settings, _say)
    api = apis.Api(service)
    runner, port = await _open(api, settings)
    try:
        url = apis.url(settings.host, port, secure=settings.tls_cert is not None)
        address = {"url": url, "port": port, "pid": os.getpid()}
        if settings.tls_cert is not None:
            address["certificate"] = tls.first_certificate(settings.tls_cert)
        folders.replace(settings.folder / "address.json", json.dumps(address))
        _say(f"listening on {url}, {len(service.host.places)} devices, {services.summary(service.store.jobs)}")
        _say(f"page: {page.link(url, service.token)}")
        trust = f" --tls-ca {settings.tls_cert}" if settings.tls_cert else ""
        _say(f"submit a job: windfall train RECIPE.toml --on {url} --token {settings.folder / 'token'}{trust}")
        _stop_on_signals(service)
        await service.run()
    finally:
        api.close()
        await runner.cleanup()
    _say(f"stopped: {services.summary(service.store.jobs)}")


async def _open(api: apis.Api, settings: FleetSettings) -> tuple[web.AppRunner, int]:
    """Open the port; with port = 0, try the one of the last time first."""
    ssl = tls.server_context(Fleet(tls_cert=settings.tls_cert, tls_key=settings.tls_key))
    before = (folders.read_json(settings.folder / "address.json") or {}).get("port", 0)
    if settings.port == 0 and isinstance(before, int) and before:
        with contextlib.suppress(WindfallError):  # another process uses it now
            return await api.open(settings.host, before, ssl)
    return await api.open(settings.host, settings.port, ssl)


def _stop_on_signals(service: Service) -> None:
    def on_signal() -> None:
        if service.stopping:
            service.kill()
        else:
            _say("stopping and saving all jobs; press Ctrl-C again to kill their processes at once")
            service.stop()

    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, on_signal)


def _say(line: str) -> None:
    with contextlib.suppress(OSError):  # the terminal is gone, or the disk of the log is full: the jobs go on
        print(f"{time.strftime('%H:%M:%S')} {line}", flush=True)
