"""A run under many faults, with real processes and real signals: `benchmarks/kills/soak.py`, short and long.

tests/chaos/test_chaos.py checks the rules under far more faults. Not covered: a machine that loses its memory or
disk, and a network that loses packets; everything here runs on one machine.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from windfall.processes import parent_death

SOAK = Path(__file__).parents[2] / "benchmarks" / "kills" / "soak.py"


def soak(folder: Path, *options: str, timeout_s: float) -> str:
    """Run the soak and return its output. It and its runs end when this process ends."""
    command = [sys.executable, str(SOAK), "--keep", str(folder), *options]
    guarded = [sys.executable, "-I", "-S", parent_death.__file__, str(os.getpid()), str(int(signal.SIGTERM)), *command]
    done = subprocess.run(guarded, capture_output=True, text=True, timeout=timeout_s, check=False)
    assert done.returncode == 0, f"{done.stdout}{done.stderr}\n{_tail(folder / 'hunted.out')}"
    return done.stdout


def _tail(path: Path) -> str:
    return "\n".join(path.read_text().splitlines()[-40:]) if path.is_file() else ""


@pytest.mark.slow
def test_killed_and_frozen_run_ends_like_an_undisturbed_one(tmp_path: Path) -> None:
    output = soak(
        tmp_path, "--kills", "4", "--controller", "1", "--trainer", "1", "--steps", "4", "--seed", "0", timeout_s=280
    )
    assert "1 controller kill" in output
    assert "1 trainer kill" in output
    assert "bit for bit the same" in output


@pytest.mark.slow
def test_asynchronous_run_keeps_its_rules_when_it_is_killed(tmp_path: Path) -> None:
    output = soak(
        tmp_path, "--kills", "1", "--controller", "1", "--trainer", "1", "--staleness", "2", "--steps", "6",
        "--workers", "2", "--seed", "0", timeout_s=280,
    )  # fmt: skip
    assert "1 controller kill" in output
    assert "1 trainer kill" in output
    assert "the bound is 2" in output


@pytest.mark.slow
@pytest.mark.timeout(800)
@pytest.mark.parametrize("mode", [(), ("--run", "1", "--staleness", "2")], ids=["sync", "async and resumed"])
def test_every_token_is_trained_with_the_experts_of_its_engine(tmp_path: Path, mode: tuple[str, ...]) -> None:
    output = soak(
        tmp_path, "--experts", "--kills", "3", "--controller", "1", "--trainer", "1", "--steps", "8", "--workers", "2",
        "--seed", "0", *mode, timeout_s=750,
    )  # fmt: skip
    assert "tokens trained with those of the engine, 0 with others" in output


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("on_new_weights", ["interrupt", "finish"])
def test_asynchronous_run_survives_many_signals(tmp_path: Path, on_new_weights: str) -> None:
    output = soak(
        tmp_path, "--kills", "40", "--controller", "5", "--trainer", "5", "--run", "2", "--fork-server", "1", "--seed",
        "0", "--staleness", "2", "--on-new-weights", on_new_weights, timeout_s=1400,
    )  # fmt: skip
    assert "5 controller kill, 1 fork_server kill, 2 run kill, 5 trainer kill" in output


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_run_survives_a_hundred_signals(tmp_path: Path) -> None:
    output = soak(
        tmp_path, "--kills", "100", "--controller", "5", "--trainer", "5", "--fork-server", "1", "--seed", "0",
        timeout_s=1400,
    )  # fmt: skip
    assert "5 controller kill" in output
    assert "5 trainer kill" in output
