"""The metadata services of three clouds, as HTTP servers on loopback that behave well or badly."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from datetime import UTC, datetime, timedelta
from typing import Any

from aiohttp import web

from tests.support import quiet_loop
from windfall.worker.preemption import PreemptionNotice, watch

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
ACTION = "/latest/meta-data/spot/instance-action"
PREEMPTED, EVENTS = "/computeMetadata/v1/instance/preempted", "/metadata/scheduledevents"
WARNED_AT = {"aws": ACTION, "gcp": PREEMPTED, "azure": EVENTS}
POLL_S, TIMEOUT_S = 0.02, 0.15
endless_sent_bytes = [0]
"""Bytes that `endless` has sent."""


@asynccontextmanager
async def serve(handler: Handler, port: int = 0) -> AsyncIterator[str]:
    server = web.Server(handler)  # pyright: ignore
    runner = web.ServerRunner(server, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", port)
    await site.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


class Aws:
    """IMDSv2: requests without a token are refused."""

    source = "aws"

    def __init__(self) -> None:
        self.action: dict[str, Any] | None = None
        self.tokens: list[str] = []
        self.refused = 0

    def warn(self) -> None:
        self.action = {
            "action": "terminate",
            "time": f"{datetime.now(UTC) + timedelta(seconds=120):%Y-%m-%dT%H:%M:%SZ}",
        }

    async def __call__(self, request: web.Request) -> web.StreamResponse:
        if request.path == "/latest/api/token" and request.method == "PUT":
            assert 1 <= int(request.headers["X-aws-ec2-metadata-token-ttl-seconds"]) <= 21600
            self.tokens.append(f"token{len(self.tokens)}==")
            return web.Response(text=self.tokens[-1])
        if not self.tokens or request.headers.get("X-aws-ec2-metadata-token") != self.tokens[-1]:
            self.refused += 1
            return web.Response(status=401)
        said = self.action if request.path == ACTION else None
        return web.Response(status=404, text="<html>") if said is None else web.json_response(said)

    def expire(self) -> None:
        self.tokens.append("expired")


class Gcp:
    """Answers with the value, or with wait_for_change after its next change."""

    source = "gcp"

    def __init__(self, *, flavor: str = "Google", waits: bool = True) -> None:
        self.changed = asyncio.Event()
        self.flavor, self.waits = flavor, waits
        self.asked: list[dict[str, str]] = []

    def warn(self) -> None:
        self.changed.set()

    async def __call__(self, request: web.Request) -> web.StreamResponse:
        if request.headers.get("Metadata-Flavor") != "Google":
            return web.Response(status=403)
        if request.path != PREEMPTED:
            return web.Response(status=404)
        asked = dict(request.query)
        self.asked.append(asked)
        state = f"5ea{int(self.changed.is_set())}"
        if self.waits and asked.get("wait_for_change") == "true" and asked.get("last_etag", state) == state:
            with suppress(TimeoutError):
                change = asyncio.Event() if self.changed.is_set() else self.changed  # it never changes back
                await asyncio.wait_for(change.wait(), float(asked["timeout_sec"]))
        headers = {"ETag": f"5ea{int(self.changed.is_set())}", "Metadata-Flavor": self.flavor}
        return web.Response(text="TRUE" if self.changed.is_set() else "FALSE", headers=headers)


class Azure:
    source = "azure"

    def __init__(self, name: str | None = "Spot_7") -> None:
        self.name = name
        self.events: list[dict[str, Any]] = []

    def warn(self, **changes: Any) -> None:
        at = f"{datetime.now(UTC) + timedelta(seconds=30):%a, %d %b %Y %H:%M:%S GMT}"
        event = {
            "EventId": f"E-{len(self.events)}", "EventStatus": "Scheduled", "EventType": "Preempt", "NotBefore": at,
            "ResourceType": "VirtualMachine", "Resources": ["SPOT_7"], "Description": "", "DurationInSeconds": -1,
        }  # fmt: skip
        self.events.append(event | changes)

    async def __call__(self, request: web.Request) -> web.StreamResponse:
        if request.headers.get("Metadata") != "true" or "api-version" not in request.query:
            return web.Response(status=400)
        if request.path == EVENTS:
            return web.json_response({"DocumentIncarnation": 1, "Events": self.events})
        if request.path == "/metadata/instance/compute/name" and request.query.get("format") == "text" and self.name:
            return web.Response(text=self.name)
        return web.Response(status=404)


CLOUDS: dict[str, type[Aws | Gcp | Azure]] = {"aws": Aws, "gcp": Gcp, "azure": Azure}


class Watch:
    """A watch in a task, and what it notice."""

    def __init__(self, urls: dict[str, str], **args: Any) -> None:
        self.notices: list[PreemptionNotice] = []
        args = {"clouds": list(urls), "poll_s": POLL_S, "timeout_s": TIMEOUT_S, **args}
        self.task = asyncio.create_task(watch(self.notices.append, base_urls=urls, **args))

    async def __aenter__(self) -> Watch:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.task.cancel()
        await asyncio.wait([self.task], timeout=20)
        assert self.task.cancelled(), f"a watch must end when it is canceled, and only then: {self.task!r}"

    async def expect(self, count: int, within_s: float = 5.0) -> list[PreemptionNotice]:
        """Wait for this number of notices, and check that no more arrive."""
        end_s = quiet_loop.now_s() + within_s
        while len(self.notices) < count:
            assert quiet_loop.now_s() < end_s, f"waited {within_s} s for {count} notices, got {self.notices}"
            await asyncio.sleep(0.005)
        await asyncio.sleep(6 * POLL_S)
        assert len(self.notices) == count
        return self.notices


async def endless(request: web.Request) -> web.StreamResponse:
    endless_sent_bytes[0] = 0
    response = web.StreamResponse()
    await response.prepare(request)
    while endless_sent_bytes[0] < 200e6:
        await response.write(b"[" * 65536)
        endless_sent_bytes[0] += 65536
    return response


async def hang(request: web.Request) -> web.StreamResponse:
    await asyncio.sleep(5)
    return web.Response(text="TRUE")


async def drip(request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse()
    await response.prepare(request)
    for _ in range(100):
        await response.write(b" ")
        await asyncio.sleep(0.05)
    return response


async def hang_up(request: web.Request) -> web.StreamResponse:
    assert request.transport
    request.transport.close()
    return web.Response()


async def not_http(request: web.Request) -> web.StreamResponse:
    assert request.transport
    request.transport.write(b"\x00\xff SSH-2.0-OpenSSH\r\n\r\n")  # pyright: ignore
    request.transport.close()
    return web.Response()


async def elsewhere(request: web.Request) -> web.StreamResponse:
    return web.Response(status=302, headers={"Location": "/elsewhere"})


def says(body: bytes, status: int = 200, encoding: str = "identity") -> Handler:
    async def handler(request: web.Request) -> web.StreamResponse:
        headers = {"Metadata-Flavor": "Google", "Content-Encoding": encoding}
        return web.Response(body=body, status=status, headers=headers)

    return handler


FAULTS: dict[str, Handler] = {
    "endless": endless, "hang": hang, "drip": drip, "hang up": hang_up, "not http": not_http, "redirect": elsewhere,
    "500": says(b"oops", 500), "403": says(b"", 403), "503 that looks right": says(b"TRUE", 503),
    "empty": says(b""), "html": says(b"<html>login here</html>"), "bytes": says(bytes(range(256))),
    "number": says(b"7"), "list": says(b'["terminate"]'), "wrong types": says(b'{"action": 1, "Events": {}}'),
    "wrong events": says(b'{"action": null, "Events": [{"EventType": "Preempt"}]}'), "deep": says(b"[" * 60000),
    "gzip that is none": says(b"\x1f\x8b\x08rubbish", encoding="gzip"), "cut": says(b'{"action": "termi'),
}  # fmt: skip
