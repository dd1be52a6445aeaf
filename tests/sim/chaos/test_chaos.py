"""Thousands of faults at once on small simulated runs, with every rule checked after every event: no rule is broken.

`windfall sim chaos --seed S --seeds 1` replays a seed. That each rule can fail: test_chaos_rules.py. Not covered here:
several turns of a response (tests/rollout/test_kill_everywhere.py), bytes on a socket, real processes and real weights
(tests/test_soak.py), a disk that is full (tests/launch/processes/test_controller.py), a machine that loses what it had written.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from windfall.errors import WindfallError
from windfall.scheduling.placement import Placement
from windfall.sim.chaos import command
from windfall.sim.chaos.faults import KINDS
from windfall.sim.chaos.trial import TrialResult, trial

FAULTS = 500
SEEDS = 40
AT_ONCE = 5


def hold(first: int, count: int, faults: int, folder: Path) -> list[TrialResult]:
    done = []
    for seed in range(first, first + count):
        done.append(trial(seed, faults=faults, folder=folder))
        again = f"windfall sim chaos --seed {seed} --seeds 1 --faults {faults}"
        assert done[-1].broken is None, f"{again}: {done[-1].broken}"
    return done


@pytest.mark.parametrize("first", range(0, SEEDS, AT_ONCE))
def test_no_rule_is_broken(first: int, tmp_path: Path) -> None:
    done = hold(first, AT_ONCE, FAULTS, tmp_path)
    assert all(o.faults.total() == FAULTS and o.steps > 0 for o in done)
    assert sum(o.controllers + o.trainers for o in done) > 8 * AT_ONCE, "or this says little"
    assert set(sum((o.faults for o in done), Counter[str]())) == set(KINDS)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("first", range(1000, 1600, 100))
def test_no_rule_is_broken_by_more_seeds(first: int, tmp_path: Path) -> None:
    hold(first, 100, FAULTS, tmp_path)


def test_the_same_seed_gives_the_same_log_in_any_process(tmp_path: Path) -> None:
    """Also with restarts of controller and trainer."""
    for place in ("here", "there"):
        (tmp_path / place).mkdir()
    done = trial(3, faults=150, folder=tmp_path / "here")
    assert min(done.controllers, done.trainers) > 1
    code = (
        "import sys; from pathlib import Path; from windfall.sim.chaos.trial import trial;"
        "trial(3, faults=150, folder=Path(sys.argv[1]))"
    )
    env = {**os.environ, "PYTHONHASHSEED": "7"}
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "there")], check=True, env=env)
    here, there = ((tmp_path / place / "3.jsonl").read_bytes() for place in ("here", "there"))
    assert here == there
    assert here.count(b'"resumed"') > 2


def test_the_command_says_what_happened(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    command.main(seeds=2, seed=3, faults=60, out=tmp_path / "logs")
    said = capsys.readouterr().out
    assert "120 faults in 2 runs of" in said
    assert all(kind in said for kind in KINDS)
    assert sorted(p.name for p in (tmp_path / "logs").iterdir())[:2] == ["3.calm.jsonl", "3.jsonl"]


def test_the_command_says_how_to_replay_what_broke(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Placement, "done_with", lambda self, groups: None)
    with pytest.raises(WindfallError, match=r"seed 1: level: after step 1 there are left: .*groups with pages") as e:
        command.main(seeds=3, seed=1, faults=60)
    assert "windfall sim chaos --seed 1 --seeds 1 --faults 60" in e.value.fix
    assert '"name": "step"' in capsys.readouterr().out, "the last events"
