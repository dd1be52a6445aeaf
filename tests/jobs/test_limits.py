"""What counts against the limits of a job, and that nothing of it is left when it is ended."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.process_fixtures import state
from windfall.jobs.job_run import JobRun
from windfall.jobs.machine import limits
from windfall.jobs.machine.limits import Usage
from windfall.jobs.service import Service
from windfall.jobs.settings import FleetSettings, JobLimits
from windfall.jobs.store import Job
from windfall.link import auth
from windfall.processes import reaper

TREE = """
import os, subprocess, time
for _ in range(3):
    subprocess.Popen(["sleep", "600"], start_new_session=True)
eaten = bytearray(b"x") * (64 << 20)
time.sleep(600)
"""
"""A child with three children of its own, which uses 64 MB."""


@pytest.fixture
def controller() -> Iterator[int]:
    """A process whose child is TREE."""
    code = f"import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', {TREE!r}]); time.sleep(600)"
    process = subprocess.Popen([sys.executable, "-c", code], start_new_session=True)
    try:
        yield process.pid
    finally:
        reaper.kill_descendants(process.pid)
        process.kill()
        process.wait(20)


def usage_when(pid: int, enough: Usage) -> Usage:
    deadline = time.monotonic() + 60
    while (used := limits.usage([pid])[pid]).processes < enough.processes or used.bytes < enough.bytes:
        assert time.monotonic() < deadline, f"waited 60 s for {enough}; there is {used}"
        time.sleep(0.02)
    return used


def test_all_descendants_count_and_are_killed(controller: int) -> None:
    used = usage_when(controller, Usage(processes=4, bytes=60 << 20))
    assert used.processes == 4
    assert used.bytes < 500 << 20
    below = reaper.descendants(controller)
    for pid in below:
        with open(f"/proc/{pid}/oom_score_adj") as file:
            assert int(file.read()) >= limits.OOM_SCORE
    limits.kill_tree(controller)
    assert limits.usage([controller])[controller].processes <= 1, "a child that was killed and not waited for yet"
    assert all(state(pid) in ("", "Z") for pid in below)


def test_nothing_is_left_of_a_tree_that_grows_while_it_is_killed() -> None:
    grows = """
import subprocess, sys, time
level = int(sys.argv[2])
if level:
    subprocess.Popen([sys.executable, "-S", "-c", sys.argv[1], sys.argv[1], str(level - 1)], start_new_session=True)
for _ in range(50):
    print(subprocess.Popen(["sleep", "20"], start_new_session=True, stdout=subprocess.DEVNULL).pid, flush=True)
    time.sleep(0.02)
time.sleep(20)
"""
    command = [sys.executable, "-S", "-c", grows, grows, "2"]
    process = subprocess.Popen(command, start_new_session=True, stdout=subprocess.PIPE, text=True)
    try:
        usage_when(process.pid, Usage(processes=30))
        limits.kill_tree(process.pid)
    finally:
        process.kill()
        printed, _ = process.communicate(timeout=30)  # ends when the last process of the tree has ended
    started = [int(pid) for pid in printed.split()]
    assert len(started) >= 28
    assert [pid for pid in started if state(pid) not in ("", "Z")] == []


def test_one_scan_finds_what_belongs_to_every_controller(controller: int, monkeypatch: pytest.MonkeyPatch) -> None:
    usage_when(controller, Usage(processes=4))
    scans, scan = [], reaper._children
    monkeypatch.setattr(reaper, "_children", lambda: scans.append(1) or scan())
    (child,) = reaper.children_of(controller)
    assert scans.pop() == 1
    found = limits.usage([controller, child, 2**30])
    assert len(scans) == 1
    assert [found[pid].processes for pid in (controller, child, 2**30)] == [4, 3, 0]


class Processes:
    """Those of a job, whose controller has this pid."""

    def __init__(self, controller_pid: int) -> None:
        self.controller_pid, self.killed = controller_pid, asyncio.Event()

    def kill(self) -> None:
        self.killed.set()


def test_job_that_is_slow_to_kill_delays_the_limits_of_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    service = Service(FleetSettings(devices="cpu", folder=tmp_path), lambda line: None)
    others_are_dead = threading.Event()

    def kill_tree(pid: int) -> None:
        assert pid != 1 or others_are_dead.wait(60)

    monkeypatch.setattr(limits, "usage", lambda pids: {pid: Usage(processes=300) for pid in pids})
    monkeypatch.setattr(limits, "kill_tree", kill_tree)

    async def main() -> None:
        found = {}
        for number, name in enumerate(("slow", "b", "c"), 1):
            (tmp_path / name).mkdir()
            auth.make_token(tmp_path / name / "token")
            run = JobRun(Job(name=name, number=number), tmp_path / name, service.settings, service.host, print)
            found[name] = run._processes = Processes(number)  # type: ignore[assignment]
            service.running[name] = run
        guard = asyncio.create_task(service._keep_limits())
        for name in "bc":
            await asyncio.wait_for(found[name].killed.wait(), 60)
        assert not found["slow"].killed.is_set()
        others_are_dead.set()
        await asyncio.wait_for(found["slow"].killed.wait(), 60)
        guard.cancel()

    asyncio.run(main())


def test_limits() -> None:
    of_fleet = JobLimits(memory_gb=2.0, processes=10)
    most = limits.most_bytes(of_fleet, 4)
    assert most == 2_000_000_000
    assert limits.exceeded(Usage(processes=10, bytes=most), of_fleet, most) == ""
    assert "11 processes, more than limits.processes = 10" in limits.exceeded(Usage(processes=11), of_fleet, most)
    assert "3.0 GB of memory, more than the 2.0 GB" in limits.exceeded(Usage(bytes=3 * 10**9), of_fleet, most)
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert limits.most_bytes(JobLimits(), 4) == machine // 4
