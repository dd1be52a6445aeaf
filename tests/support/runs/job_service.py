"""A service of jobs (`windfall up`) in a process of its own: tests submit to it, kill it and start it again."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from windfall import run_folder as folders
from windfall.jobs.client import JobsClient
from windfall.processes import parent_death

FLEET = """
port = 0
devices = "cpu"
price_usd_per_h = 3.6
"""
RECIPE = """
[run]
steps = 2
device = "cpu"
threads = 1
deterministic = true
[rollout]
groups = 2
group_size = 2
max_tokens = 24
[eval]
tasks = 0
"""
COMMAND = [sys.executable, "-m", "windfall.run.cli"]
ENDED = ("done", "stopped", "failed", "over_budget")


class JobService:
    """`fleet`: more lines of its file. `slots`: devices. Used as a context manager, it ends the service by SIGKILL."""

    def __init__(self, folder: Path, fleet: str = "", slots: int = 2) -> None:
        self.here, self.folder = folder, folder / "fleet"
        (folder / "fleet.toml").write_text(f"{FLEET}cpu_slots = {slots}\n{fleet}")
        (folder / "job.toml").write_text(RECIPE)
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> JobService:
        return self

    def __exit__(self, *_: object) -> None:
        if self._process is not None:
            self.kill()

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def up(self) -> JobsClient:
        """Start the service. It ends when this process ends."""
        guard = [sys.executable, "-I", "-S", parent_death.__file__, str(os.getpid()), str(int(signal.SIGKILL))]
        with (self.here / "up.log").open("ab") as log:
            self._process = subprocess.Popen(
                [*guard, *COMMAND, "up", "fleet.toml"], cwd=self.here, stdout=log, stderr=log, env=self.environment
            )
        self.until(lambda: (folders.read_json(self.folder / "address.json") or {}).get("pid") == self.pid, "listens")
        return self.client()

    @property
    def environment(self) -> dict[str, str]:
        path = os.pathsep.join(filter(None, sys.path))
        return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}

    def client(self, token: str | None = None) -> JobsClient:
        return JobsClient(str(self.folder), token)

    def kill(self) -> None:
        assert self._process is not None
        self._process.kill()
        self._process.wait(60)

    def interrupt(self) -> int:
        """Ctrl-C, which lets all jobs save."""
        assert self._process is not None
        self._process.send_signal(signal.SIGINT)
        return self._process.wait(120)

    def train(self, name: str, *sets: str, options: tuple[str, ...] = ()) -> str:
        """`windfall train job.toml --on ... --name ...`, as a user calls it."""
        arguments = [word for value in sets for word in ("--set", value)]
        return self.command("train", "job.toml", "--on", str(self.folder), "--name", name, *arguments, *options)

    def join(self, name: str, *more: str) -> subprocess.Popen[bytes]:
        """Let a machine with one CPU slot join, which is this one. `more`: arguments of the command."""
        (self.here / "machine.toml").write_text('devices = "cpu"\ncpu_slots = 1\nprice_usd_per_h = 7.2\n')
        guard = [sys.executable, "-I", "-S", parent_death.__file__, str(os.getpid()), str(int(signal.SIGKILL))]
        options = [
            "--on",
            self.client().url,
            "--token",
            "fleet/token",
            "--name",
            name,
            "--fleet",
            "machine.toml",
            *more,
        ]
        with (self.here / f"{name}.log").open("ab") as log:
            return subprocess.Popen(
                [*guard, *COMMAND, "join", *options], cwd=self.here, stdout=log, stderr=log, env=self.environment
            )

    def command(self, *arguments: str, status: int = 0) -> str:
        done = subprocess.run(
            [*COMMAND, *arguments], cwd=self.here, capture_output=True, text=True, timeout=240, check=False,
            env=self.environment,
        )  # fmt: skip
        assert done.returncode == status, done.stdout + done.stderr
        return done.stdout + done.stderr

    def submit(self, name: str, *lines: str, **fields: Any) -> dict[str, Any]:
        """Without a process for the command. `lines`: more of the recipe."""
        return self.client().post("/jobs", recipe=RECIPE + "\n".join(lines), name=name, **fields)

    def jobs(self) -> dict[str, dict[str, Any]]:
        return self.client().get("/jobs")["jobs"]

    def states(self) -> dict[str, str]:
        return {name: job["state"] for name, job in self.jobs().items()}

    def until_ended(self, *names: str, within_s: float = 240.0) -> dict[str, str]:
        def ended() -> bool:
            states = self.states()
            return all(states[name] in ENDED for name in names or states)

        self.until(ended, "has ended all jobs", within_s)
        return self.states()

    def until(self, true: Callable[[], Any], what: str, within_s: float = 240.0) -> None:
        deadline = time.monotonic() + within_s
        while not true():
            log = (self.here / "up.log").read_text()[-4000:]
            assert self._process is None or self._process.poll() is None, f"the service has ended:\n{log}"
            assert time.monotonic() < deadline, f"waited {within_s:g} s until it {what}:\n{log}"
            time.sleep(0.05)

    def weights(self, name: str) -> bytes:
        return weights(self.folder / "jobs" / name)

    def step(self, name: str) -> int:
        return json.loads((self.folder / "jobs.json").read_text())["jobs"][name]["step"]


def weights(run: Path) -> bytes:
    """The trained weights of a run: those of its last checkpoint."""
    return max((run / "checkpoints").glob("step-*")).joinpath("model.safetensors").read_bytes()


def alone(folder: Path, name: str, *sets: str) -> bytes:
    """The weights of the same recipe, trained by `windfall train` alone."""
    (folder / f"{name}.toml").write_text(RECIPE)
    arguments = [word for value in (f"run.name={name}", *sets) for word in ("--set", value)]
    done = subprocess.run(
        [*COMMAND, "train", f"{name}.toml", *arguments], cwd=folder, capture_output=True, text=True, timeout=240,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return weights(folder / "runs" / name)
