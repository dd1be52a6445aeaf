"""Thousands of faults on small simulated runs, with every invariant checked after every callback: no invariant breaks.

`python -m tests.chaos --seed S --seeds 1` replays a seed. test_invariants.py shows that each invariant can fail. Not
covered here: responses of several turns (tests/controller/rollout/test_kill_everywhere.py), bytes on a socket, real
processes and real weights (tests/runs/test_soak.py), a full disk (tests/controller/test_process.py), a machine that
loses written data.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests.chaos import trial as trials
from tests.chaos.faults import KINDS
from tests.chaos.trial import TrialResult, trial
from windfall.controller.scheduling.placement import Placement
from windfall.errors import WindfallError

FAULTS = 500
SEEDS_PER_TEST = 3


def run_trials(first: int, count: int, faults: int, folder: Path, policies: int = 1) -> list[TrialResult]:
    done = []
    for seed in range(first, first + count):
        done.append(trial(seed, faults=faults, folder=folder, policies=policies))
        command_line = f"python -m tests.chaos --seed {seed} --seeds 1 --faults {faults} --policies {policies}"
        assert done[-1].broken is None, f"{command_line}: {done[-1].broken}"
    return done


@pytest.mark.parametrize("first", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in (3, 6, 9))])
def test_no_invariant_breaks(first: int, tmp_path: Path) -> None:
    done = run_trials(first, SEEDS_PER_TEST, FAULTS, tmp_path)
    assert all(o.faults.total() == FAULTS and o.steps > 0 for o in done)
    assert sum(o.controllers + o.trainers for o in done) > 8 * SEEDS_PER_TEST, "too few restarts for a meaningful test"
    assert set(sum((o.faults for o in done), Counter[str]())) == set(KINDS)


@pytest.mark.parametrize(("seed", "policies"), [(0, 2), pytest.param(1, 2, marks=pytest.mark.slow), (1, 3)])
def test_no_invariant_breaks_with_several_policies(seed: int, policies: int, tmp_path: Path) -> None:
    """Seed 0: synchronous, on two bases. Seed 1: asynchronous, on one."""
    (done,) = run_trials(seed, 1, FAULTS // 4, tmp_path, policies)
    assert done.faults.total() == FAULTS // 4
    assert done.steps >= policies
    assert done.controllers + done.trainers > 2, "nothing was restarted"


@pytest.mark.parametrize(("seed", "faults", "policies"), [(667, 120, 1), (707, 120, 1), (39, 40, 2)])
def test_seed_that_once_broke_an_invariant(seed: int, faults: int, policies: int, tmp_path: Path) -> None:
    run_trials(seed, 1, faults, tmp_path, policies)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("first", "policies"), [*((n, 1) for n in range(1000, 1600, 100)), (1600, 2), (1700, 3)])
def test_no_invariant_breaks_with_more_seeds(first: int, policies: int, tmp_path: Path) -> None:
    run_trials(first, 100, FAULTS, tmp_path, policies)


@pytest.mark.slow
def test_same_seed_gives_the_same_log_in_every_process(tmp_path: Path) -> None:
    """This includes restarts of the controller and the trainer."""
    for folder in ("here", "there"):
        (tmp_path / folder).mkdir()
    done = trial(3, faults=150, folder=tmp_path / "here")
    assert min(done.controllers, done.trainers) > 1
    code = (
        "import sys; from pathlib import Path; from tests.chaos.trial import trial;"
        "trial(3, faults=150, folder=Path(sys.argv[1]))"
    )
    env = {**os.environ, "PYTHONHASHSEED": "7"}
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "there")], check=True, env=env)
    here, there = ((tmp_path / folder / "3.jsonl").read_bytes() for folder in ("here", "there"))
    assert here == there
    assert here.count(b'"resumed"') > 2


@pytest.mark.slow
def test_command_prints_the_faults_by_kind(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    trials.main(seeds=2, seed=3, faults=60, out=tmp_path / "logs")
    output = capsys.readouterr().out
    assert "120 faults in 2 runs of" in output
    assert all(kind in output for kind in KINDS)
    assert sorted(p.name for p in (tmp_path / "logs").iterdir()) == ["3.jsonl", "4.calm.jsonl", "4.jsonl"]


def test_command_prints_how_to_replay_a_broken_invariant(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Placement, "done_with", lambda self, group, size: None)
    with pytest.raises(
        WindfallError, match=r"seed 0: level: the controller still holds after step 1: .*groups with pages"
    ) as e:
        trials.main(seeds=3, seed=0, faults=60)
    assert "python -m tests.chaos --seed 0 --seeds 1 --faults 60" in e.value.fix
    assert '"name": "step"' in capsys.readouterr().out, "the last events"
