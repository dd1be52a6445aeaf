"""Runs with several policies, from end to end: workers, trainers and the controller are killed, and the weights of all
policies are the same, bit for bit. Quick: test_policy_beside.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.runs.policy_runs import WORKERS_COME_AND_GO, checkpoint_files, events, finish, steps
from windfall.run.commands import export

RECIPE = """
[env]
name = "custom"
factory = "examples.solver_verifier:SolverVerifier"
[policies.solver]
lora = { rank = 4 }
[policies.verifier]
lora = { rank = 4 }
rollout = { max_tokens = 120 }
[rollout]
groups = 3
group_size = 4
max_tokens = 60
[checkpoint]
every = 2
"""
TWO_BASES = ("policies.verifier={ rollout = { max_tokens = 120 } }", "fleet.workers=2")
NAMES = "solver", "verifier"


def check_same(plain: Path, killed: Path, last: int) -> None:
    assert {*steps(plain)} == {*steps(killed)} == {(name, n) for name in NAMES for n in range(1, last + 1)}
    for name in NAMES:
        assert checkpoint_files(plain, name, last) == checkpoint_files(killed, name, last)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_kills_change_no_policy(tmp_path: Path) -> None:
    """Workers come and go; then the trainer is killed, which both policies share, and then the controller."""
    plain = finish(tmp_path / "a", RECIPE, "run.steps=3")
    kills = (3, "verifier"), (5, "controller")
    killed = finish(tmp_path / "b", RECIPE, "run.steps=3", *WORKERS_COME_AND_GO, kills=kills)
    check_same(plain, killed, 3)
    assert len({e["pid"] for e in events(killed, "trainer_ready")}) == 2
    assert events(killed, "worker_lost")


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "changes",
    [(), TWO_BASES, ("rollout.replay=0.5", "rollout.select=greso")],
    ids=["adapters of one base", "two bases", "replay and selected prompts"],
)
def test_kill_of_each_process_changes_no_policy(tmp_path: Path, changes: tuple[str, ...]) -> None:
    plain = finish(tmp_path / "plain", RECIPE, "run.steps=4", *changes)
    for what in ("solver", "verifier", "controller"):
        killed = finish(tmp_path / what, RECIPE, "run.steps=4", *changes, kills=[(5, what)])
        check_same(plain, killed, 4)
    check_same(plain, finish(tmp_path / "workers", RECIPE, "run.steps=4", *changes, *WORKERS_COME_AND_GO), 4)
    assert export.export(plain, None, "verifier").folder.parent == plain / "policies" / "verifier" / "exports"
