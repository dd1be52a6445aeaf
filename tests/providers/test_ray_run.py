"""`windfall ray`: a whole run on a Ray cluster, whose nodes are killed; and as a Ray job that is stopped. These need
`make test-ray`. How a rank is kept is tested without Ray."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from windfall.backoff import RestartDelay
from windfall.events.log import read
from windfall.on_ray import whole_run

RECIPE = """
[run]
name = "r"
steps = {steps}
device = "cpu"
threads = 1
[env]
name = "arithmetic"
[rollout]
groups = 3
group_size = 4
max_tokens = 24
[train]
lr = 1e-3
ranks = 2
[eval]
tasks = 0
[checkpoint]
every = 1
[fleet]
local = false
[fleet.ray]
cpus = 0.2
gpus = 0.0
workers = 1
worker_threads = 1
price_usd_per_h = 1.0
"""
COMMAND = ["ray", "r.toml", "--gpus", "0", "--cpus", "0.6"]


@pytest.fixture(scope="module")
def two_nodes() -> Iterator[Any]:
    pytest.importorskip("ray")
    from tests.support.servers.ray_nodes import cluster

    with cluster(nodes=2, dashboard=True) as made:
        yield made


@pytest.fixture
def driver(tmp_path: Path, two_nodes: Any) -> Iterator[Callable[[int], subprocess.Popen[bytes]]]:
    started = list[subprocess.Popen[bytes]]()

    def start(steps: int) -> subprocess.Popen[bytes]:
        (tmp_path / "r.toml").write_text(RECIPE.format(steps=steps))
        command = [sys.executable, "-m", "windfall.run.cli", *COMMAND, "--address", two_nodes.address]
        with (tmp_path / "out.txt").open("wb") as out:
            started.append(subprocess.Popen(command, cwd=tmp_path, stdout=out, stderr=out))
        return started[-1]

    yield start
    for process in started:
        process.kill()


def wait_until(
    condition: Callable[[], Any], what: str, running: subprocess.Popen[bytes], out: Path, within_s: float = 240.0
) -> Any:
    deadline_s = time.monotonic() + within_s
    while not (found := condition()):
        assert running.poll() is None, out.read_text()
        assert time.monotonic() < deadline_s, f"waited {within_s:g} s for {what}: {out.read_text()}"
        time.sleep(0.05)
    return found


def events(run: Path, name: str) -> list[dict[str, Any]]:
    path = run / "events.jsonl"
    return [e for e in read(path) if e["name"] == name] if path.is_file() else []


def trained(run: Path) -> list[int]:
    """The steps that are complete."""
    return [e["step"] for e in events(run, "step") if e["kind"] == "scalar"]


def ancestors(pid: int) -> list[int]:
    found = []
    while pid > 1:
        found.append(pid)
        try:
            pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            break
    return found


def node_of(cluster: Any, pid: int) -> Any:
    """The node on which this process runs: its raylet is the parent of Ray's own processes."""
    above = ancestors(pid)
    return next(n for n in cluster.worker_nodes if n.all_processes["raylet"][0].process.pid in above)


def processes_of(run: Path) -> list[int]:
    """All processes of this machine that name the run's folder, or join it."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().decode(errors="replace")
        except OSError:
            continue
        if "windfall" in words and str(run) in words:
            found.append(int(path.parent.name))
    return found


@pytest.mark.timeout(900)
def test_run_with_two_ranks_goes_on_when_nodes_die(tmp_path: Path, two_nodes: Any, driver: Any) -> None:
    """First the node of rank 1 dies, then that of the run itself. Each time another node joins the cluster."""
    running, run, out = driver(16), tmp_path / "runs" / "r", tmp_path / "out.txt"
    for start, rank in ((1, 1), (2, 0)):
        ready = wait_until(lambda n=start: events(run, "trainer_ready")[n - 1 :], f"start {start}", running, out)
        pids = ready[-1]["rank_pids"]
        assert len(pids) == 2
        nodes = [node_of(two_nodes, pid) for pid in pids]
        assert nodes[0] is not nodes[1], "each rank has a node of its own"
        two_nodes.add_node(num_cpus=1, object_store_memory=80 * 1024 * 1024)
        two_nodes.remove_node(nodes[rank], allow_graceful=False)
    assert running.wait(400) == 0, out.read_text()
    said = out.read_text()
    assert "rank 1 is lost" in said
    assert "the node of the run is lost; resuming it elsewhere" in said
    assert sorted(set(trained(run))) == list(range(1, 17))
    assert len(events(run, "trainer_ready")) >= 3


@pytest.mark.timeout(600)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_nothing_is_left_when_the_command_is_stopped_or_killed(tmp_path: Path, driver: Any, number: int) -> None:
    running, run, out = driver(500), tmp_path / "runs" / "r", tmp_path / "out.txt"
    wait_until(lambda: trained(run), "the first step", running, out)
    assert processes_of(run)
    os.kill(running.pid, number)
    running.wait(120)
    nothing_is_left(run)


def nothing_is_left(run: Path) -> None:
    deadline_s = time.monotonic() + 120
    while left := processes_of(run):
        assert time.monotonic() < deadline_s, f"waited 120 s for the end of {left}"
        time.sleep(0.1)
    assert list((run / "checkpoints").iterdir()), "it can be resumed"


@pytest.mark.timeout(900)
def test_ray_job_runs_a_whole_run_and_is_stopped(tmp_path: Path, two_nodes: Any) -> None:
    """One job ends by itself, one is stopped: nothing of it is left."""
    jobs = pytest.importorskip("ray.job_submission")
    client = jobs.JobSubmissionClient(f"http://{two_nodes.head_node.webui_url}")

    def submit(name: str, steps: int) -> str:
        (tmp_path / "r.toml").write_text(RECIPE.format(steps=steps))
        words = [sys.executable, "-m", "windfall.run.cli", *COMMAND, "--set", f"run.name={name}"]
        words += ["--set", f"run.folder={tmp_path / 'runs'}"]
        words[words.index("r.toml")] = str(tmp_path / "r.toml")
        return client.submit_job(entrypoint=" ".join(words))

    def until(job: str, done: Callable[[], Any], what: str) -> None:
        deadline_s = time.monotonic() + 300
        while not done():
            assert time.monotonic() < deadline_s, f"waited 300 s for {what}: {client.get_job_logs(job)}"
            time.sleep(0.2)

    job = submit("whole", 2)
    until(job, lambda: client.get_job_status(job).is_terminal(), "the end of the job")
    assert client.get_job_status(job) == jobs.JobStatus.SUCCEEDED, client.get_job_logs(job)
    assert trained(tmp_path / "runs" / "whole") == [1, 2]
    job = submit("stopped", 500)
    run = tmp_path / "runs" / "stopped"
    until(job, lambda: trained(run), "the first step")
    client.stop_job(job)
    nothing_is_left(run)
    until(job, lambda: client.get_job_status(job) == jobs.JobStatus.STOPPED, "the job to be stopped")


def test_rank_that_ends_is_started_again_ever_later(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Such as one with a wrong secret. The first rank, too, says with which status it ended."""
    waits: list[float] = []

    class Recorded(RestartDelay):
        def after_death(self, *, lived_s: float) -> float:
            waits.append(super().after_death(lived_s=0.0))
            if len(waits) == 3:
                raise asyncio.CancelledError
            return 0.0

    monkeypatch.setattr(whole_run, "restart_delay", Recorded)
    with pytest.raises(asyncio.CancelledError):
        asyncio.run(whole_run.RunActor().keep("rank-0", ["-c", "raise SystemExit(3)"], {}))
    assert waits == [0.2, 0.4, 0.8]
    assert capfd.readouterr().err.count("rank-0 ended with status 3") == 2
