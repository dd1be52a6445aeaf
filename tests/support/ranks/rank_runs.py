"""Whole runs whose trainer has several ranks, on CPUs."""

from __future__ import annotations

import contextlib
import hashlib
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from windfall.events.log import read
from windfall.trainer import checkpoint

RECIPE = """
[run]
name = "r"
steps = 4
threads = 1
deterministic = true
[env]
name = "arithmetic"
mean_steps = 1.5
[rollout]
groups = 3
group_size = 4
max_tokens = 32
temperature = 1.4
[train]
lr = 1e-3
minibatches = 3
ranks = 2
[checkpoint]
every = 2
[eval]
tasks = 0
[fleet]
local = false
workers = 1
"""


@contextlib.contextmanager
def run_windfall(folder: Path, *changes: str) -> Iterator[subprocess.Popen[bytes]]:
    """A run with these changes of the recipe. All of its processes are killed at the end."""
    folder.mkdir(exist_ok=True)
    path = folder / "r.toml"
    path.write_text(RECIPE)
    options = [x for change in (f"run.folder={folder}", *changes) for x in ("--set", change)]
    with (folder / "out.txt").open("wb") as out:
        running = subprocess.Popen(
            [sys.executable, "-m", "windfall.run.cli", "train", str(path), *options],
            stdout=out, stderr=subprocess.STDOUT, env={**os.environ, "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
    try:
        yield running
    finally:
        running.kill()  # the other processes die with it
        running.wait()


def weights(run: Path) -> str:
    """Digest of the last checkpoint's model or adapter."""
    (file,) = checkpoint.latest(run).path.glob("*model.safetensors")
    return hashlib.sha256(file.read_bytes()).hexdigest()


def events(run: Path, name: str) -> list[dict[str, Any]]:
    path = run / "events.jsonl"
    return [e for e in read(path) if e["name"] == name] if path.is_file() else []


def trained_steps(run: Path) -> list[int]:
    return [e["step"] for e in events(run, "step") if e["kind"] == "scalar"]


def wait_until(
    holds: Callable[[], object], folder: Path, running: subprocess.Popen[bytes], poll_s: float = 0.02
) -> None:
    """Wait until this holds, while the run goes on."""
    deadline_s = time.monotonic() + 240
    while not holds():
        assert running.poll() is None, (folder / "out.txt").read_text()
        assert time.monotonic() < deadline_s, (folder / "out.txt").read_text()
        time.sleep(poll_s)


def wait_for_trainer(folder: Path, running: subprocess.Popen[bytes], starts: int) -> list[int]:
    """Wait until the trainer was started this many times. Returns the processes of its ranks."""
    wait_until(lambda: len(events(folder / "r", "trainer_ready")) >= starts, folder, running)
    return events(folder / "r", "trainer_ready")[-1]["rank_pids"]


def finish(folder: Path, running: subprocess.Popen[bytes]) -> None:
    assert running.wait(240) == 0, (folder / "out.txt").read_text()


def cpu_s(pid: int) -> float:
    """CPU time of a process, in seconds."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
