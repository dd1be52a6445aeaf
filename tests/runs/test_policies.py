"""Runs with several policies, from end to end: a trainer is killed, and the weights of all policies are the same."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from windfall import run_folder as folders
from windfall.events.log import read
from windfall.run.commands import export

RECIPE = """
[run]
name = "two"
steps = 4
threads = 1
deterministic = true
[model]
path = "tiny"
[env]
name = "custom"
factory = "examples.solver_verifier:SolverVerifier"
[policies.solver]
lora = { rank = 4 }
[policies.verifier]
lora = { rank = 4 }
rollout = { max_tokens = 200 }
[rollout]
groups = 4
group_size = 4
max_tokens = 100
[train]
lr = 2e-3
[checkpoint]
every = 2
[eval]
tasks = 0
[fleet]
workers = 1
"""
START = """
import sys
from pathlib import Path
from windfall.recipe.file import load_recipe
from windfall.run import start
recipe = load_recipe(Path(sys.argv[1]), sys.argv[2:])
start.train(recipe, start.new_folder(recipe))
"""


def steps(run: Path) -> list[tuple[str, int]]:
    events = read(run / "events.jsonl") if (run / "events.jsonl").is_file() else []
    return [(e["policy"], e["step"]) for e in events if (e["kind"], e["name"]) == ("scalar", "step")]


def trainer_pid(run: Path) -> int:
    """The process of the trainer that connected last."""
    ready = [e for e in read(run / "events.jsonl") if e["name"] == "trainer_ready"]
    return int(ready[-1]["pid"])


def finish(folder: Path, kill_after: int | None, *changes: str) -> Path:
    """A finished run. `kill_after`: kill the trainer of the first base when this many steps were made."""
    folder.mkdir()
    (folder / "r.toml").write_text(RECIPE)
    command = [sys.executable, "-c", START, str(folder / "r.toml"), f"run.folder={folder}", *changes]
    running = subprocess.Popen(command, stdout=(folder / "out.txt").open("wb"), stderr=subprocess.STDOUT)
    run, deadline = folder / "two", time.monotonic() + 200
    try:
        while running.poll() is None and time.monotonic() < deadline:
            if kill_after is not None and len(steps(run)) >= kill_after:
                os.kill(trainer_pid(run), signal.SIGKILL)
                kill_after = None
            time.sleep(0.1)
        assert running.poll() == 0, (folder / "out.txt").read_text()
        assert kill_after is None
    finally:
        running.kill()
        running.wait()
    return run


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "changes",
    [(), ("policies.verifier={}", "fleet.workers=2"), ("rollout.replay=0.5", "rollout.select=greso")],
    ids=["adapters of one base", "two bases", "replay and selected prompts"],
)
def test_kill_of_a_trainer_changes_no_policy(tmp_path: Path, changes: tuple[str, ...]) -> None:
    plain, killed = finish(tmp_path / "a", None, *changes), finish(tmp_path / "b", 5, *changes)
    assert {*steps(plain)} == {*steps(killed)} == {(name, n) for name in ("solver", "verifier") for n in range(1, 5)}
    for name in ("solver", "verifier"):
        paths = [folders.policy_folder(run, name) / "checkpoints" / "step-000004" for run in (plain, killed)]
        hashes = [json.loads((path / "windfall" / "checksums.json").read_text())["files"] for path in paths]
        assert hashes[0] == hashes[1]
    assert export.export(killed, None, "verifier").folder.parent == killed / "policies" / "verifier" / "exports"
