"""Ray: a run on a cluster of four nodes, two of which are killed in the middle of a step. Needs `make test-ray`."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.fleets.recorded_events import RecordedEvents
from tests.support.fleets.worker_sources import RaySource, Workers, employer, running
from tests.support.servers.ray_nodes import add_node, cluster, wait_until
from windfall.errors import WindfallError
from windfall.events.log import read
from windfall.providers.ray import provider as ray_provider
from windfall.providers.ray.provider import RayProvider
from windfall.providers.ray.section import Ray

RECIPE = """
[run]
name = "NAME"
steps = STEPS
device = "cpu"
threads = 1
deterministic = true
[env]
name = "arithmetic"
[rollout]
groups = 8
group_size = 4
max_tokens = 96
[train]
lr = 1e-3
[eval]
tasks = 0
[checkpoint]
every = 1
keep = 9
[fleet]
local = false
"""
ON_RAY = """
host = "0.0.0.0"
[fleet.ray]
address = "ADDRESS"
workers = 4
gpus = 0.0
worker_threads = 1
price_usd_per_h = 1.0
"""
ON_THIS_MACHINE = "workers = 1\n"


def start(folder: Path, name: str, fleet: str, steps: int) -> subprocess.Popen[bytes]:
    path = folder / f"{name}.toml"
    path.write_text(RECIPE.replace("NAME", name).replace("STEPS", str(steps)) + fleet)
    with (folder / f"{name}.out").open("wb") as out:
        return subprocess.Popen(
            [sys.executable, "-m", "windfall.run.cli", "train", str(path)], cwd=folder, stdout=out, stderr=out,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )  # fmt: skip


def generating(run: Path, count: int) -> bool:
    """Whether this number of workers generate at once, after the first step."""
    try:
        fleet = json.loads((run / "fleet.json").read_text())
    except (OSError, ValueError):
        return False
    return fleet["step"] >= 1 and sum(w["running"] > 0 for w in fleet["workers"]) >= count


def events(run: Path, kind: str, name: str) -> list[Any]:
    return [e for e in read(run / "events.jsonl") if (e["kind"], e["name"]) == (kind, name)]


def result(run: Path) -> tuple[list[Any], dict[str, bytes]]:
    """Rewards and numbers of tokens by step, and the weights of the last steps."""
    steps = [(e["step"], e["reward"], e["responses"], e["made"]) for e in events(run, "scalar", "step")]
    return steps, {p.parent.name: p.read_bytes() for p in run.glob("checkpoints/*/model.safetensors")}


@pytest.fixture(scope="module")
def four_nodes() -> Iterator[Any]:
    pytest.importorskip("ray")
    with cluster(nodes=4) as made:
        yield made


@pytest.mark.timeout(900)
def test_run_whose_nodes_are_killed_has_the_same_weights(tmp_path: Path, four_nodes: Any) -> None:
    """It goes on until two steps after the loss are complete, however many steps that takes. Should all responses have
    ended just before the nodes are killed, two others are killed."""
    run, out = tmp_path / "runs" / "disturbed", tmp_path / "disturbed.out"
    disturbed = start(tmp_path, "disturbed", ON_RAY.replace("ADDRESS", four_nodes.address), steps=10_000)

    def until(condition: Callable[[], bool], what: str) -> None:
        wait_until(condition, what, running=disturbed, out=out)

    def lost() -> list[Any]:
        return events(run, "instant", "worker_lost")

    def complete() -> int:
        return len(events(run, "scalar", "step"))

    try:
        for kill in range(1, 6):
            until(lambda: generating(run, 4), "four workers that generate")
            for node in list(four_nodes.worker_nodes)[:2]:
                four_nodes.remove_node(node, allow_graceful=False)
            until(lambda expected=2 * kill: len(lost()) >= expected, "two lost workers")
            if any(e["moved"] for e in lost()):
                break
            add_node(four_nodes)
            add_node(four_nodes)
        until(lambda expected=complete() + 2: complete() >= expected, "two more steps")
        disturbed.terminate()
        assert disturbed.wait(300) == 128 + signal.SIGTERM, out.read_text()
    finally:
        disturbed.kill()
    steps = events(run, "scalar", "step")
    assert sum(e["moved"] for e in steps) > 0, "responses were in progress"
    assert sum(e["lost_tokens"] for e in steps) == 0
    assert start(tmp_path, "undisturbed", ON_THIS_MACHINE, steps=len(steps)).wait(300) == 0
    numbers, weights = result(run)
    expected, expected_weights = result(tmp_path / "runs" / "undisturbed")
    assert numbers == expected
    assert len(weights) >= 3
    assert weights == expected_weights


def test_pending_worker_starts_on_a_new_node_and_a_lost_driver_is_replaced(tmp_path: Path, four_nodes: Any) -> None:
    """Two nodes are left by the test above, or four; each has room for one worker."""
    workers, events = Workers(tmp_path, "import time; time.sleep(120)"), RecordedEvents()
    nodes = len(four_nodes.worker_nodes)

    async def main() -> None:
        source = Ray(address=four_nodes.address, cpus=1.0, gpus=0.0, workers=nodes + 1, drain_s=2.0)
        provider = RayProvider(source, employer(tmp_path, workers, events))
        async with running(provider):
            before = await workers.until(nodes)
            await asyncio.sleep(1.0)
            assert len(workers.alive()) == nodes, "no room for another"
            add_node(four_nodes)
            await workers.until(nodes + 1)
            os.kill(events.of("started")[0]["pid"], signal.SIGKILL)
            await events.until(1, "restarted")
            for _ in range(600):  # Ray ends the actor of the dead driver
                alive = workers.alive()
                if len(alive) == nodes + 1 and not set(before) <= set(alive):
                    break
                await asyncio.sleep(0.1)
            assert len(workers.alive()) == nodes + 1
            assert len(set(before) & set(workers.alive())) == nodes - 1
        await workers.until(0, within_s=5.0)

    asyncio.run(main())


SUPERVISOR = """
import asyncio, sys
from pathlib import Path
from tests.support.fleets.worker_sources import RaySource, Workers

async def main(folder):
    workers = Workers(folder, "import time; time.sleep(120)")
    async with RaySource().open(folder, workers, lambda *_, **__: None, 2) as provider:
        await provider.run()

asyncio.run(main(Path(sys.argv[1])))
"""


def test_killed_supervisor_leaves_no_process(tmp_path: Path, four_nodes: Any) -> None:
    workers = Workers(tmp_path, "import time; time.sleep(120)")
    path = os.pathsep.join([str(Path(__file__).parents[2]), os.environ["PYTHONPATH"]])
    environment = {**os.environ, "PYTHONPATH": path, "TEST_RAY_ADDRESS": four_nodes.address}
    with subprocess.Popen([sys.executable, "-c", SUPERVISOR, str(tmp_path)], env=environment) as supervisor:
        try:
            wait_until(lambda: len(workers.alive()) == 2, "two workers")
        finally:
            supervisor.kill()
    wait_until(lambda: not workers.alive(), "the end of the workers", within_s=15.0)


def test_missing_cluster_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("ray")
    monkeypatch.setenv("TEST_RAY_ADDRESS", "127.0.0.1:1")
    workers, events = Workers(tmp_path, ""), RecordedEvents()

    async def main() -> None:
        async with RaySource().open(tmp_path, workers, events, 1) as provider, running(provider):
            await events.until(1, "spawn_failed")

    asyncio.run(main())
    assert "cannot connect to the Ray cluster at 127.0.0.1:1" in events.of("spawn_failed")[0]["error"]


def test_absence_of_ray_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(WindfallError, match=r"pip install -e '.*\[ray\]'"):
        ray_provider.check_installed()
