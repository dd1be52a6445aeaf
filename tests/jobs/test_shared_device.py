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

from tests.support.job_service import JobService, alone

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def turns_of(service: JobService) -> list[dict[str, Any]]:
    path = service.folder / "turns.jsonl"
    whole = path.read_bytes().rpartition(b"\n")[0] if path.exists() else b""
    return [json.loads(line) for line in whole.splitlines()]


def stop_trainer_in_its_turn(service: JobService, job: str) -> None:
    """SIGSTOP its trainer, and let it go on if it had no turn then."""

    def stopped() -> bool:
        events = (service.folder / "jobs" / job / "events.jsonl").read_bytes().splitlines()
        ready = [json.loads(line)["pid"] for line in events if b'"trainer_ready"' in line]
        os.kill(ready[-1], signal.SIGSTOP)
        time.sleep(2.5)  # longer than the service needs to write who has the device
        held = json.loads((service.folder / "jobs.json").read_text())["devices"]["cpu0"]
        if (held["job"], held["kind"]) == (job, "train"):
            return True
        os.kill(ready[-1], signal.SIGCONT)
        time.sleep(0.05)
        return False

    service.until(stopped, f"has given a turn to the trainer of {job}")


def test_jobs_whose_trainers_sleep_co_run_and_hang_end_with_the_weights_that_each_has_alone(tmp_path: Path) -> None:
    """There is room for no state besides that of the trainer that works."""
    fleet = "slice_s = 0.05\nco_running = true\ntrainer_state_gb = 0.000001\nturn_limit_s = 8\n"
    jobs = {"a": ("run.seed=1", "run.steps=6"), "b": ("run.seed=2", "run.steps=6")}
    with JobService(tmp_path, fleet, slots=1) as service:
        service.up()
        for name, sets in jobs.items():
            service.train(name, *sets)
        service.until(lambda: {t["job"] for t in turns_of(service) if t["woke_s"]} == {"a", "b"}, "has let both sleep")
        stop_trainer_in_its_turn(service, "a")
        assert service.until_ended() == dict.fromkeys(jobs, "done")
        assert service.interrupt() == 0
        said = (tmp_path / "up.log").read_text()
        assert "a: a process (train, pid" in said
        assert "s while others waited; it was killed" in said
        assert any(turn["beside"] for turn in turns_of(service)), "two turns at the same time"
        for name, sets in jobs.items():
            assert service.weights(name) == alone(tmp_path, name, *sets)


def test_job_that_would_miss_its_deadline_goes_first(tmp_path: Path) -> None:
    """Two jobs that always want the one device: with equal shares, each would have half of it."""
    in_an_hour = time.strftime("%Y-%m-%dT%H:%M", time.localtime(time.time() + 3600))
    with JobService(tmp_path, "slice_s = 0.05\n", slots=1) as service:
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
