"""Whole services with jobs on the CPU, as users see them: results, bills, kills, and jobs that misbehave."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from tests.support.job_service import JobService, alone

pytestmark = pytest.mark.timeout(600)
SEEDS = {"a": "run.seed=1", "b": "run.seed=2", "c": "run.seed=3"}


def bills_add_up(service: JobService) -> None:
    """The bills of all jobs and of idle time are the bill of the machine, which is its time."""
    found = json.loads((service.folder / "jobs.json").read_text())
    jobs = sum(job["usd"] for job in found["jobs"].values())
    assert found["bill"]["usd"] == pytest.approx(jobs + found["bill"]["idle_usd"], rel=1e-9)
    seconds = sum(d["idle_s"] + sum(d["used_s"].values()) for d in found["devices"].values())
    assert found["bill"]["usd"] == pytest.approx(seconds * 3.6 / 3600, rel=1e-9)
    one = [d["idle_s"] + sum(d["used_s"].values()) for d in found["devices"].values()]
    assert max(one) - min(one) < 0.1, "every device was there for the same time"


def test_two_jobs_end_with_the_weights_that_each_has_alone(tmp_path: Path) -> None:
    began = time.monotonic()
    with JobService(tmp_path) as service:
        service.up()
        for name in "ab":
            said = service.train(name, SEEDS[name], options=("--share", "2"))
            assert f"its token is in {service.folder}/jobs/{name}/token" in said
        assert service.until_ended() == {"a": "done", "b": "done"}
        assert service.interrupt() == 0
        bills_add_up(service)
        found = json.loads((service.folder / "jobs.json").read_text())
        for name in "ab":
            assert found["jobs"][name]["usd"] > 0
            assert (found["jobs"][name]["step"], found["jobs"][name]["share"]) == (2, 2.0)
        assert found["bill"]["usd"] <= 2 * (time.monotonic() - began) * 3.6 / 3600
        turns = [json.loads(line) for line in (service.folder / "turns.jsonl").read_text().splitlines()]
        assert {(turn["job"], turn["kind"]) for turn in turns} >= {("a", "train"), ("b", "train")}
        for name in "ab":
            assert service.weights(name) == alone(tmp_path, name, SEEDS[name])


def killed_again_and_again(folder: Path, kills: int, steps: int) -> None:
    sets = [f"run.steps={steps}", "checkpoint.every=1"]
    with JobService(folder) as service:
        service.up()
        for name in SEEDS:
            service.train(name, SEEDS[name], *sets)
        for kill in range(kills):
            # At another moment every time: while jobs start, generate, train, or are written to disk.
            time.sleep(0.2 + 3.0 * (kill * 0.618 % 1))
            service.kill()
            service.up()
            assert set(service.states()) == set(SEEDS)
        assert service.until_ended(within_s=400) == dict.fromkeys(SEEDS, "done")
        assert service.interrupt() == 0
        bills_add_up(service)
        for name in SEEDS:
            assert service.weights(name) == alone(folder, name, SEEDS[name], *sets)


def test_killed_service_loses_no_job(tmp_path: Path) -> None:
    killed_again_and_again(tmp_path, kills=3, steps=2)


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_service_that_is_killed_twenty_times_loses_no_job(tmp_path: Path) -> None:
    killed_again_and_again(tmp_path, kills=20, steps=8)
