"""vLLM returns the experts of every token (tests/support/engines/vllm_experts.py says how its second runner runs on a
CPU)."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.engines import vllm_case


@pytest.mark.timeout(600)
def test_every_token_has_its_experts() -> None:
    command = [sys.executable, "-m", "tests.support.engines.vllm_experts"]
    root = Path(__file__).parents[3]
    path = os.pathsep.join((str(root), str(root / "src")))
    done = subprocess.run(
        command, cwd=root, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True, timeout=580,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    assert "every token has its experts" in done.stdout


def test_a_runner_that_records_none_says_why(capsys: pytest.CaptureFixture[str]) -> None:
    e = vllm_case.engine(vllm_case.build("qwen3-moe"), experts=True)
    if vllm_case.DEVICE == "cpu":
        assert not e.capabilities.experts
        assert "does not record the experts of tokens here: vLLM cannot run" in capsys.readouterr().err
