"""Whole runs with several policies on the tiny model, as a user starts them; processes of a run can be killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from windfall import run_folder as folders
from windfall.events.log import Event, read

BEGIN = """
[run]
name = "several"
threads = 1
deterministic = true
[model]
path = "tiny"
[train]
lr = 2e-3
[eval]
tasks = 0
[fleet]
workers = 1
"""
WORKERS_COME_AND_GO = ("fleet.workers=0", "trace.nodes=2", "trace.mean_up_s=1.5", "trace.mean_down_s=0.5")
START = """
import sys
from pathlib import Path
from windfall.recipe.file import load_recipe
from windfall.run import start
recipe = load_recipe(Path(sys.argv[1]), sys.argv[2:])
start.train(recipe, start.new_folder(recipe))
"""


def finish(folder: Path, recipe: str, *changes: str, kills: Sequence[tuple[int, str]] = ()) -> Path:
    """A finished run of this recipe, which begins with BEGIN. `kills`: what to kill when the log has this many steps:
    the controller, or the trainer of a policy."""
    folder.mkdir()
    (folder / "r.toml").write_text(BEGIN + recipe)
    command = [sys.executable, "-c", START, str(folder / "r.toml"), f"run.folder={folder}", *changes]
    running = subprocess.Popen(command, stdout=(folder / "out.txt").open("wb"), stderr=subprocess.STDOUT)
    run, deadline, left = folder / "several", time.monotonic() + 300, list(kills)
    try:
        while running.poll() is None and time.monotonic() < deadline:
            if left and len(steps(run)) >= left[0][0]:
                os.kill(pid(run, left.pop(0)[1]), signal.SIGKILL)
            time.sleep(0.05)
        assert running.poll() == 0, (folder / "out.txt").read_text()
        assert not left, f"the run ended before the kills {left}"
    finally:
        running.kill()
        running.wait()
    return run


def events(run: Path, name: str) -> list[Event]:
    found = read(run / "events.jsonl") if (run / "events.jsonl").is_file() else []
    return [e for e in found if e["name"] == name]


def steps(run: Path) -> list[tuple[str, int]]:
    """Policy and number of every step."""
    return [(e["policy"], e["step"]) for e in events(run, "step")]


def pid(run: Path, what: str) -> int:
    """The process of the controller, or of the trainer of a policy that connected last."""
    if what == "controller":
        return int(json.loads((run / "address.json").read_text())["pid"])
    return int([e for e in events(run, "trainer_ready") if e["policy"] == what][-1]["pid"])


def checkpoint_files(run: Path, policy: str, step: int) -> dict[str, str]:
    """The hashes of a checkpoint's files: weights, optimizer, and more."""
    path = folders.policy_folder(run, policy) / "checkpoints" / f"step-{step:06d}"
    return json.loads((path / "windfall" / "checksums.json").read_text())["files"]
