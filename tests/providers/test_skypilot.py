"""SkyPilot: the task file, read by SkyPilot's own parser where it is installed (`make test-fleet`), and job states."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.support.fleets.recorded_events import RecordedEvents
from tests.support.fleets.worker_sources import DRAINING, TOKEN, SkySource, Workers, running
from windfall.providers.skypilot import provider
from windfall.providers.skypilot.provider import parse_queue, parse_states, task
from windfall.providers.skypilot.section import SkyPilot


def example(**options: Any) -> dict[str, Any]:
    asked = SkyPilot(accelerators=["H100:1", "A100-80GB:1"], **options)
    return task(asked, url="https://h:8700", worker="sky1.1")


def test_spot_with_fallback() -> None:
    def choices(described: dict[str, Any]) -> list[bool]:
        return [choice["use_spot"] for choice in described["resources"]["any_of"]]

    assert choices(example()) == [True, True, False, False]
    assert choices(example(fallback=False)) == [True, True]
    assert choices(task(SkyPilot(kind="reserved"), url="u", worker="sky1.1")) == [False]
    assert "TOKEN" not in json.dumps(example())


@pytest.mark.parametrize(("worker", "job"), [(0, 0), (3, 3), (5, 0)])
def test_worker_without_controller_ends_its_job(tmp_path: Path, worker: int, job: int) -> None:
    """SkyPilot restarts a job that fails, and would rent machines for a run that is dead."""
    workers = Workers(tmp_path, f"raise SystemExit({worker})")
    env = {**os.environ, "PATH": workers.path, "WINDFALL_TOKEN": TOKEN}
    assert subprocess.run(["bash", "-c", example()["run"]], env=env, check=False).returncode == job


def test_file_is_what_skypilot_reads(tmp_path: Path) -> None:
    sky = pytest.importorskip("sky")
    path = tmp_path / "sky1.1.yaml"
    for made in (example(infra="aws/us-east-1"), example(cpus="8+")):
        path.write_text(json.dumps(made))
        read = sky.Task.from_yaml(str(path))
        choices = {(r.use_spot, next(iter(r.accelerators))) for r in read.resources}
        assert choices == {(spot, gpu) for spot in (True, False) for gpu in ("H100", "A100-80GB")}
        assert {r.job_recovery["max_restarts_on_errors"] for r in read.resources} == {3}
        assert "windfall worker --join https://h:8700" in read.run
        assert read.num_nodes == 1


def test_states() -> None:
    rows = [
        {"job_id": 2, "job_name": "a", "status": "RECOVERING"},
        {"job_id": 1, "job_name": "a", "status": "CANCELLED"},  # an older job of the same name
        {"job_id": 3, "job_name": "b", "status": "FAILED_SETUP"},
        {"job_id": 4, "job_name": "c", "status": "FAILED_NO_RESOURCE"},
        {"job_id": 5, "job_name": "d", "status": "SUCCEEDED"},
    ]
    jobs = parse_states(parse_queue("[warning] an old client\nFetching...\n" + json.dumps(rows)))
    assert {name: job.code for name, job in jobs.items()} == {"a": None, "b": 3, "c": -9, "d": 0}
    assert jobs["a"].waiting
    with pytest.raises(OSError, match="did not print JSON"):
        parse_queue("[broken")
    with pytest.raises(OSError, match="did not print JSON"):
        parse_queue("cannot reach the API server")
    live = [{"job_id": 6, "job_name": "e", "status": "RUNNING"}, {"job_id": 7, "job_name": "e", "status": "CANCELLED"}]
    assert parse_states(live)["e"].code is None, "a job that runs is not hidden by a newer one"


def test_job_of_a_launch_that_took_too_long_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(provider, "LAUNCH_TIMEOUT_S", 1.0)
    workers, events = Workers(tmp_path, DRAINING), RecordedEvents()

    async def main() -> None:
        async with SkySource().open(tmp_path, workers, events, 1) as source:
            (tmp_path / "fake_sky" / "slow_launch").touch()
            async with running(source):
                assert (await events.until(1, "started"))[0]["worker"] == "sky1.1"
                await workers.until(1)
            await workers.until(0, within_s=5.0)

    asyncio.run(main())
    assert len(workers.pids()) == 1
    assert not events.of("spawn_failed", "stuck")


def launch_again(folder: Path) -> None:
    """Launch the job of the first worker once more, by hand."""
    file = next((folder / "workers").glob("*.yaml"))
    command = ["sky", "jobs", "launch", "--name", file.stem, "--secret", "WINDFALL_TOKEN", str(file)]
    subprocess.run(command, env={**os.environ, "WINDFALL_TOKEN": TOKEN}, check=True, capture_output=True)


def test_cancel_that_fails_is_reported_and_two_jobs_of_one_name_are_both_canceled(tmp_path: Path) -> None:
    workers, events = Workers(tmp_path, DRAINING), RecordedEvents()

    async def main() -> None:
        async with SkySource().open(tmp_path, workers, events, 1) as source:
            async with running(source):
                await events.until(1, "started")
                launch_again(tmp_path)
                await workers.until(2)
                (tmp_path / "fake_sky" / "no_cancel").touch()
                source.target(0)
                (stuck,) = await events.until(1, "stuck")
                assert stuck["worker"] == "sky1.1"
                assert "cannot cancel" in stuck["error"]
                (tmp_path / "fake_sky" / "no_cancel").unlink()
            await workers.until(0, within_s=5.0)

    asyncio.run(main())


def test_job_of_no_worker_that_cannot_be_canceled_is_reported(tmp_path: Path) -> None:
    workers, events = Workers(tmp_path, DRAINING), RecordedEvents()

    async def main() -> None:
        async with SkySource().open(tmp_path, workers, events, 1) as source, running(source):
            await events.until(1, "started")
            source.target(0)
            await events.until(1, "exited")
            (tmp_path / "fake_sky" / "no_cancel").touch()
            launch_again(tmp_path)
            (stuck,) = await events.until(1, "stuck")
            assert stuck["worker"] == "jobs"
            assert "cannot cancel" in stuck["error"]
            (tmp_path / "fake_sky" / "no_cancel").unlink()
            await workers.until(0)

    asyncio.run(main())
