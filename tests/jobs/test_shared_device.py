"""Whole services whose jobs share one device in every way that a fleet's file can ask for."""

from __future__ import annotations

import json
import os
import signal
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from tests.support.runs.job_service import JobService, alone

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def turns_of(service: JobService) -> list[dict[str, Any]]:
    path = service.folder / "turns.jsonl"
    whole = path.read_bytes().rpartition(b"\n")[0] if path.exists() else b""
    return [json.loads(line) for line in whole.splitlines()]


def hang_trainer_in_its_turn(service: JobService, job: str) -> None:
    """SIGSTOP its trainer until that has happened in a turn, and the service has killed it."""

    def killed() -> bool:
        return f"{job}: a process (train, pid" in (service.here / "up.log").read_text()

    def hung() -> bool:
        events = (service.folder / "jobs" / job / "events.jsonl").read_bytes().splitlines()
        ready = [json.loads(line)["pid"] for line in events if b'"trainer_ready"' in line]
        os.kill(ready[-1], signal.SIGSTOP)
        time.sleep(0.2)  # what it sent before is read
        held = service.client().get("/jobs")["devices"]["cpu0"]
        until = time.monotonic() + (20.0 if (held["job"], held["kind"]) == (job, "train") else 0.0)
        while not killed() and time.monotonic() < until:
            time.sleep(0.05)
        if not killed():  # it had no turn
            os.kill(ready[-1], signal.SIGCONT)
            time.sleep(0.05)
        return killed()

    service.until(hung, f"has killed the trainer of {job}")


def test_jobs_whose_trainers_sleep_and_co_run_end_with_the_weights_that_each_has_alone(tmp_path: Path) -> None:
    """There is room for no state besides that of the trainer that works."""
    fleet = "slice_s = 0.05\nco_running = true\ntrainer_state_gb = 0.000001\n"
    jobs = {"a": ("run.seed=1", "run.steps=6"), "b": ("run.seed=2", "run.steps=6")}
    with JobService(tmp_path, fleet, slots=1) as service:
        service.up()
        for name, sets in jobs.items():
            service.train(name, *sets)
        assert service.until_ended() == dict.fromkeys(jobs, "done")
        assert service.interrupt() == 0
        assert any(turn["woke_s"] for turn in turns_of(service)), "a state that slept came back"
        assert any(turn["beside"] for turn in turns_of(service)), "two turns at the same time"
        for name, sets in jobs.items():
            assert service.weights(name) == alone(tmp_path, name, *sets)


def test_job_that_would_miss_its_deadline_goes_first_and_continues_after_it_has_hung_in_its_turn(
    tmp_path: Path,
) -> None:
    """Two jobs that always want the one device: with equal shares, each would have half of it."""
    in_an_hour = time.strftime("%Y-%m-%dT%H:%M", time.localtime(time.time() + 3600))
    with JobService(tmp_path, "slice_s = 0.05\nturn_limit_s = 3\n", slots=1) as service:
        service.up()
        service.train("calm", "run.steps=100000")
        service.train("late", "run.steps=100000", options=("--deadline", in_an_hour))

        def used_s() -> dict[str, float]:
            used: dict[str, float] = defaultdict(float)
            for turn in turns_of(service):
                used[turn["job"]] += turn["end_s"] - turn["start_s"]
            return used

        service.until(lambda: all(service.jobs()[name]["eta_s"] for name in ("calm", "late")), "predicts the ends")
        assert service.jobs()["late"]["eta_s"] > 3600
        before = used_s()
        service.until(lambda: used_s()["late"] - before["late"] > 5.0, "gives the late job 5 s of the device")
        got = {name: used_s()[name] - before[name] for name in ("calm", "late")}
        assert got["calm"] < 0.5 * got["late"]
        hang_trainer_in_its_turn(service, "late")
        assert "s while others waited; it was killed" in (tmp_path / "up.log").read_text()
        before_step = service.jobs()["late"]["step"]
        service.until(lambda: service.jobs()["late"]["step"] > before_step, "continues the job")
