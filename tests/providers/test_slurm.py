"""Slurm: the batch script, the warning before the time limit, requeueing, and errors of sbatch.

The programs are stand-ins (stand_ins/slurm.py) that really run the script; bash checks its syntax.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.fleets.recorded_events import RecordedEvents
from tests.support.fleets.worker_sources import DRAINING, SlurmSource, Workers, programs, running, source_path
from windfall.errors import WindfallError
from windfall.events.log import read
from windfall.providers.slurm.provider import parse_states, script
from windfall.providers.slurm.section import Slurm


def test_script_is_valid_and_has_no_secret(tmp_path: Path) -> None:
    options = Slurm(partition="gpu", gpus="h100:1", memory_gib=1.5, setup="module load cuda\n", options=["--nice"])
    text = script(
        options, label="windfall-demo", url="https://h:1", workers=["slurm3.2", "slurm1.1", "slurm2.1"],
        log="w/%A_%a.log",
    )  # fmt: skip
    (tmp_path / "w.sh").write_text(text)
    assert subprocess.run(["bash", "-n", tmp_path / "w.sh"], check=False).returncode == 0
    assert "TOKEN" not in text
    directives = [line.removeprefix("#SBATCH ") for line in text.splitlines() if line.startswith("#SBATCH")]
    assert {"--array=1-3", "--requeue", "--signal=B:TERM@30", "--gres=gpu:h100:1", "--mem=1536M", "--nice"} <= set(
        directives
    )
    assert text.index("#SBATCH --nice") < text.index("module load cuda") < text.index("windfall worker")
    assert text.index("trap ") < text.index("windfall worker")
    with pytest.raises(WindfallError, match="line break"):
        script(Slurm(options=["--nice\nrm -rf"]), label="x", url="u", workers=["slurm1.1"], log="l")
    with pytest.raises(WindfallError, match="line break"):
        script(Slurm(partition="a\nrm -rf"), label="x", url="u", workers=["slurm1.1"], log="l")


def test_states_of_squeue() -> None:
    jobs = parse_states(
        "7|1|PENDING|0|\n7|2|COMPLETED|0|\n7|3|FAILED|3:0|\n7|4|CANCELLED|0|\n7|5|NODE_FAIL|0|\n8|1|FAILED|9|\n"
    )
    assert {id: job.code for id, job in jobs.items()} == {
        "7_1": None, "7_2": 0, "7_3": 3, "7_4": -9, "7_5": None, "8_1": -9,
    }  # fmt: skip
    assert [id for id, job in jobs.items() if job.waiting] == ["7_1", "7_5"]


def test_worker_drains_before_the_time_limit_and_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit of one minute lasts 2 s here, and the warning of 30 s comes after 1 s."""
    monkeypatch.setenv("FAKE_SLURM_MINUTE_S", "2.0")
    workers, events = Workers(tmp_path, DRAINING), RecordedEvents()

    async def main() -> None:
        async with SlurmSource().open(tmp_path, workers, events, 1, time_limit_min=1, warning_s=30) as provider:
            async with running(provider):
                await events.until(1, "restarted")
            assert workers.drained() >= 1

    asyncio.run(main())
    first = events.of("exited")[0]
    assert (first["worker"], first["code"], first["by"]) == ("slurm1.1", 0, "itself")


def test_requeued_task_is_a_new_worker_of_the_same_job(tmp_path: Path) -> None:
    workers, events = Workers(tmp_path, DRAINING), RecordedEvents()

    async def main() -> None:
        async with SlurmSource().open(tmp_path, workers, events, 2) as provider, running(provider):
            await workers.until(2)
            (tmp_path / "fake_slurm" / "1_2.nodefail").touch()
            await workers.until(3, of="all")
            names = {path.stem for path in workers.folder.glob("*") if path.suffix != ".drained"}
            assert names == {"slurm1.1", "slurm2.1", "slurm2.1-r1"}
            assert all(provider.owns(name) for name in names)

    asyncio.run(main())
    assert not events.of("restarted"), "Slurm restarts it, not the provider"


def test_leftovers_of_a_killed_supervisor_are_canceled(tmp_path: Path) -> None:
    workers = Workers(tmp_path, DRAINING)

    async def main() -> None:
        async with SlurmSource().open(tmp_path, workers, RecordedEvents(), 1) as provider:
            task = asyncio.create_task(provider.run())
            (left,) = await workers.until(1)
            queue: Any = provider._queue  # pyright: ignore
            queue.cancel = queue.drain = _nothing  # it dies without a word
            provider.grace_s = 0.0
            task.cancel()
            assert left in workers.alive()
        async with SlurmSource().open(tmp_path, workers, RecordedEvents(), 1) as provider, running(provider):
            await workers.until(2, of="all")
            assert left not in await workers.until(1)

    asyncio.run(main())


async def _nothing(*_: object) -> None:
    pass


RECIPE = """
[run]
name = "small"
steps = 2
device = "cpu"
threads = 1
[rollout]
groups = 2
group_size = 2
max_tokens = 24
[eval]
tasks = 0
[fleet]
local = false
host = "0.0.0.0"
tls_cert = "cert.pem"
tls_key = "key.pem"
[fleet.slurm]
workers = 2
gpus = "0"
worker_threads = 1
poll_s = 0.5
setup = "export PATH=BIN:$PATH"
"""


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("openssl") is None, reason="no openssl to make a certificate with")
def test_run_trains_on_slurm_workers_over_tls(tmp_path: Path) -> None:
    """Real workers: they get the token and the certificate from the environment of sbatch, and end with the run."""
    make = "openssl req -x509 -newkey rsa:2048 -nodes -days 2 -keyout key.pem -out cert.pem -subj /CN=windfall"
    subprocess.run(make.split(), cwd=tmp_path, check=True, capture_output=True)
    (tmp_path / "bin").mkdir()
    program = tmp_path / "bin" / "windfall"
    program.write_text(f'#!/bin/sh\necho $$ >> {tmp_path}/pids\nexec {sys.executable} -m windfall.run.cli "$@"\n')
    program.chmod(0o755)
    (tmp_path / "small.toml").write_text(RECIPE.replace("BIN", str(tmp_path / "bin")))
    with programs(tmp_path, "slurm", {"sbatch": "sbatch", "squeue": "squeue", "scancel": "scancel"}):
        done = subprocess.run(
            [sys.executable, "-m", "windfall.run.cli", "train", "small.toml"], cwd=tmp_path,
            capture_output=True, text=True,
            timeout=200, env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": source_path()}, check=False,
        )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    run = tmp_path / "runs" / "small"
    events = read(run / "events.jsonl")
    assert {e["worker"] for e in events if e["name"] == "worker_joined"} >= {"slurm1.1"}
    assert (run / "address.json").read_text().count("https://") == 1
    token = (run / "token").read_text()
    assert token not in (run / "workers" / "slurm-1.sh").read_text()
    pids = [int(line) for line in (tmp_path / "pids").read_text().split()]
    assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()]


def test_refused_submission_is_reported_and_tried_again(tmp_path: Path) -> None:
    workers, events = Workers(tmp_path, DRAINING), RecordedEvents()

    async def main() -> None:
        async with SlurmSource().open(tmp_path, workers, events, 1, partition="nowhere") as provider, running(provider):
            await events.until(2, "spawn_failed")

    asyncio.run(main())
    assert "invalid partition specified: nowhere" in events.of("spawn_failed")[0]["error"]
