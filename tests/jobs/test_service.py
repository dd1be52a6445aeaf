"""Whole services with jobs on the CPU, as users see them: results, bills, kills, and jobs that misbehave."""

from __future__ import annotations

import functools
import json
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.hostile import environments as hostile
from tests.support.runs.job_service import JobService, alone
from tests.support.servers.certificates import self_signed

pytestmark = pytest.mark.timeout(600)
SEEDS = {"a": "run.seed=1", "b": "run.seed=2", "c": "run.seed=3"}
Alone = Callable[..., bytes]


@pytest.fixture(scope="module")
def trained_alone(tmp_path_factory: pytest.TempPathFactory) -> Alone:
    """The weights of a job's recipe, trained alone; each is trained once."""
    return functools.cache(lambda name, *sets: alone(tmp_path_factory.mktemp("alone"), name, SEEDS[name], *sets))


def bills_add_up(service: JobService) -> None:
    """The bills of all jobs and of idle time are the bill of the machine, which is its time."""
    found = json.loads((service.folder / "jobs.json").read_text())
    jobs = sum(job["usd"] for job in found["jobs"].values()) + found["bill"]["removed_usd"]
    assert found["bill"]["usd"] == pytest.approx(jobs + found["bill"]["idle_usd"], rel=1e-9)
    seconds = sum(d["idle_s"] + sum(d["used_s"].values()) for d in found["devices"].values())
    assert found["bill"]["usd"] == pytest.approx(seconds * 3.6 / 3600, rel=1e-9)
    one = [d["idle_s"] + sum(d["used_s"].values()) for d in found["devices"].values()]
    assert max(one) - min(one) < 0.1, "every device was there for the same time"


@pytest.mark.slow
def test_two_jobs_share_devices_and_train_as_alone(tmp_path: Path, trained_alone: Alone) -> None:
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
        assert service.weights("a") == trained_alone("a")
        assert service.weights("b") != service.weights("a")


def killed_again_and_again(service: JobService, kills: int, *sets: str) -> None:
    service.up()
    for name in SEEDS:
        service.train(name, SEEDS[name], "checkpoint.every=1", *sets)
    for kill in range(kills):
        # At another moment every time: while jobs start, generate, train, or are written to disk.
        time.sleep(0.2 + 3.0 * (kill * 0.618 % 1))
        service.kill()
        service.up()
        assert set(service.states()) == set(SEEDS)
    assert service.until_ended(within_s=400) == dict.fromkeys(SEEDS, "done")
    assert service.interrupt() == 0
    bills_add_up(service)


@pytest.mark.slow
def test_killed_service_loses_no_job(tmp_path: Path, trained_alone: Alone) -> None:
    with JobService(tmp_path) as service:
        killed_again_and_again(service, 3)
        for name in SEEDS:
            assert service.weights(name) == trained_alone(name)


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_service_that_is_killed_twenty_times_loses_no_job(tmp_path: Path, trained_alone: Alone) -> None:
    with JobService(tmp_path) as service:
        killed_again_and_again(service, 20, "run.steps=8")
        for name in SEEDS:
            assert service.weights(name) == trained_alone(name, "run.steps=8")


def using(env: type, **options: object) -> tuple[str, ...]:
    words = ", ".join(f"{key} = {json.dumps(value)}" for key, value in {"from_task": 1, **options}.items())
    keys = ("env.name=custom", f"env.factory={hostile.factory(env)}", f"env.options={{ {words} }}")
    return (*keys, "rollout.reward_timeout_s=60")


@pytest.mark.slow
def test_jobs_that_misbehave_harm_only_themselves(tmp_path: Path, trained_alone: Alone) -> None:
    fleet = "jobs_at_once = 5\n[limits]\nprocesses = 60\nmemory_gb = 0.8\n"
    pids = tmp_path / "pids"
    with JobService(tmp_path, fleet) as service:
        service.up()
        service.train("bomb", *using(hostile.StartsPrograms, file=str(pids), count=80))
        service.train("hungry", *using(hostile.EatsMemory, mb=1200))
        asleep = using(hostile.Sleeps)
        service.train("asleep", *asleep, "rollout.reward_timeout_s=1", "rollout.reward_tries=1")
        service.train("poor", "run.steps=100000", options=("--max-usd", "0.001"))
        service.train("a", SEEDS["a"])
        states = service.until_ended()
        assert states == {
            "bomb": "failed", "hungry": "failed", "asleep": "failed", "poor": "over_budget", "a": "done",
        }  # fmt: skip
        jobs = service.jobs()
        assert "more than limits.processes = 60" in jobs["bomb"]["reason"]
        assert "more than the 0.8 GB" in jobs["hungry"]["reason"]
        assert "got a reward" in jobs["asleep"]["reason"]
        assert "it has spent $0.001" in jobs["poor"]["reason"]
        assert 0.001 <= jobs["poor"]["usd"] < 0.05
        left = [int(pid) for pid in pids.read_text().split()]
        service.until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in left), "has ended the bomb")
        said = service.command("resume", "poor", "--on", str(service.folder), status=2)
        assert "it has spent" not in said
        assert "has spent $0.00" in said
        assert "poor is" in service.command("resume", "poor", "--on", str(service.folder), "--max-usd", "9")
        service.until(lambda: service.states()["poor"] == "running", "runs it again")
        assert "poor is stopping" in service.command("stop", "poor", "--on", str(service.folder))
        assert service.until_ended("poor")["poor"] == "stopped"
        service.interrupt()
        bills_add_up(service)
        assert service.weights("a") == trained_alone("a")
        service.up()
        assert "poor is removed" in service.command("jobs", "poor", "--remove", "--on", str(service.folder))
        assert not (service.folder / "jobs/poor").exists()
        service.interrupt()
        bills_add_up(service)


CRASHES = """
import os, sys
if "_controller" in sys.argv:
    os.kill(os.getpid(), 9)
"""


@pytest.mark.slow
def test_job_that_crashes_in_a_loop_fails_alone(tmp_path: Path, trained_alone: Alone) -> None:
    """Its controller dies at every start; restarts back off, and then the job fails with the reason."""
    with JobService(tmp_path) as service:
        service.up()
        (tmp_path / "bad").mkdir()
        (tmp_path / "bad/sitecustomize.py").write_text(CRASHES)  # submitted from there, and found by its processes
        service.submit("crashes", directory=str(tmp_path / "bad"))
        service.train("a", SEEDS["a"])
        assert service.until_ended() == {"crashes": "failed", "a": "done"}
        reason = service.jobs()["crashes"]["reason"]
        assert "the controller was killed (SIGKILL) (16 times in a row, with no new step in between)" in reason
        assert service.weights("a") == trained_alone("a")


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_twenty_queued_jobs_all_end_and_leave_nothing(tmp_path: Path) -> None:
    names = [f"job-{number}" for number in range(20)]
    with JobService(tmp_path, "jobs_at_once = 3\n") as service:
        service.up()
        for number, name in enumerate(names):
            service.submit(name, directory=str(tmp_path), priority=int(number == 19))
        running: set[int] = set()

        def ended() -> bool:
            states = [*service.states().values()]
            running.add(states.count("running"))
            return states.count("done") == 20

        service.until(ended, "has ended all jobs", 1200)
        assert max(running) == 3
        files = len(list(Path(f"/proc/{service.pid}/fd").iterdir()))
        assert files < 60, "files of ended jobs are closed"
        children = Path(f"/proc/{service.pid}/task/{service.pid}/children").read_text().split()
        assert len(children) == 1, "only the process that others are forked from"
        started = {name: job["started_s"] for name, job in service.jobs().items()}
        assert sorted(names, key=started.__getitem__).index("job-19") <= 3, "its priority is higher"
        assert service.interrupt() == 0
        bills_add_up(service)


@pytest.mark.slow
def test_stopped_service_saves_all_jobs_and_continues_them(tmp_path: Path, trained_alone: Alone) -> None:
    with JobService(tmp_path) as service:
        service.up()
        service.train("a", SEEDS["a"])
        service.until(lambda: (service.folder / "jobs/a/events.jsonl").exists(), "has started the job")
        assert service.interrupt() == 0
        saved = json.loads((service.folder / "jobs/a/job.json").read_text())
        assert saved["state"] in ("queued", "done")
        service.up()
        assert service.until_ended() == {"a": "done"}
        assert service.weights("a") == trained_alone("a")


@pytest.mark.slow
def test_machine_that_joins_works_for_the_jobs_and_is_billed(tmp_path: Path, trained_alone: Alone) -> None:
    with JobService(tmp_path) as service:
        service.up()
        machine = service.join("m")
        try:
            service.until(lambda: service.client().get("/jobs")["bill"]["machines"] == ["m"], "sees the machine")
            service.train("long", "run.steps=100000")

            def works() -> bool:
                return service.client().get("/jobs")["devices"]["m/cpu0"]["used_s"].get("long", 0.0) > 0

            service.until(works, "uses the machine")
            service.train("a", SEEDS["a"], "run.steps=4")
            assert service.until_ended("a")["a"] == "done"
            service.command("stop", "long")
            assert service.until_ended()["long"] == "stopped"
            machine.send_signal(signal.SIGINT)
            assert machine.wait(60) == 0, (tmp_path / "m.log").read_text()
        finally:
            machine.kill()
        assert '"m-w1.1' in (service.folder / "jobs/long/events.jsonl").read_text()
        turns = [json.loads(line) for line in (service.folder / "turns.jsonl").read_text().splitlines()]
        there_s = sum(turn["end_s"] - turn["start_s"] for turn in turns if turn["device"] == "m/cpu0")
        found = service.client().get("/jobs")
        device = found["devices"]["m/cpu0"]
        here = sum(d["idle_s"] + sum(d["used_s"].values()) for n, d in found["devices"].items() if n != "m/cpu0")
        there = device["idle_s"] + sum(device["used_s"].values())
        assert found["bill"]["usd"] == pytest.approx((here * 3.6 + there * 7.2) / 3600, rel=1e-6)
        assert there_s == pytest.approx(sum(device["used_s"].values()), rel=1e-3), "the timeline shows what was billed"
        assert service.weights("a") == trained_alone("a", "run.steps=4")


@pytest.mark.slow
def test_machine_that_crashed_joins_again_and_waits_for_the_service(tmp_path: Path) -> None:
    with JobService(tmp_path) as service:
        service.up()
        service.train("long", "run.steps=100000")
        began = time.monotonic()
        machine = service.join("m")

        def used() -> float:
            devices = service.client().get("/jobs")["devices"]
            return devices["m/cpu0"]["used_s"].get("long", 0.0) if "m/cpu0" in devices else 0.0

        try:
            service.until(used, "uses the machine")
            machine.kill()
            machine.wait(60)
            machine, before = service.join("m"), used()
            service.until(lambda: used() > before + 0.5, "uses the machine again")
            service.kill()
            end_s = time.monotonic() + 120
            while "the service does not answer" not in (tmp_path / "m.log").read_text():
                assert time.monotonic() < end_s, "waited 120 s until the machine missed the service"
                time.sleep(0.1)
            service.up()
            before = used()
            service.until(lambda: used() > before + 0.5, "uses the machine after its own restart")
            assert machine.poll() is None
            device = service.client().get("/jobs")["devices"]["m/cpu0"]
            assert device["idle_s"] + sum(device["used_s"].values()) <= time.monotonic() - began
        finally:
            machine.kill()


@pytest.mark.slow
def test_service_with_tls_and_a_machine_that_joins(tmp_path: Path, trained_alone: Alone) -> None:
    cert, key = self_signed(tmp_path)
    with JobService(tmp_path, f'tls_cert = "{cert.name}"\ntls_key = "{key.name}"\n') as service:
        assert service.up().url.startswith("https://")
        machine = service.join("m", "--tls-ca", cert.name)
        try:
            service.train("a", SEEDS["a"], "run.steps=1000", options=("--tls-ca", str(cert)))

            def works() -> bool:
                devices = service.client().get("/jobs")["devices"]
                return "m/cpu0" in devices and devices["m/cpu0"]["used_s"].get("a", 0.0) > 0.2

            service.until(works, "uses the machine")
            assert json.loads((service.folder / "jobs/a/address.json").read_text())["url"].startswith("https://")
            service.command("stop", "a")
            assert service.until_ended() == {"a": "stopped"}
            service.train("b", SEEDS["b"])
            assert service.until_ended("b")["b"] == "done"
            assert service.weights("b") == trained_alone("b")
        finally:
            machine.kill()
