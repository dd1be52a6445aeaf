"""The rules that hold for every source of workers, with real processes: started on this machine, by programs that stand
in for Slurm, SkyPilot and Kubernetes, and on a real Ray cluster (`make test-ray`).

Not covered: real machines of a cloud, and what their own software does besides the parts in stand_ins/.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.fleets.recorded_events import RecordedEvents
from tests.support.fleets.worker_sources import DRAINING, SOURCES, Workers, kill, running

SLEEP = "import time; time.sleep(60)"
FAMILY = (
    "import subprocess, sys, time; "
    "child = subprocess.Popen([sys.executable, '-S', '-c', 'import time; time.sleep(60)']); "
    "open(f'{ME}-child.{child.pid}', 'w').close(); time.sleep(60)"
)


@pytest.fixture(scope="module", autouse=True)
def ray_cluster() -> Iterator[None]:
    """A Ray cluster with one node for workers, if Ray is installed."""
    if not any(source.name == "ray" for source in SOURCES):
        yield
        return
    from tests.support.servers.ray_nodes import cluster

    with cluster(nodes=1):
        yield


@pytest.fixture(params=SOURCES, ids=lambda source: source.name)
def source(request: pytest.FixtureRequest) -> Any:
    return request.param


def test_cancel_ends_all_workers_and_waits(source: Any, tmp_path: Path) -> None:
    workers, events = Workers(tmp_path, FAMILY), RecordedEvents()

    async def main() -> None:
        async with source.open(tmp_path, workers, events, 2) as provider:
            async with running(provider):
                await workers.until(4)  # each with a child
                started = await events.until(2, "started")
                assert all(provider.owns(f["worker"]) for f in started)
                assert len({f["worker"] for f in started}) == 2
                assert not provider.owns("somebody-else.1")
            await workers.until(0, within_s=3.0)
            assert (provider.started, provider.lost) == (2, 0)

    asyncio.run(main())


def test_killed_worker_is_replaced(source: Any, tmp_path: Path) -> None:
    workers, events = Workers(tmp_path, SLEEP), RecordedEvents()

    async def main() -> None:
        async with source.open(tmp_path, workers, events, 2) as provider, running(provider):
            before = await workers.until(2)
            await events.until(2, "started")
            kill(before[0])
            await workers.until(3, of="all")
            assert before[1] in await workers.until(2)

    asyncio.run(main())


def test_refused_worker_is_not_started_again_and_again(source: Any, tmp_path: Path) -> None:
    workers, events = Workers(tmp_path, "raise SystemExit(3)"), RecordedEvents()

    async def main() -> None:
        async with source.open(tmp_path, workers, events, 1) as provider, running(provider):
            assert provider.owns((await events.until(1, "refused"))[0]["worker"])
            count = -1
            for _ in range(20):  # Kubernetes restarts a worker in its pod until it has been scaled to 0
                if len(workers.pids()) == count:
                    break
                count = len(workers.pids())
                await asyncio.sleep(1.0)
            assert len(workers.pids()) == count
            assert not workers.alive()
            assert provider.lost == 0

    asyncio.run(main())


def test_target_scales_up_and_down_and_drains(source: Any, tmp_path: Path) -> None:
    workers, events = Workers(tmp_path, DRAINING), RecordedEvents()

    async def main() -> None:
        async with source.open(tmp_path, workers, events, 1) as provider, running(provider):
            (first,) = await workers.until(1)
            provider.target(3)
            await workers.until(3)
            await workers.until_ready(3)
            await asyncio.sleep(0.5)  # long enough to be seen as running
            provider.target(1)
            assert await workers.until(1) == [first]
            assert workers.drained() == (2 if source.drains else 0)
            provider.target(0)
            await workers.until(0)
            provider.target(1)
            await workers.until(1)
            assert provider.lost == 0

    asyncio.run(main())
