"""What an environment prints: a limited part of it is kept, and the user learns where."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.support.hostile import environments as hostile
from tests.support.hostile.pool_calls import ask, run, section
from windfall.envs.grade import trial
from windfall.envs.process_pool.pool import EnvPool
from windfall.processes import output_log

LINES = 3 * output_log.LIMIT_BYTES // 99
"""More than both files of a log hold."""


def test_output_is_kept_within_a_limit(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    log = tmp_path / "env.log"

    async def main() -> None:
        given = section(hostile.Prints, count=LINES, from_task=1)
        async with EnvPool(given, 0, output=log) as pool:
            await pool.ready()
            assert (await ask(pool, 0, "four")).reward == 4.0
            assert not log.exists()
            assert (await ask(pool, 1, limit_s=120.0)).reward == 1.0
            while not log.exists() or f"line {LINES - 1} " not in log.read_text():
                await asyncio.sleep(0.05)

    run(main)
    assert log.stat().st_size <= output_log.LIMIT_BYTES
    assert log.stat().st_size + (tmp_path / "env.log.1").stat().st_size > output_log.LIMIT_BYTES
    assert f"line {LINES - 1} " in log.read_text()
    assert capfd.readouterr() == ("", "")


def test_trial_shows_little_of_the_output(capfd: pytest.CaptureFixture[str]) -> None:
    asyncio.run(trial(EnvPool(section(hostile.Prints, count=20_000), 0), 60.0))
    out, err = capfd.readouterr()
    assert out == ""
    assert err.startswith("line 0 ")
    assert err.endswith("\n(more was printed, which is not shown)\n")
    assert len(err) < 2 * output_log.SHOWN_BYTES


def test_output_is_not_taken_for_answers(tmp_path: Path) -> None:
    log = tmp_path / "env.log"

    async def main() -> None:
        async with EnvPool(section(hostile.Chatty), 0, output=log) as pool:
            await pool.ready()
            assert (await ask(pool, 1)).reward == 0.0

    run(main)
    assert "said on stdout" in log.read_text()
    assert "said on stderr" in log.read_text()
