"""The rules of every provider, with workers started as fresh processes and forked by the fork server.

Not covered: workers on other machines. Times here are bounds for a busy machine, not measurements.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from tests.support.fleets.recorded_events import RecordedEvents
from windfall.errors import WindfallError
from windfall.processes import process
from windfall.processes.fork_client import ForkClient
from windfall.processes.process import Handle
from windfall.providers.base import OnEvent, Provider, Spawn
from windfall.providers.slots import SlotProvider
from windfall.providers.trace import Change
from windfall.providers.trace_provider import TraceProvider
from windfall.types import Lease

SLEEP = "import time; time.sleep(60)"
FAMILY = "import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)']); "
Make = Callable[..., Provider]


def _local(spawn: Spawn, *, on_event: OnEvent, workers: int = 3) -> Provider:
    return SlotProvider(spawn, workers, on_event=on_event, grace_s=0.5)


def _trace(spawn: Spawn, *, on_event: OnEvent, workers: int = 3) -> Provider:
    changes = [Change(at_s=0.0, node=f"n{k + 1}", up=True) for k in range(workers)]
    return TraceProvider(spawn, changes, speedup=10.0, on_event=on_event, grace_s=0.5)


@pytest.fixture(params=[_local, _trace], ids=["local", "trace"])
def make(request: pytest.FixtureRequest) -> Make:
    return request.param


@pytest.fixture(params=["process", "fork server"])
def spawning(request: pytest.FixtureRequest, tmp_path: Path, toy_env: dict[str, str]) -> Callable[..., Any]:
    """`async with spawning(code) as spawn`."""

    @asynccontextmanager
    async def open_(code: str) -> AsyncIterator[Spawn]:
        client = ForkClient(entry="toy:main", modules=["json"], log=tmp_path / "fork_server.log", env=toy_env)

        async def spawn(name: str, lease: Lease) -> Handle:
            log = tmp_path / "workers" / f"{name}.log"
            if request.param == "fork server":
                return await client.start(name=name, argv=["x", code], env=toy_env, log=log)
            return process.start(name=name, argv=[sys.executable, "-S", "-c", code], env=toy_env, log=log)

        async with client:
            yield spawn

    return open_


@asynccontextmanager
async def running(provider: Provider) -> AsyncIterator[None]:
    task = asyncio.create_task(provider.run())
    try:
        yield
    finally:
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asyncio.wait_for(task, 240)


def test_cancel_ends_all_workers_and_waits(
    make: Make, spawning: Callable[..., Any], gone: Callable[..., bool], alive: Callable[[int], bool]
) -> None:
    events = RecordedEvents()

    async def main() -> Provider:
        async with spawning(FAMILY + "time.sleep(60)") as spawn:
            provider = make(spawn, on_event=events)
            async with running(provider):
                started = await events.until(3, "started")
                assert len({f["worker"] for f in started}) == 3
            # The workers have ended. Their children got SIGKILL, and are gone as soon as the kernel has handled it.
            assert all(not alive(f["pid"]) for f in started)
            left = [pid for f in started for pid in _group(f["pid"])]
            assert not left or gone(left)
            return provider

    provider = asyncio.run(main())
    assert (provider.started, provider.lost) == (3, 0)
    assert [f["by"] for f in events.of("exited")] == ["stopped"] * 3


def _group(pgid: int) -> list[int]:
    """The running processes of a group."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                state, _, group = (entry / "stat").read_text().rpartition(")")[2].split()[:3]
            except (FileNotFoundError, ProcessLookupError):
                continue
            if int(group) == pgid and state != "Z":
                found.append(int(entry.name))
    return found


def test_killed_worker_is_replaced_by_a_new_one(make: Make, spawning: Callable[..., Any]) -> None:
    events = RecordedEvents()

    async def main() -> Provider:
        async with spawning(SLEEP) as spawn:
            provider = make(spawn, on_event=events)
            async with running(provider):
                victim = (await events.until(3, "started"))[1]
                os.kill(victim["pid"], signal.SIGKILL)
                (new,) = await events.until(1, "restarted")
                assert new["instead_of"] == victim["worker"]
                assert new["worker"] == victim["worker"].removesuffix("1") + "2"
                assert new["pid"] != victim["pid"]
            return provider

    provider = asyncio.run(main())
    assert (provider.started, provider.lost) == (4, 1)
    assert events.of("exited")[0]["code"] == -signal.SIGKILL
    assert events.of("exited")[0]["by"] == "itself"


def test_worker_that_keeps_dying_is_restarted_with_growing_delays(make: Make, spawning: Callable[..., Any]) -> None:
    events = RecordedEvents()

    async def main() -> float:
        async with spawning("raise SystemExit(1)") as spawn:
            began = time.monotonic()
            async with running(make(spawn, on_event=events, workers=1)):
                await events.until(2, "restarted")
                return time.monotonic() - began

    assert asyncio.run(main()) >= 0.2 + 0.4
    assert [f["after_s"] for f in events.of("restarted")] == [0.2, 0.4]


def test_refused_worker_is_not_restarted(make: Make, spawning: Callable[..., Any]) -> None:
    events = RecordedEvents()

    async def main() -> Provider:
        async with spawning("raise SystemExit(3)") as spawn:
            provider = make(spawn, on_event=events)
            async with running(provider):
                await events.until(3, "refused")
                await asyncio.sleep(0.3)
            return provider

    provider = asyncio.run(main())
    assert (provider.started, provider.lost) == (3, 0)


def test_worker_that_ignores_sigterm_is_killed_after_the_grace_period(
    make: Make, spawning: Callable[..., Any], tmp_path: Path
) -> None:
    events = RecordedEvents()

    async def main() -> None:
        stubborn = "import signal; signal.signal(15, signal.SIG_IGN); print('x', flush=True); " + SLEEP
        async with spawning(stubborn) as spawn, running(make(spawn, on_event=events, workers=1)):
            (started,) = await events.until(1, "started")
            while not (tmp_path / "workers" / f"{started['worker']}.log").read_text():
                await asyncio.sleep(0.01)

    asyncio.run(main())
    (exited,) = events.of("exited")
    assert (exited["code"], exited["by"]) == (-signal.SIGKILL, "stopped")
    assert exited["lived_s"] >= 0.5


def test_spawn_that_loses_its_cancellation_leaves_no_worker(make: Make, spawning: Callable[..., Any]) -> None:
    events = RecordedEvents()

    async def main() -> None:
        async with spawning(SLEEP) as real:
            began = asyncio.Event()

            async def spawn(name: str, lease: Lease) -> Handle:
                began.set()
                with suppress(asyncio.CancelledError):
                    await asyncio.sleep(60)
                return await real(name, lease)

            async with running(make(spawn, on_event=events, workers=1)):
                await began.wait()

    asyncio.run(main())
    assert [f["by"] for f in events.of("exited")] == ["stopped"]


def test_spawn_is_retried_after_an_oserror(make: Make, spawning: Callable[..., Any]) -> None:
    events = RecordedEvents()

    async def main() -> Provider:
        async with spawning(SLEEP) as real:
            tries: list[str] = []

            async def spawn(name: str, lease: Lease) -> Handle:
                tries.append(name)
                if len(tries) <= 2:
                    raise OSError("no memory to fork")
                return await real(name, lease)

            provider = make(spawn, on_event=events, workers=1)
            async with running(provider):
                await events.until(1, "started")
            return provider

    assert asyncio.run(main()).started == 1
    assert len(events.of("spawn_failed")) == 2


def test_user_error_ends_the_provider_and_its_workers(
    make: Make, spawning: Callable[..., Any], gone: Callable[..., bool]
) -> None:
    events = RecordedEvents()

    async def main() -> None:
        async with spawning(SLEEP) as real:

            async def spawn(name: str, lease: Lease) -> Handle:
                if name[1] == "3":
                    await events.until(2, "started")
                    raise WindfallError("no such model")
                return await real(name, lease)

            with pytest.raises(WindfallError, match="no such model"):
                await asyncio.wait_for(make(spawn, on_event=events).run(), 240)

    asyncio.run(main())
    assert len(events.of("exited")) == 2
    assert gone(f["pid"] for f in events.of("started"))


def test_target_can_be_set_at_any_time(make: Make, spawning: Callable[..., Any]) -> None:
    """The effect depends on the provider; the contract is only that it may be called."""
    events = RecordedEvents()

    async def main() -> None:
        async with spawning(SLEEP) as spawn:
            provider = make(spawn, on_event=events)
            provider.target(2)
            async with running(provider):
                provider.target(1)
                await events.until(1, "started")
            provider.target(0)

    asyncio.run(main())
