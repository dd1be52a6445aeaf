"""Whole runs whose ranks are killed or freeze: the trainer restarts from its checkpoint, and the run ends with the same
weights as if nothing had happened.

The moment of a kill is found by watching the run from outside: its checkpoint folder, its events, the CPU time of a
rank, and the buffers that rank 0 makes for a new version of the weights.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.ranks.rank_runs import (
    cpu_s,
    events,
    finish,
    run_windfall,
    trained_steps,
    wait_for_trainer,
    wait_until,
    weights,
)

SHORT = ("run.steps=2", "train.context_parallel=2")
TIMEOUT_S = 4
POLL_S = 0.001


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a short run, one of whose ranks was killed in its first step."""
    folder = tmp_path_factory.mktemp("killed")
    with run_windfall(folder, *SHORT) as running:
        lose(folder, running, 1, "pass", 1)
        finish(folder, running)
    return folder


@pytest.mark.slow
def test_rank_is_killed(killed: Path) -> None:
    assert "the trainer was killed (SIGKILL); restarting it" in (killed / "out.txt").read_text()
    assert len(events(killed / "r", "trainer_ready")) == 2
    assert trained_steps(killed / "r") == [1, 2]


@pytest.mark.slow
def test_rank_freezes_between_two_orders(tmp_path: Path, killed: Path) -> None:
    """Rank 0 notices that its next order does not arrive, and the run has the result of the one with a killed rank."""
    check_frozen(tmp_path, "step", killed)


@pytest.mark.slow
def test_rank_freezes_in_a_pass(tmp_path: Path, killed: Path) -> None:
    """The other rank waits in a collective of FSDP2, or in that of an order."""
    check_frozen(tmp_path, "pass", killed)


def check_frozen(folder: Path, moment: str, killed: Path) -> None:
    run = folder / "r"
    with run_windfall(folder, *SHORT, f"train.rank_timeout_s={TIMEOUT_S}") as running:
        lose(folder, running, 1, moment, 1, signal.SIGSTOP)
        frozen_s = time.monotonic()
        wait_for_trainer(folder, running, 2)
        assert time.monotonic() - frozen_s < 90
        finish(folder, running)
    assert "restarting in 2 s (failure 1 of 4)" in (folder / "out.txt").read_text()
    assert f"Timed out waiting {TIMEOUT_S * 1000}ms" in (run / "trainer.log").read_text()
    assert trained_steps(run)[-1] == 2
    assert weights(run) == weights(killed / "r")


# chosen moments


KILLS = (
    ("publish", 1, 0), ("pass", 3, 0), ("step", 2, 1), ("model.safetensors", 0, 1), ("update", 0, 2),
    ("windfall/optimizer.safetensors", 3, 2),
)  # fmt: skip
"""What the trainer does when a rank is killed, which rank, and after how many checkpoints."""
UPDATE_S = 0.5
"""From the first pass of a step to one of its updates, about."""


def lose(
    folder: Path, running: subprocess.Popen[bytes], start: int, moment: str, rank: int, how: int = signal.SIGKILL
) -> None:
    """Send a signal to a rank after this start of the trainer, at the next such moment."""
    pids = wait_for_trainer(folder, running, start)
    wait_until(moments(folder / "r", pids)[moment], folder, running, POLL_S)
    time.sleep(UPDATE_S if moment == "update" else 0.0)
    os.kill(pids[rank], how)


def moments(run: Path, pids: list[int]) -> dict[str, Callable[[], object]]:
    used_s, made, steps = cpu_s(pids[0]), len(buffers(pids[0])), len(trained_steps(run))
    partial = lambda name: lambda: list((run / "checkpoints").glob(f".partial-*/{name}"))  # noqa: E731
    return {
        "pass": lambda: cpu_s(pids[0]) > used_s + 0.1,
        "update": lambda: cpu_s(pids[0]) > used_s + 0.1,
        "publish": lambda: len(buffers(pids[0])) > made,
        "step": lambda: len(trained_steps(run)) > steps,
        "model.safetensors": partial("*model.safetensors"),
        "windfall/optimizer.safetensors": partial("windfall/optimizer.safetensors"),
    }


def buffers(pid: int) -> set[int]:
    """The buffers of published weights in a process. Its first update makes a second one."""
    found = set[int]()
    for file in Path(f"/proc/{pid}/fd").iterdir():
        try:
            if "memfd:windfall-weights" in str(file.readlink()):
                found.add(file.stat().st_ino)
        except FileNotFoundError:
            pass
    return found


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "more",
    [(), ("train.lora.rank=4", "fleet.local=true", "fleet.workers=0"), ("train.context_parallel=2",)],
    ids=["all weights", "adapters", "context groups"],
)
def test_four_ranks_are_killed_at_every_part_of_a_step(tmp_path: Path, more: tuple[str, ...]) -> None:
    """With adapters, the engines of the ranks generate; without, a worker does."""
    steps = 6  # two more than the kills need: a kill may come one step late
    changes = ["train.ranks=4", f"run.steps={steps}", "checkpoint.every=1", "checkpoint.keep=9", *more]
    with run_windfall(tmp_path / "undisturbed", *changes) as running:
        finish(tmp_path / "undisturbed", running)
    folder, run = tmp_path / "killed", tmp_path / "killed" / "r"
    with run_windfall(folder, *changes) as running:
        for start, (moment, rank, after) in enumerate(KILLS, 1):
            saved = run / "checkpoints" / f"step-{after:06d}"
            wait_until(lambda saved=saved, after=after: not after or saved.exists(), folder, running)
            lose(folder, running, start, moment, rank)
        finish(folder, running)
    assert len(events(run, "trainer_ready")) == 1 + len(KILLS)
    assert sorted(set(trained_steps(run))) == list(range(1, steps + 1))
    assert weights(run) == weights(tmp_path / "undisturbed" / "r")


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_ranks_are_killed_at_random(tmp_path: Path) -> None:
    with run_windfall(tmp_path / "undisturbed") as running:
        finish(tmp_path / "undisturbed", running)
    expected = weights(tmp_path / "undisturbed" / "r")
    for seed in range(4):
        draw, folder = random.Random(seed), tmp_path / str(seed)
        with run_windfall(folder) as running:
            for start in range(1, 4):
                pids = wait_for_trainer(folder, running, start)
                time.sleep(draw.uniform(0.0, 3.0))
                if running.poll() is not None:
                    break
                os.kill(draw.choice(pids), signal.SIGKILL)
            finish(folder, running)
        assert weights(folder / "r") == expected
        assert trained_steps(folder / "r")[-1] == 4
