"""SkyPilot: the task file, read by SkyPilot's own parser where it is installed (`make test-fleet`), and job states."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from fleet.sources import COMMAND

from windfall.fleet.skypilot.provider import parse_states
from windfall.fleet.skypilot.task import SkyPilotOptions, task
from windfall.fleet.worker_command import WorkerCommand
from windfall.launch.worker_sources import to_yaml
from windfall.types import Lease


def example(**options: Any) -> dict[str, Any]:
    asked = SkyPilotOptions(accelerators=["H100:1", "A100-80GB:1"], **options)
    return task(asked, COMMAND, url="https://h:8700", worker="sky1.1")


def test_spot_with_fallback() -> None:
    def choices(described: dict[str, Any]) -> list[bool]:
        return [choice["use_spot"] for choice in described["resources"]["any_of"]]

    assert choices(example()) == [True, True, False, False]
    assert choices(example(fallback=False)) == [True, True]
    reserved = WorkerCommand(lease=Lease(kind="reserved"))
    assert choices(task(SkyPilotOptions(), reserved, url="u", worker="sky1.1")) == [False]
    assert "TOKEN" not in json.dumps(example())


def test_file_is_what_skypilot_reads(tmp_path: Path) -> None:
    sky = pytest.importorskip("sky")
    path = tmp_path / "sky1.1.yaml"
    for text in (json.dumps(example(infra="aws/us-east-1")), to_yaml(example(cpus="8+"))):
        path.write_text(text)
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
    jobs = parse_states("Fetching...\n" + json.dumps(rows))
    assert {name: job.code for name, job in jobs.items()} == {"a": None, "b": 3, "c": -9, "d": 0}
    assert jobs["a"].waiting
    with pytest.raises(OSError, match="did not print JSON"):
        parse_states("[broken")
