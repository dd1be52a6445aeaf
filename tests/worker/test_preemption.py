"""Preemption notices of AWS, GCP and Azure, and SIGTERM.

Not covered: the real services; IPv6; containers that cannot reach the address.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
from typing import Any

import pytest
from aiohttp import web

from tests.support import quiet_loop
from tests.support.hostile.metadata_services import (
    CLOUDS,
    EVENTS,
    POLL_S,
    TIMEOUT_S,
    Aws,
    Azure,
    Gcp,
    Watch,
    endless,
    hang,
    says,
    serve,
)  # fmt: skip
from windfall.errors import WindfallError
from windfall.worker.preemption import PreemptionNotice, watch


def test_aws_notice_is_reported_once() -> None:
    async def run() -> None:
        cloud = Aws()
        async with serve(cloud) as url, Watch({"aws": url}) as watch_task:
            await watch_task.expect(0)
            cloud.warn()
            (notice,) = await watch_task.expect(1)
            assert notice.source == "aws"
            assert notice.left_s == pytest.approx(120, abs=3)
            assert "terminate" in notice.detail
            cloud.action = {"action": "stop", "time": "2017-09-18T08:22:00Z"}
            assert (await watch_task.expect(2))[1].left_s == 0.0
            cloud.action = {"action": "hibernate", "time": "at once"}
            assert (await watch_task.expect(3))[2].left_s is None

    quiet_loop.run(run())


def test_gcp_is_polled_with_pauses() -> None:
    async def run() -> None:
        cloud = Gcp(waits=False)
        async with serve(cloud) as url, Watch({"gcp": url}, poll_s=0.1) as watch_task:
            await asyncio.sleep(0.45)
            assert 2 <= len(cloud.asked) <= 5
            cloud.warn()
            await watch_task.expect(1)

    quiet_loop.run(run())


def test_gcp_answer_without_its_flavor_is_ignored() -> None:
    async def run() -> None:
        cloud = Gcp(flavor="Vanilla", waits=False)
        cloud.warn()
        async with serve(cloud) as url, Watch({"gcp": url}) as watch_task:
            await watch_task.expect(0)
            cloud.flavor = "Google"
            await watch_task.expect(1)

    quiet_loop.run(run())


def test_azure_reports_only_preemptions_of_this_machine() -> None:
    async def run() -> None:
        cloud = Azure()
        async with serve(cloud) as url, Watch({"azure": url}) as watch_task:
            cloud.warn(Resources=["spot_8", "spot_77"])
            cloud.warn(EventType="Reboot")
            cloud.warn(EventType="Freeze", NotBefore="", EventStatus="Started")
            cloud.warn(EventStatus="Canceled")
            await watch_task.expect(0)
            cloud.warn()
            (notice,) = await watch_task.expect(1)
            assert notice.source == "azure"
            assert notice.left_s == pytest.approx(30, abs=3)
            cloud.events[-1] |= {"EventStatus": "Started", "NotBefore": ""}
            await watch_task.expect(1)
            cloud.warn(EventType="Terminate", EventStatus="Started", NotBefore="")
            assert (await watch_task.expect(2))[1].left_s == 0.0

    quiet_loop.run(run())


def test_azure_reports_every_event_while_the_machine_name_is_unknown() -> None:
    async def run() -> None:
        cloud = Azure(name=None)
        async with serve(cloud) as url, Watch({"azure": url}) as watch_task:
            cloud.warn(Resources=["spot_8"])
            await watch_task.expect(1)
            cloud.name = "spot_7"
            await asyncio.sleep(4 * POLL_S)
            cloud.warn(Resources=["spot_8"])
            await watch_task.expect(1)
            cloud.warn(Resources=None)
            await watch_task.expect(2)

    quiet_loop.run(run())


def test_first_azure_request_has_a_longer_timeout() -> None:
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

        async with serve(handler) as url, Watch({"azure": url}) as watch_task:
            await asyncio.sleep(3 * TIMEOUT_S)
            assert asked == 1
            await watch_task.expect(1)
            cloud.warn()
            await watch_task.expect(2, within_s=3)  # after the first answer the usual timeout applies

    quiet_loop.run(run())


@pytest.mark.parametrize("name", list(CLOUDS))
def test_auto_finds_the_present_service(name: str) -> None:
    async def run() -> None:
        cloud, foreign = CLOUDS[name](), 0
        others = {"aws": "/latest", "gcp": "/computeMetadata", "azure": "/metadata"}
        del others[name]

        async def handler(request: web.Request) -> web.StreamResponse:
            nonlocal foreign
            foreign += request.path.startswith(tuple(others.values()))
            return await cloud(request)

        args: dict[str, Any] = {"clouds": "auto", "timeout_s": 1.0}
        # One address for all three services, as on a real machine.
        async with serve(handler) as url, Watch(dict.fromkeys(CLOUDS, url), **args) as watch_task:
            await watch_task.expect(0)
            cloud.warn()
            assert [n.source for n in await watch_task.expect(1)] == [name]
        assert foreign == 2, "each other service is probed once and never again"

    quiet_loop.run(run())


@pytest.mark.parametrize("answer", ["refused", "hang", "endless", "web server", "yes to all"])
def test_auto_returns_if_there_is_no_service(answer: str) -> None:
    async def run() -> None:
        web_server, yes = says(b"<html>hello you</html>"), says(b"yes, of course")
        handler = {"hang": hang, "endless": endless, "web server": web_server, "yes to all": yes}.get(answer, hang)
        notices: list[PreemptionNotice] = []
        async with serve(handler) as url:
            if answer == "refused":
                url = "http://127.0.0.1:1"
            began_s = quiet_loop.now_s()
            urls = dict.fromkeys(CLOUDS, url)
            await asyncio.wait_for(watch(notices.append, clouds="auto", base_urls=urls, timeout_s=0.5), 240)
            assert quiet_loop.now_s() - began_s < 1.2, "all services must be probed at the same time"
        assert notices == []

    quiet_loop.run(run())


def test_unknown_cloud_is_refused() -> None:
    with pytest.raises(WindfallError, match="Did you mean 'azure'"):
        quiet_loop.run(watch(print, clouds=["azur"]))


def test_sigterm_causes_one_notice_and_no_exit() -> None:
    code = """
import asyncio, os, signal
from windfall.worker.preemption import on_sigterm
async def run():
    on_sigterm(asyncio.get_running_loop(), lambda n: print(n.source, n.left_s, flush=True))
    for _ in range(2):
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.sleep(0.05)
    print("alive")
asyncio.run(run())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30)
    assert (done.stdout.splitlines(), done.returncode) == (["sigterm None", "alive"], 0), done.stderr
