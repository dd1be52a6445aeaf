"""One adapter policy alone, and the same beside another one on one fleet and one trainer: identical weights."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.runs.policy_runs import WORKERS_COME_AND_GO, checkpoint_files, finish, steps

ALONE = """
[env]
name = "custom"
factory = "tests.programs.ask_roles:AskRoles"
options = { roles = ["solver"] }
[policies.solver]
lora = { rank = 4 }
[rollout]
groups = 3
group_size = 4
max_tokens = 24
"""
BESIDE = f"""{ALONE.replace('"solver"', '"solver", "verifier"')}
[policies.verifier]
lora = {{ rank = 8 }}
algorithm = "rloo"
train = {{ lr = 1e-2 }}
rollout = {{ groups = 2, temperature = 0.7, max_tokens = 40 }}
"""
STEPS = "run.steps=3"


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_policy_has_the_same_weights_alone_and_beside_another(tmp_path: Path) -> None:
    alone, beside = finish(tmp_path / "a", ALONE, STEPS), finish(tmp_path / "b", BESIDE, STEPS)
    assert {*steps(alone)} == {("solver", n) for n in (1, 2, 3)}
    assert {*steps(beside)} == {(name, n) for name in ("solver", "verifier") for n in (1, 2, 3)}
    files = checkpoint_files(alone, "solver", 3)
    assert files == checkpoint_files(beside, "solver", 3)
    other = checkpoint_files(beside, "verifier", 3)
    assert all(files[name] != other[name] for name in ("adapter_model.safetensors", "windfall/optimizer.safetensors"))


@pytest.mark.timeout(600)
@pytest.mark.slow
def test_policy_has_the_same_weights_beside_another_if_processes_are_killed(tmp_path: Path) -> None:
    alone = finish(tmp_path / "a", ALONE, STEPS)
    kills = (3, "verifier"), (4, "controller")
    beside = finish(tmp_path / "b", BESIDE, STEPS, *WORKERS_COME_AND_GO, "checkpoint.every=2", kills=kills)
    assert checkpoint_files(alone, "solver", 3) == checkpoint_files(beside, "solver", 3)
