"""Everything that an environment starts ends with it, whichever process is killed."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.hostile import environments as hostile
from tests.support.hostile.pool_calls import alive, ask, environment_pid, failure, hosting, run, wait_for
from windfall.processes import reaper

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
COUNT = 8
KINDS = 4
"""Ways in which LeavesProcesses starts a process."""


def pids_in(path: Path) -> list[int]:
    return [int(line) for line in path.read_text().split()] if path.exists() else []


def wait_until_left(path: Path, count: int) -> list[int]:
    return wait_for(lambda: len(pids_in(path)) == count and pids_in(path), "the environment started its processes")


@pytest.mark.parametrize("how", ["pool ends", "call is killed", "environment", "inner reaper", "outer reaper"])
def test_nothing_that_an_environment_started_survives(how: str, tmp_path: Path) -> None:
    """Children with their own session, daemons, and processes that ignore signals and hold all files open."""
    path, tree = tmp_path / "pids", list[int]()

    async def main() -> None:
        wait_s = 1e6 if how == "call is killed" else 0.0
        async with hosting(hostile.LeavesProcesses, file=str(path), count=COUNT, wait_s=wait_s, from_task=1) as pool:
            outer = pool.places[0].process.pid
            inner, environment, *_ = reaper.descendants(outer)
            tree.extend((outer, inner, environment))
            if how == "call is killed":
                assert "waited 1 s for" in (await failure(ask(pool, 1, limit_s=1.0))).error
            else:
                assert (await ask(pool, 1)).reward == 1.0
            tree.extend(wait_until_left(path, COUNT * KINDS))
            victims = {"environment": environment, "inner reaper": inner, "outer reaper": outer}
            if how in victims:
                os.kill(victims[how], signal.SIGKILL)
            if how != "pool ends":
                await asyncio.to_thread(wait_for, lambda: not alive(tree), "they end while the pool continues")
                assert (await ask(pool, 0, "four")).reward == 4.0

    run(main)
    wait_for(lambda: not alive(tree), "they have ended")


def test_environment_that_forks_on_and_on_ends(tmp_path: Path) -> None:
    """Each process lives for a moment only. Their group is killed at once."""
    path = tmp_path / "pids"

    async def main() -> None:
        async with hosting(hostile.ForksOnAndOn, file=str(path)) as pool:
            assert (await ask(pool, 1)).reward == 1.0
            await asyncio.to_thread(wait_for, lambda: len(pids_in(path)) > 20, "it forks")

    run(main)
    wait_for(lambda: not alive(pids_in(path)), "it has ended")
    size = path.stat().st_size
    wait_for(lambda: not alive(pids_in(path)), "it has ended")
    assert path.stat().st_size == size


@pytest.mark.parametrize("env", ["Sleeps", "HoldsTheLock", "LeavesProcesses"])
def test_kill_9_of_the_parent_leaves_nothing(env: str, tmp_path: Path) -> None:
    path = tmp_path / "pids"
    program = f"""
import asyncio
from tests.support.hostile.pool_calls import *
async def main():
    async with hosting("tests.support.hostile.environments:{env}", file={str(path)!r}, wait_s=1e6) as pool:
        print(pool.places[0].process.pid, flush=True)
        await ask(pool, 1, limit_s=600.0)
asyncio.run(main())
"""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    with subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, env=environment
    ) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        left = wait_until_left(path, 3 * KINDS) if env == "LeavesProcesses" else []
        tree = [pid, *reaper.descendants(pid), *left]
        assert len(tree) >= 3 + len(left)
        parent.send_signal(signal.SIGKILL)
    wait_for(lambda: not alive(tree), "they have ended")


def test_grandchild_that_holds_the_link_does_not_hide_the_end_of_its_process(tmp_path: Path) -> None:
    async def main() -> None:
        async with hosting(hostile.LeavesProcesses, file=str(tmp_path / "pids"), from_task=1) as pool:
            assert (await ask(pool, 1)).reward == 1.0
            os.kill(environment_pid(pool), signal.SIGKILL)
            assert (await ask(pool, 0, "four", limit_s=600.0)).reward == 4.0

    run(main)


def test_stopped_reaper_is_woken_up_to_end(tmp_path: Path) -> None:
    path = tmp_path / "pids"

    async def main() -> None:
        async with hosting(hostile.LeavesProcesses, file=str(path), count=1) as pool:
            assert (await ask(pool, 1)).reward == 1.0
            wait_until_left(path, KINDS)
            os.kill(pool.places[0].process.pid, signal.SIGSTOP)
            os.kill(environment_pid(pool), signal.SIGSTOP)

    run(main)
    wait_for(lambda: not alive(wait_until_left(path, KINDS)), "they have ended")
