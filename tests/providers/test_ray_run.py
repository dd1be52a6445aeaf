"""`windfall ray`: a whole run on a Ray cluster, whose nodes are killed; that is stopped and killed and continues, also
as a Ray job. These need `make test-ray`. How a rank is kept, and what is refused, is tested without Ray."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.servers.ray_nodes import add_node, cluster, wait_until
from windfall import run_folder as folders
from windfall.backoff import RestartDelay
from windfall.events.log import read
from windfall.link import auth
from windfall.on_ray import whole_run
from windfall.on_ray.whole_run import RayRun
from windfall.recipe.file import load_recipe
from windfall.run import resume_check, start

RECIPE = """
[run]
name = "r"
steps = 500
device = "cpu"
threads = 1
deterministic = true
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
"""
ON_RAY = """
[fleet.ray]
cpus = 0.2
gpus = 0.0
workers = 1
worker_threads = 1
price_usd_per_h = 1.0
"""
ON_THIS_MACHINE = "workers = 1\n"
WINDFALL = [sys.executable, "-m", "windfall.run.cli"]
BUNDLE = ["--gpus", "0", "--cpus", "0.6"]


@pytest.fixture(scope="module")
def two_nodes() -> Iterator[Any]:
    pytest.importorskip("ray")
    with cluster(nodes=2, dashboard=True) as made:
        yield made


@pytest.fixture
def driver(tmp_path: Path, two_nodes: Any) -> Iterator[Callable[..., subprocess.Popen[bytes]]]:
    started = list[subprocess.Popen[bytes]]()
    (tmp_path / "r.toml").write_text(RECIPE + ON_RAY)

    def start(source: Path | str, *more: str, address: str = two_nodes.address) -> subprocess.Popen[bytes]:
        command = [*WINDFALL, "ray", str(source), *BUNDLE, "--address", address, *more]
        with (tmp_path / "out.txt").open("ab") as out:
            started.append(subprocess.Popen(command, cwd=tmp_path, stdout=out, stderr=out))
        return started[-1]

    yield start
    for process in started:
        process.kill()


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
    running, run, out = driver("r.toml", "--set", "run.steps=16"), tmp_path / "runs" / "r", tmp_path / "out.txt"
    for nth, rank in ((1, 1), (2, 0)):
        ready = wait_until(
            lambda n=nth: events(run, "trainer_ready")[n - 1 :], f"start {nth}", running=running, out=out
        )
        pids = ready[-1]["rank_pids"]
        assert len(pids) == 2
        nodes = [node_of(two_nodes, pid) for pid in pids]
        assert nodes[0] is not nodes[1], "each rank has a node of its own"
        add_node(two_nodes)
        two_nodes.remove_node(nodes[rank], allow_graceful=False)
    assert running.wait(400) == 0, out.read_text()
    said = out.read_text()
    assert "rank 1 is lost" in said
    assert "the node of the run is lost; resuming it elsewhere" in said
    assert sorted(set(trained(run))) == list(range(1, 17))
    assert len(events(run, "trainer_ready")) >= 3


@pytest.mark.timeout(900)
def test_run_that_was_killed_and_then_stopped_continues_in_its_folder(tmp_path: Path, driver: Any) -> None:
    """What a killed command leaves ends by itself, and the next one waits for that. One that is stopped leaves nothing.
    No work is lost: the weights are those of an undisturbed run."""
    run, out = tmp_path / "runs" / "r", tmp_path / "out.txt"

    def until_step(running: subprocess.Popen[bytes]) -> None:
        complete = max(trained(run), default=0)
        wait_until(lambda: max(trained(run), default=0) > complete, "a step", running=running, out=out)

    running = driver("r.toml")
    until_step(running)
    assert driver(run).wait(60) == 2
    assert "another process is already its driver" in out.read_text()
    left = processes_of(run)
    assert left
    running.kill()
    running.wait()
    running = driver(run)
    wait_until(lambda: events(run, "resumed"), "the start", running=running, out=out)
    until_step(running)
    assert not {*left} & {*processes_of(run)}
    running.terminate()
    assert running.wait(120) == 128 + signal.SIGTERM
    nothing_is_left(run)
    steps = ["--set", f"run.steps={max(trained(run)) + 2}"]
    assert driver(run, *steps).wait(400) == 0, out.read_text()
    assert list(run.parent.iterdir()) == [run]
    assert driver(run).wait(60) == 0
    assert "this run is finished" in out.read_text()
    (tmp_path / "whole.toml").write_text(RECIPE + ON_THIS_MACHINE)
    subprocess.run([*WINDFALL, "train", "whole.toml", "--set", "run.name=whole", *steps], cwd=tmp_path, check=True)
    assert sorted(set(trained(run))) == trained(run.with_name("whole"))
    assert weights(run) == weights(run.with_name("whole"))


@pytest.mark.timeout(600)
def test_run_whose_cluster_is_lost_continues_on_another_one(tmp_path: Path, driver: Any) -> None:
    run, out = tmp_path / "runs" / "r", tmp_path / "out.txt"
    with cluster(nodes=2) as lost:
        running = driver("r.toml", address=lost.address)
        wait_until(lambda: trained(run), "the first step", running=running, out=out)
    assert running.wait(120) != 0
    nothing_is_left(run)
    steps = max(trained(run)) + 1
    assert driver(run, "--set", f"run.steps={steps}").wait(400) == 0, out.read_text()
    assert sorted(set(trained(run))) == list(range(1, steps + 1))


def weights(run: Path) -> tuple[str, bytes]:
    """Those of the last step."""
    path = max(run.glob("checkpoints/*/model.safetensors"))
    return path.parent.name, path.read_bytes()


def nothing_is_left(run: Path) -> None:
    deadline_s = time.monotonic() + 120
    while left := processes_of(run):
        assert time.monotonic() < deadline_s, f"waited 120 s for the end of {left}"
        time.sleep(0.1)
    assert list((run / "checkpoints").iterdir()), "it can be resumed"


@pytest.mark.timeout(900)
def test_ray_job_that_is_stopped_leaves_nothing_and_another_one_continues_it(tmp_path: Path, two_nodes: Any) -> None:
    jobs = pytest.importorskip("ray.job_submission")
    client, run = jobs.JobSubmissionClient(f"http://{two_nodes.head_node.webui_url}"), tmp_path / "runs" / "r"
    (tmp_path / "r.toml").write_text(RECIPE + ON_RAY)

    def submit(source: Path, *changes: str) -> str:
        words = [*WINDFALL, "ray", str(source), *BUNDLE, *(word for change in changes for word in ("--set", change))]
        return client.submit_job(entrypoint=" ".join(words))

    def until(job: str, done: Callable[[], Any], what: str) -> None:
        deadline_s = time.monotonic() + 300
        while not done():
            assert time.monotonic() < deadline_s, f"waited 300 s for {what}: {client.get_job_logs(job)}"
            time.sleep(0.2)

    job = submit(tmp_path / "r.toml", f"run.folder={run.parent}")
    until(job, lambda: trained(run), "the first step")
    client.stop_job(job)
    nothing_is_left(run)
    until(job, lambda: client.get_job_status(job) == jobs.JobStatus.STOPPED, "the job to be stopped")
    steps = max(trained(run)) + 1
    job = submit(run, f"run.steps={steps}")
    until(job, lambda: client.get_job_status(job).is_terminal(), "the end of the job")
    assert client.get_job_status(job) == jobs.JobStatus.SUCCEEDED, client.get_job_logs(job)
    assert sorted(set(trained(run))) == list(range(1, steps + 1))


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


@pytest.fixture
def driven(monkeypatch: pytest.MonkeyPatch) -> list[RayRun]:
    """What would run on Ray."""
    runs = list[RayRun]()

    async def drive(driver: Any) -> int:
        runs.append(driver._run)
        return 0

    monkeypatch.setattr("windfall.providers.ray.provider.check_installed", lambda: None)
    monkeypatch.setattr(whole_run.RayDriver, "drive", drive)
    monkeypatch.setattr(whole_run, "LEFT_S", 0.0)
    return runs


def test_run_folder_is_continued_with_its_changes_and_a_recipe_starts_a_new_one(
    windfall: Any, here: Path, driven: list[RayRun]
) -> None:
    (here / "r.toml").write_text(RECIPE)
    assert windfall("ray", "r.toml")[0] == 0
    assert windfall("ray", "r", "--set", "train.ranks=3", "--cpus", "2")[0] == 0
    status, out, _ = windfall("ray", "r.toml")
    assert status == 0
    assert "runs/r exists (no step done); `windfall ray runs/r` continues it" in out
    folder = here / "runs" / "r"
    assert [(run.folder, run.ranks, run.cpus) for run in driven] == [
        (folder, 2, 1.0), (folder, 3, 2.0), (here / "runs" / "r-2", 2, 1.0),
    ]  # fmt: skip
    assert "ranks = 3" in (folder / "recipe.toml").read_text()
    assert driven[0].secret == driven[1].secret == auth.read_token(folder / "trainer.secret")


def test_folder_that_cannot_be_continued_is_refused(
    windfall: Any, here: Path, driven: list[RayRun], monkeypatch: pytest.MonkeyPatch
) -> None:
    (here / "r.toml").write_text(RECIPE)
    folder = start.new_folder(load_recipe(here / "r.toml"))
    (here / "empty").mkdir()

    def refused(said: str, *words: str) -> None:
        status, _, errors = windfall("ray", *words)
        assert status == 2
        assert said in errors

    refused("runs/s: no such run\nDid you mean 'runs/r'?", "runs/s")
    refused("empty: not a run: it has no recipe.toml\nGive a folder such as runs/demo.", "empty")
    refused("s.toml: no such recipe file", "s.toml")
    refused("run.seed: 0 -> 7", "r", "--set", "run.seed=7")
    with folders.owned(folder, "driver"):
        refused("runs/r: another process is already its driver\nStop it first.", "r")
    with folders.owned(folder):
        refused("runs/r: another process is already running it\nStop it first.", "r")
    monkeypatch.setattr(resume_check, "finished", lambda *_: 500)
    status, out, _ = windfall("ray", "r")
    assert status == 0
    assert "this run is finished: all 500 steps are done, and nothing was started" in out
    assert "windfall ray runs/r --set run.steps=1000" in out
    assert driven == []


def test_new_start_waits_for_what_an_earlier_one_left(
    windfall: Any, here: Path, driven: list[RayRun], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The command waits for what a killed one left; the node of the run, for what a lost node left."""
    (here / "r.toml").write_text(RECIPE)
    folder, said, held = start.new_folder(load_recipe(here / "r.toml")), list[str](), contextlib.ExitStack()

    def say(line: str) -> None:
        said.append(line)
        held.close()

    async def sees() -> bool:
        waiting = asyncio.create_task(whole_run.RunActor().sees(str(folder)))
        await asyncio.wait({waiting}, timeout=0.3)
        assert not waiting.done()
        held.close()
        return await waiting

    monkeypatch.setattr(whole_run, "LEFT_S", 60.0)
    monkeypatch.setattr(whole_run, "say", say)
    held.enter_context(folders.owned(folder))
    assert windfall("ray", "r")[0] == 0
    assert said[0] == "runs/r: a process still runs it; waiting up to 60 s for its end"
    assert len(driven) == 1
    held.enter_context(folders.owned(folder))
    assert asyncio.run(sees())
