"""Metadata services that are slow, broken or hostile cost a poll, and never end the watch for preemption notices."""

from __future__ import annotations

import asyncio
import gc
import itertools
import os
import warnings
from dataclasses import replace

import pytest
from aiohttp import web

from tests.support import quiet_loop
from tests.support.hostile.metadata_services import (
    CLOUDS,
    FAULTS,
    POLL_S,
    WARNED_AT,
    Aws,
    Azure,
    Gcp,
    Watch,
    endless,
    endless_sent_bytes,
    hang,
    serve,
)  # fmt: skip
from windfall.worker import preemption
from windfall.worker.preemption import PreemptionNotice, watch


@pytest.mark.parametrize("name", list(CLOUDS))
def test_faulty_service_is_polled_until_it_recovers(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setitem(preemption.SERVICES, "azure", replace(preemption.SERVICES["azure"], first_s=0.0))

    async def run(fault: str) -> None:
        cloud, faults, paths = CLOUDS[name](), 0, set[str]()

        async def handler(request: web.Request) -> web.StreamResponse:
            nonlocal faults
            paths.add(request.path)
            if faults < 2 and request.path == WARNED_AT[name]:
                faults += 1
                return await FAULTS[fault](request)
            return await cloud(request)

        async with serve(handler) as url, Watch({name: url}) as watch_task:
            await watch_task.expect(0)
            cloud.warn()
            await watch_task.expect(1)
            assert faults == 2, fault
        assert "/elsewhere" not in paths, "redirects must not be followed"
        assert fault != "endless" or 0 < endless_sent_bytes[0] < 20e6

    async def run_all() -> None:
        async with asyncio.TaskGroup() as group:
            for fault in FAULTS:
                group.create_task(run(fault), name=fault)

    quiet_loop.run(run_all())


@pytest.mark.parametrize("body", [b"", b"a b", b"x\r\nEvil: 1", b"\xff", b"t" * 5000])
def test_invalid_aws_token_is_not_sent(body: bytes) -> None:
    async def run() -> None:
        asked: set[str] = set()

        async def handler(request: web.Request) -> web.StreamResponse:
            asked.add(request.path)
            return web.Response(body=body)

        async with serve(handler) as url, Watch({"aws": url}) as watch_task:
            await watch_task.expect(0)
        assert asked == {"/latest/api/token"}

    quiet_loop.run(run())


def test_services_do_not_affect_each_other() -> None:
    async def run() -> None:
        aws, azure = Aws(), Azure()
        servers = serve(hang), serve(aws), serve(azure)
        async with servers[0] as g, servers[1] as a, servers[2] as z, Watch({"gcp": g, "aws": a, "azure": z}) as w:
            aws.warn()
            azure.warn()
            assert {n.source for n in await w.expect(2)} == {"aws", "azure"}

    quiet_loop.run(run())


@pytest.mark.parametrize("name", list(CLOUDS))
def test_unreachable_service_is_found_when_it_starts(name: str) -> None:
    async def run() -> None:
        cloud = CLOUDS[name]()
        async with serve(cloud) as url:
            pass
        async with Watch({name: url}) as watch_task:
            await watch_task.expect(0)
            cloud.warn()
            async with serve(cloud, port=int(url.rpartition(":")[2])):
                await watch_task.expect(1)

    quiet_loop.run(run())


def test_delays_grow_up_to_a_limit() -> None:
    async def run() -> None:
        at_s: list[float] = []

        async def handler(request: web.Request) -> web.StreamResponse:
            at_s.append(quiet_loop.now_s())
            return web.Response(status=500)

        async with serve(handler) as url, Watch({"gcp": url}):
            await asyncio.sleep(1.0)
        waits_s = [b - a for a, b in itertools.pairwise(at_s)]
        assert min(waits_s) >= 2 * POLL_S * 0.9
        assert min(waits_s[2:]) >= 5 * POLL_S * 0.9
        assert len(at_s) >= 6

    quiet_loop.run(run())


def test_error_of_the_callback_is_raised() -> None:
    def listener(_: PreemptionNotice) -> None:
        raise KeyError("ours")

    async def run() -> None:
        cloud = Aws()
        cloud.warn()
        async with serve(cloud) as url:
            await asyncio.wait_for(watch(listener, clouds=["aws"], base_urls={"aws": url}), 240)

    with pytest.raises(ExceptionGroup) as e:
        quiet_loop.run(run())
    assert e.group_contains(KeyError, match="ours")


def sockets() -> int:
    return sum(os.readlink(f"/proc/self/fd/{f}").startswith("socket") for f in os.listdir("/proc/self/fd") if _open(f))


def _open(descriptor: str) -> bool:
    return os.path.lexists(f"/proc/self/fd/{descriptor}")


def test_no_socket_is_left_open() -> None:
    async def run() -> None:
        before = sockets()
        gcp, aws = Gcp(), Aws()
        async with serve(gcp) as g, serve(aws) as a, serve(endless) as e:
            async with Watch({"gcp": g, "aws": a, "azure": e}) as watch_task:
                await watch_task.expect(0)  # GCP's long poll is in progress
            urls = dict.fromkeys(CLOUDS, e)
            await watch(print, clouds="auto", base_urls=urls, timeout_s=0.1)
        await asyncio.sleep(0.05)
        assert sockets() == before

    gc.collect()  # collect what earlier tests left behind
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        quiet_loop.run(run())
        gc.collect()
    assert [w for w in caught if issubclass(w.category, ResourceWarning)] == []
