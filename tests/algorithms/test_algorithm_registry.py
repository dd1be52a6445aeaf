from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import windfall.algorithms
from windfall.algorithms import ALGORITHMS, make
from windfall.algorithms.dapo import DAPO
from windfall.errors import WindfallError


def test_names_of_the_algorithms() -> None:
    assert sorted(ALGORITHMS) == ["cispo", "dapo", "dr_grpo", "grpo", "gspo", "reinforce_pp", "rloo"]


def test_make_passes_options_on() -> None:
    assert make("dapo", clip_high=0.3, overlong_cache=8) == DAPO(clip_high=0.3, overlong_cache=8)


def test_unknown_names_are_refused_with_a_suggestion() -> None:
    with pytest.raises(WindfallError, match="unknown algorithm 'dr-grpo'\nDid you mean 'dr_grpo'"):
        make("dr-grpo")
    with pytest.raises(WindfallError, match="algorithm dapo: unknown option 'clip_hi'\nDid you mean 'clip_high'"):
        make("dapo", clip_hi=0.3)
    with pytest.raises(WindfallError, match="unknown option 'scope'"):
        make("grpo", scope="batch")
    with pytest.raises(WindfallError, match="unknown baseline 'grp'"):
        make("reinforce_pp", baseline="grp")


def test_options_without_effect_and_impossible_ones_are_refused() -> None:
    with pytest.raises(WindfallError, match="overlong_penalty has no effect without overlong_cache"):
        make("dapo", overlong_penalty=0.5)
    for value in (-0.2, float("nan")):
        with pytest.raises(WindfallError, match=f"algorithm grpo: clip = {value} is not 0 or more"):
            make("grpo", clip=value)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_algorithms_cannot_be_changed(name: str) -> None:
    assert ALGORITHMS[name].__dataclass_params__.frozen  # pyright: ignore[reportAttributeAccessIssue]


def test_import_does_not_load_torch() -> None:
    code = "import sys, windfall.algorithms, windfall.algorithms.kl, windfall.algorithms.importance as _; "
    code += "sys.exit('torch' in sys.modules)"
    env = {**os.environ, "PYTHONPATH": str(Path(windfall.algorithms.__file__).parents[2])}
    assert subprocess.run([sys.executable, "-c", code], env=env).returncode == 0
