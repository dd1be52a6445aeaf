"""Spot warnings, against HTTP servers on loopback that speak the three clouds' metadata services, well and badly.

Not covered: the real services; IPv6; containers that cannot reach the address.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import os
import subprocess
import sys
import time
import warnings
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from aiohttp import web

from windfall.errors import WindfallError
from windfall.worker import preemption
from windfall.worker.preemption import PreemptionNotice, watch

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
ACTION, ADVICE = "/latest/meta-data/spot/instance-action", "/latest/meta-data/events/recommendations/rebalance"
PREEMPTED, EVENTS = "/computeMetadata/v1/instance/preempted", "/metadata/scheduledevents"
WARNED_AT = {"aws": ACTION, "gcp": PREEMPTED, "azure": EVENTS}
POLL_S, TIMEOUT_S = 0.02, 0.15


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
    """IMDSv2: no token, no answer."""

    source = "aws"

    def __init__(self) -> None:
        self.action: dict[str, Any] | None = None
        self.advice: dict[str, Any] | None = None
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
        said = {ACTION: self.action, ADVICE: self.advice}.get(request.path)
        return web.Response(status=404, text="<html>") if said is None else web.json_response(said)

    def expire(self) -> None:
        self.tokens.append("nobody has this one")


class Gcp:
    """The value, or with wait_for_change its next change."""

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


class Watching:
    """A watch in a task, and what it told."""

    def __init__(self, urls: dict[str, str], **args: Any) -> None:
        self.told: list[PreemptionNotice] = []
        args = {"clouds": list(urls), "poll_s": POLL_S, "timeout_s": TIMEOUT_S, **args}
        self.task = asyncio.create_task(watch(self.told.append, base_urls=urls, **args))

    async def __aenter__(self) -> Watching:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.task.cancel()
        await asyncio.wait([self.task], timeout=2)
        assert self.task.cancelled(), "a watch ends by being cancelled, and by nothing else"

    async def hears(self, count: int, within_s: float = 5.0) -> list[PreemptionNotice]:
        """Exactly so many, also a while later."""
        end_s = time.monotonic() + within_s
        while len(self.told) < count:
            assert time.monotonic() < end_s, f"waited {within_s} s for {count} notices, have {self.told}"
            await asyncio.sleep(0.005)
        await asyncio.sleep(6 * POLL_S)
        assert len(self.told) == count
        return self.told


def test_aws_warns_after_404_and_is_told_once() -> None:
    async def run() -> None:
        cloud = Aws()
        async with serve(cloud) as url, Watching({"aws": url}) as watching:
            await watching.hears(0)
            cloud.warn()
            (told,) = await watching.hears(1)
            assert told.source == "aws"
            assert not told.advice
            assert told.left_s == pytest.approx(120, abs=3)
            assert "terminate" in told.detail
            assert len(cloud.tokens) == 1
            cloud.action = {"action": "stop", "time": "2017-09-18T08:22:00Z"}
            assert (await watching.hears(2))[1].left_s == 0.0
            cloud.action = {"action": "hibernate", "time": "at once"}
            assert (await watching.hears(3))[2].left_s is None

    asyncio.run(run())


def test_aws_token_that_expires_is_renewed_within_the_poll() -> None:
    async def run() -> None:
        cloud, at_s = Aws(), dict[str, float]()

        async def handler(request: web.Request) -> web.StreamResponse:
            answer = await cloud(request)
            at_s["refused" if answer.status == 401 else request.path] = time.monotonic()
            return answer

        async with serve(handler) as url, Watching({"aws": url}, poll_s=0.5, timeout_s=2.0) as watching:
            await watching.hears(0)
            cloud.expire()
            cloud.warn()
            await watching.hears(1)
        assert cloud.refused == 1
        assert 0 < at_s["/latest/api/token"] - at_s["refused"] < 0.4, "not a failed poll: nothing was waited for"

    asyncio.run(run())


@pytest.mark.parametrize("name", ["aws", "gcp"])
def test_after_a_failure_it_begins_anew(name: str) -> None:
    async def run() -> None:
        cloud, asked = CLOUDS[name](), list[str]()

        async def handler(request: web.Request) -> web.StreamResponse:
            if request.path != ADVICE:
                asked.append(request.path_qs.partition("&")[0])
            broken = request.path == WARNED_AT[name] and len(asked) == 2
            return web.Response(status=400) if broken else await cloud(request)

        async with serve(handler) as url, Watching({name: url}, timeout_s=2.0) as watching:
            await watching.hears(0)
        wait = f"{PREEMPTED}?wait_for_change=true"
        token = "/latest/api/token"
        assert asked[:4] == ([token, ACTION, token, ACTION] if name == "aws" else [PREEMPTED, wait, PREEMPTED, wait])

    asyncio.run(run())


def test_aws_token_is_renewed_before_it_expires(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preemption, "AWS_TOKEN_S", 1)

    async def run() -> None:
        cloud = Aws()
        async with serve(cloud) as url, Watching({"aws": url}):
            await asyncio.sleep(0.7)
        assert len(cloud.tokens) == 2
        assert cloud.refused == 0

    asyncio.run(run())


@pytest.mark.parametrize("broken", [False, True])
def test_aws_rebalance_is_only_advice_and_holds_up_nothing(broken: bool) -> None:
    async def run() -> None:
        cloud = Aws()

        async def handler(request: web.Request) -> web.StreamResponse:
            if broken and request.path == ADVICE:
                return web.Response(status=500)
            return await cloud(request)

        async with serve(handler) as url, Watching({"aws": url}) as watching:
            cloud.advice = {"noticeTime": "2020-10-26T15:21:17Z"}
            told = await watching.hears(0 if broken else 1)
            assert all(t.advice and t.left_s is None and "rebalance" in t.detail for t in told)
            cloud.warn()
            assert not (await watching.hears(1 if broken else 2))[-1].advice

    asyncio.run(run())


def test_gcp_long_poll_tells_at_once() -> None:
    async def run() -> None:
        cloud = Gcp()
        async with serve(cloud) as url, Watching({"gcp": url}, poll_s=0.3) as watching:
            await asyncio.sleep(0.5)
            assert [a.get("wait_for_change") for a in cloud.asked] == [None, "true"]
            assert cloud.asked[1]["last_etag"] == "5ea0"
            assert float(cloud.asked[1]["timeout_sec"]) <= 15
            began_s = time.monotonic()
            cloud.warn()
            (told,) = await watching.hears(1)
            assert time.monotonic() - began_s < 1, "must not wait for the long poll to end"
            assert (told.source, told.left_s) == ("gcp", None)

    asyncio.run(run())


def test_gcp_long_poll_that_times_out_is_followed_by_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preemption, "GCP_WAIT_S", 0.3)

    async def run() -> None:
        cloud, at_s = Gcp(), list[float]()

        async def handler(request: web.Request) -> web.StreamResponse:
            at_s.append(time.monotonic())
            return await cloud(request)

        async with serve(handler) as url, Watching({"gcp": url}, poll_s=0.3, timeout_s=2.0) as watching:
            await asyncio.sleep(1.3)
            waits_s = [b - a for a, b in itertools.pairwise(at_s)]
            assert len(waits_s) >= 2
            assert 0.27 < min(waits_s[1:]) < 0.5, "no pause between long polls"
            cloud.warn()
            await watching.hears(1)

    asyncio.run(run())


def test_gcp_that_does_not_wait_is_not_asked_without_pause() -> None:
    async def run() -> None:
        cloud = Gcp(waits=False)
        async with serve(cloud) as url, Watching({"gcp": url}, poll_s=0.1) as watching:
            await asyncio.sleep(0.45)
            assert 2 <= len(cloud.asked) <= 5
            cloud.warn()
            await watching.hears(1)

    asyncio.run(run())


def test_gcp_is_believed_only_with_its_flavor() -> None:
    async def run() -> None:
        cloud = Gcp(flavor="Vanilla", waits=False)
        cloud.warn()
        async with serve(cloud) as url, Watching({"gcp": url}) as watching:
            await watching.hears(0)
            cloud.flavor = "Google"
            await watching.hears(1)

    asyncio.run(run())


def test_azure_tells_its_own_preemption_only() -> None:
    async def run() -> None:
        cloud = Azure()
        async with serve(cloud) as url, Watching({"azure": url}) as watching:
            cloud.warn(Resources=["spot_8", "spot_77"])
            cloud.warn(EventType="Reboot")
            cloud.warn(EventType="Freeze", NotBefore="", EventStatus="Started")
            cloud.warn(EventStatus="Canceled")
            await watching.hears(0)
            cloud.warn()
            (told,) = await watching.hears(1)
            assert told.source == "azure"
            assert told.left_s == pytest.approx(30, abs=3)
            cloud.events[-1] |= {"EventStatus": "Started", "NotBefore": ""}
            await watching.hears(1)
            cloud.warn(EventType="Terminate", EventStatus="Started", NotBefore="")
            assert (await watching.hears(2))[1].left_s == 0.0

    asyncio.run(run())


def test_azure_takes_an_event_as_its_own_while_it_has_no_name() -> None:
    async def run() -> None:
        cloud = Azure(name=None)
        async with serve(cloud) as url, Watching({"azure": url}) as watching:
            cloud.warn(Resources=["spot_8"])
            await watching.hears(1)
            cloud.name = "spot_7"
            await asyncio.sleep(4 * POLL_S)
            cloud.warn(Resources=["spot_8"])
            await watching.hears(1)
            cloud.warn(Resources=None)
            await watching.hears(2)

    asyncio.run(run())


def test_azure_is_given_time_for_its_first_answer() -> None:
    async def run() -> None:
        cloud, asked = Azure(), 0

        async def handler(request: web.Request) -> web.StreamResponse:
            nonlocal asked
            if request.path == EVENTS:
                asked += 1
                if asked == 1:
                    await asyncio.sleep(4 * TIMEOUT_S)
                    cloud.warn()
                if asked == 2:
                    await hang(request)
            return await cloud(request)

        async with serve(handler) as url, Watching({"azure": url}) as watching:
            await asyncio.sleep(3 * TIMEOUT_S)
            assert asked == 1
            await watching.hears(1)
            cloud.warn()
            await watching.hears(2, within_s=3)  # later it must be quick

    asyncio.run(run())


SENT_BYTES = 0


async def endless(request: web.Request) -> web.StreamResponse:
    global SENT_BYTES
    SENT_BYTES = 0
    response = web.StreamResponse()
    await response.prepare(request)
    while SENT_BYTES < 200e6:
        await response.write(b"[" * 65536)
        SENT_BYTES += 65536
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


@pytest.mark.parametrize("name", list(CLOUDS))
def test_a_faulty_service_is_asked_on_and_heard_when_it_recovers(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(preemption, "AZURE_FIRST_S", TIMEOUT_S)

    async def run(fault: str) -> None:
        cloud, faults, paths = CLOUDS[name](), 0, set[str]()

        async def handler(request: web.Request) -> web.StreamResponse:
            nonlocal faults
            paths.add(request.path)
            if faults < 2 and request.path == WARNED_AT[name]:
                faults += 1
                return await FAULTS[fault](request)
            return await cloud(request)

        async with serve(handler) as url, Watching({name: url}) as watching:
            await watching.hears(0)
            cloud.warn()
            await watching.hears(1)
            assert faults == 2, fault
        assert "/elsewhere" not in paths, "redirects are not followed"
        assert fault != "endless" or 0 < SENT_BYTES < 20e6

    async def run_all() -> None:
        async with asyncio.TaskGroup() as group:
            for fault in FAULTS:
                group.create_task(run(fault), name=fault)

    asyncio.run(run_all())


@pytest.mark.parametrize("body", [b"", b"a b", b"x\r\nEvil: 1", b"\xff", b"t" * 5000])
def test_aws_token_that_is_none_is_not_sent(body: bytes) -> None:
    async def run() -> None:
        asked: set[str] = set()

        async def handler(request: web.Request) -> web.StreamResponse:
            asked.add(request.path)
            return web.Response(body=body)

        async with serve(handler) as url, Watching({"aws": url}) as watching:
            await watching.hears(0)
        assert asked == {"/latest/api/token"}

    asyncio.run(run())


def test_one_service_disturbs_no_other() -> None:
    async def run() -> None:
        aws, azure = Aws(), Azure()
        servers = serve(hang), serve(aws), serve(azure)
        async with servers[0] as g, servers[1] as a, servers[2] as z, Watching({"gcp": g, "aws": a, "azure": z}) as w:
            aws.warn()
            azure.warn()
            assert {n.source for n in await w.hears(2)} == {"aws", "azure"}

    asyncio.run(run())


@pytest.mark.parametrize("name", list(CLOUDS))
def test_a_service_that_is_away_is_found_when_it_comes(name: str) -> None:
    async def run() -> None:
        cloud = CLOUDS[name]()
        async with serve(cloud) as url:
            pass
        async with Watching({name: url}) as watching:
            await watching.hears(0)
            cloud.warn()
            async with serve(cloud, port=int(url.rpartition(":")[2])):
                await watching.hears(1)

    asyncio.run(run())


def test_waits_grow_and_stay_bounded() -> None:
    async def run() -> None:
        at_s: list[float] = []

        async def handler(request: web.Request) -> web.StreamResponse:
            at_s.append(time.monotonic())
            return web.Response(status=500)

        async with serve(handler) as url, Watching({"gcp": url}):
            await asyncio.sleep(1.0)
        waits_s = [b - a for a, b in itertools.pairwise(at_s)]
        assert min(waits_s) >= 2 * POLL_S * 0.9
        assert min(waits_s[2:]) >= 5 * POLL_S * 0.9
        assert len(at_s) >= 6

    asyncio.run(run())


@pytest.mark.parametrize("name", list(CLOUDS))
def test_auto_finds_the_one_that_is_there(name: str) -> None:
    async def run() -> None:
        cloud, foreign = CLOUDS[name](), 0
        others = {"aws": "/latest", "gcp": "/computeMetadata", "azure": "/metadata"}
        del others[name]

        async def handler(request: web.Request) -> web.StreamResponse:
            nonlocal foreign
            foreign += request.path.startswith(tuple(others.values()))
            return await cloud(request)

        args: dict[str, Any] = {"clouds": "auto", "timeout_s": 1.0}
        # One address for all three, as on a machine.
        async with serve(handler) as url, Watching(dict.fromkeys(CLOUDS, url), **args) as watching:
            await watching.hears(0)
            cloud.warn()
            assert [n.source for n in await watching.hears(1)] == [name]
        assert foreign == 2, "asked once each, then never again"

    asyncio.run(run())


@pytest.mark.parametrize("nobody", ["refused", "hang", "endless", "web server", "yes to all"])
def test_auto_returns_where_no_service_is(nobody: str) -> None:
    async def run() -> None:
        web_server, yes = says(b"<html>hello you</html>"), says(b"yes, of course")
        handler = {"hang": hang, "endless": endless, "web server": web_server, "yes to all": yes}.get(nobody, hang)
        told: list[PreemptionNotice] = []
        async with serve(handler) as url:
            if nobody == "refused":
                url = "http://127.0.0.1:1"
            began_s = time.monotonic()
            urls = dict.fromkeys(CLOUDS, url)
            await asyncio.wait_for(watch(told.append, clouds="auto", base_urls=urls, timeout_s=0.5), 5)
            assert time.monotonic() - began_s < 1.2, "all are probed at once"
        assert told == []

    asyncio.run(run())


def test_a_cloud_that_does_not_exist_is_refused() -> None:
    with pytest.raises(WindfallError, match="Did you mean 'azure'"):
        asyncio.run(watch(print, clouds=["azur"]))


def test_an_error_of_the_listener_is_not_swallowed() -> None:
    def listener(_: PreemptionNotice) -> None:
        raise KeyError("ours")

    async def run() -> None:
        cloud = Aws()
        cloud.warn()
        async with serve(cloud) as url:
            await asyncio.wait_for(watch(listener, clouds=["aws"], base_urls={"aws": url}), 5)

    with pytest.raises(ExceptionGroup) as e:
        asyncio.run(run())
    assert e.group_contains(KeyError, match="ours")


def sockets() -> int:
    return sum(os.readlink(f"/proc/self/fd/{f}").startswith("socket") for f in os.listdir("/proc/self/fd") if _open(f))


def _open(descriptor: str) -> bool:
    return os.path.lexists(f"/proc/self/fd/{descriptor}")


def test_nothing_is_left_open() -> None:
    async def run() -> None:
        before = sockets()
        gcp, aws = Gcp(), Aws()
        async with serve(gcp) as g, serve(aws) as a, serve(endless) as e:
            async with Watching({"gcp": g, "aws": a, "azure": e}) as watching:
                await watching.hears(0)  # GCP's long poll is under way
            urls = dict.fromkeys(CLOUDS, e)
            await watch(print, clouds="auto", base_urls=urls, timeout_s=0.1)
        await asyncio.sleep(0.05)
        assert sockets() == before

    gc.collect()  # what tests before this one left is not ours
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        asyncio.run(run())
        gc.collect()
    assert [w for w in caught if issubclass(w.category, ResourceWarning)] == []


def test_sigterm_is_a_notice_once_and_not_the_end() -> None:
    code = """
import asyncio, os, signal
from windfall.worker.preemption import on_sigterm
async def run():
    on_sigterm(asyncio.get_running_loop(), lambda n: print(n.source, n.left_s, n.advice, flush=True))
    for _ in range(2):
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.sleep(0.05)
    print("alive")
asyncio.run(run())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30)
    assert (done.stdout.splitlines(), done.returncode) == (["sigterm None False", "alive"], 0), done.stderr
