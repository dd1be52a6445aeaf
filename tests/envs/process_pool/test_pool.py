"""Hostile environments in child processes: every call ends in a value or in a failure that names the environment."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.support.hostile import environments as hostile
from tests.support.hostile.pool_calls import ask, environment_pid, failure, hosting, run, section
from windfall.envs.grade import grade
from windfall.envs.process_pool import pool as pools
from windfall.envs.process_pool.pool import EnvPool
from windfall.processes import reaper
from windfall.recipe.file import parse_recipe
from windfall.types import Feedback, Task, Turn


@pytest.mark.parametrize("env", [hostile.Sound, hostile.Awaiting])
def test_plain_and_async_functions_run_in_a_child(env: type) -> None:
    async def main() -> None:
        async with hosting(env) as pool:
            assert pool.name == env.__name__
            assert await pool.task(7, 5.0) == Task(id="hostile/7", prompt="7+1=")
            got = await asyncio.gather(*(ask(pool, i, "x" * i) for i in range(50)))
            assert [f.reward for f in got] == [float(i) for i in range(50)]

    run(main)


@pytest.mark.parametrize("env", [hostile.Sleeps, hostile.HoldsTheLock])
def test_blocking_call_is_killed_at_its_limit_and_named(env: type) -> None:
    """Neither a sleep nor a computation that holds the interpreter's lock stops our loop or the other calls."""

    async def main() -> None:
        async with hosting(env, from_task=1) as pool:
            await ask(pool, 0)
            began, ticks = time.monotonic(), 0
            blocked = asyncio.create_task(failure(ask(pool, 1, limit_s=0.5)))
            while not blocked.done():
                await asyncio.sleep(0.01)
                ticks += 1
            error = await blocked
            assert 0.4 < time.monotonic() - began < 30.0
            assert ticks > 2, "the loop went on meanwhile, however little CPU time it got"
            assert error.error == f"waited 0.5 s for {env.__name__}.feedback of task 'hostile/1'"
            assert "in misbehave" in error.traceback
            assert (await ask(pool, 0, "four")).reward == 4.0

    run(main)


def test_child_that_cannot_be_killed_delays_nothing(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Like a child in uninterruptible sleep: its signal is not delivered."""
    pids = list[int]()
    send = reaper.send_signal
    lost = lambda pid, number: pids.append(pid) if number == signal.SIGKILL else send(pid, number)  # noqa: E731
    monkeypatch.setattr(reaper, "send_signal", lost)

    async def main() -> None:
        async with hosting(hostile.Sleeps, from_task=1) as pool:
            pool.places[0].process._kill_timeout_s = 1.0
            error = await failure(ask(pool, 1, limit_s=0.5))
            assert pool._killing  # the call has failed, but its child has not ended yet
            assert "in misbehave" in error.traceback
            assert (await ask(pool, 0, "four")).reward == 4.0

    try:
        run(lambda: asyncio.wait_for(main(), 20.0))
    finally:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)
    assert "to end by SIGKILL; it is left behind" in capfd.readouterr().err


def test_waiting_call_is_canceled_and_the_others_continue() -> None:
    async def main() -> None:
        async with hosting(hostile.Hangs) as pool:
            pid = environment_pid(pool)
            hang = asyncio.create_task(failure(ask(pool, 1, "hang", 0.4)))
            assert (await ask(pool, 2)).reward == 1.0
            error = await hang
            assert error.error == "waited 0.4 s for Hangs.feedback of task 'hostile/1'"
            assert "await asyncio.Event().wait()" in error.traceback
            assert environment_pid(pool) == pid

    run(main)


def test_only_the_call_that_blocks_the_loop_is_blamed() -> None:
    async def main() -> None:
        async with hosting(hostile.SleepsOnTheLoop) as pool:
            texts = ["block" if i == 5 else "fine" for i in range(12)]
            got = await asyncio.gather(*(ask(pool, i, t, 1.0) for i, t in enumerate(texts)), return_exceptions=True)
            assert [f.reward for i, f in enumerate(got) if i != 5] == [1.0] * 11  # pyright: ignore
            assert "waited 1 s for SleepsOnTheLoop.feedback of task 'hostile/5'" in str(got[5])

    run(main)


def test_child_whose_loop_is_blocked_by_no_call_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pools, "SILENT_S", 0.3)

    async def main() -> None:
        async with hosting(hostile.BlocksElsewhere) as pool:
            assert "waited 0.5 s" in (await failure(ask(pool, 1, limit_s=0.5))).error

    run(main)


def test_call_that_ignores_its_cancellation_is_killed_while_others_are_answered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pools, "SILENT_S", 0.3)

    async def main() -> None:
        async with hosting(hostile.Stubborn) as pool:
            hang = asyncio.create_task(failure(ask(pool, 1, "hang", 0.4)))
            deadline = time.monotonic() + 120.0
            while not hang.done() and time.monotonic() < deadline:
                assert (await ask(pool, 2)).reward == 1.0
            assert hang.done()
            error = await hang
            assert error.error == "waited 0.4 s for Stubborn.feedback of task 'hostile/1'"
            assert "await asyncio.sleep(1e6)" in error.traceback

    run(main)


@pytest.mark.parametrize(
    ("env", "text", "says"),
    [
        (hostile.Raises, "abc", "Raises.feedback of task 'hostile/1' raised KeyError: 'no such key: abc'"),
        (hostile.Leaves, "abc", "the process that ran Leaves.feedback of task 'hostile/1' ended with status 3"),
        (hostile.Crashes, "abc", "the process that ran Crashes.feedback of task 'hostile/1' was killed (SIGSEGV)"),
        (hostile.ExitsPolitely, "abc", "raised SystemExit: I have had enough"),
        (hostile.Garbage, "none", "is wrong: it is a NoneType, not a Feedback"),
        (hostile.Garbage, "text", "is wrong: it is a str, not a Feedback"),
        (hostile.Garbage, "nan", "is wrong: the reward is nan"),
        (hostile.Garbage, "vast", "Garbage.feedback of task 'hostile/1' is wrong: the reward is a number too large"),
        (
            hostile.Garbage,
            "large",
            "is wrong: the reward -1e+30 is too large: its absolute value may be at most 1,000,000,000",
        ),
        (hostile.Garbage, "empty", "is wrong: it has neither a reward nor an observation"),
        (hostile.Garbage, "list", "is wrong: the observation is a list, not text"),
        (hostile.Garbage, "half", "is wrong: the observation is not valid Unicode"),
        (hostile.Garbage, "huge", "is wrong: the observation has 8,388,608 characters"),
    ],
)
def test_failure_is_named_and_the_next_call_works(env: type, text: str, says: str) -> None:
    async def main() -> None:
        async with hosting(env, from_task=1) as pool:
            error = await failure(ask(pool, 1, text))
            assert says in error.error
            assert error.cause
            if env in (hostile.Raises, hostile.Crashes, hostile.ExitsPolitely):
                assert "in misbehave" in error.traceback
                assert "windfall/envs" not in error.traceback
            assert (await ask(pool, 0, "four")).reward == 4.0

    run(main)


LEFT = """
import socket
from windfall.envs.process_pool.child_main import ChildProgram

pool, child = socket.socketpair()
child.sendall(b"an answer")
pool.close()
ChildProgram(child, None)._readable()
print("it goes on")
"""


def test_environment_whose_pool_left_answers_unread_ends_without_an_error() -> None:
    done = subprocess.run([sys.executable, "-c", LEFT], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.parametrize("env", [hostile.Forks, hostile.Sound])
def test_environment_may_fork(env: type, capfd: pytest.CaptureFixture[str]) -> None:
    """Both processes return from the call. Only the first one answers, and reads the next call."""

    async def main() -> None:
        async with hosting(env) as pool:
            pid = environment_pid(pool)
            assert [f.reward for f in await asyncio.gather(*(ask(pool, n, "x") for n in range(20)))] == [1.0] * 20
            assert environment_pid(pool) == pid

    run(main)
    assert capfd.readouterr().err == ""


def test_call_is_not_retried_after_too_many_children_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("windfall.envs.calls.MAX_MOVES", 1)

    async def main() -> None:
        async with hosting(hostile.LeavesUnseen) as pool:
            graded = await grade(pool, 1, await pool.task(1, 5.0), [Turn(text="abc")], tries=3)
            assert graded.tries == 1
            assert "2 processes ended during LeavesUnseen.feedback of task 'hostile/1'" in str(graded.failure)

    run(main)


def test_same_failure_has_the_same_cause_for_any_message() -> None:
    async def main() -> None:
        async with hosting(hostile.Raises) as pool:
            errors = [await failure(ask(pool, i, f"text {i}")) for i in range(3)]
            assert len({e.error for e in errors}) == 3
            assert len({e.cause for e in errors}) == 1

    run(main)


def test_slow_grader_loses_nothing_and_gets_more_processes() -> None:
    async def main() -> None:
        async with hosting(hostile.Sleeps, s=0.1) as pool:
            task = await pool.task(0, 30.0)
            calls = [pool.feedback(0, task, [Turn(text="a")], 30.0) for _ in range(80)]
            assert [f.reward for f in await asyncio.gather(*calls)] == [1.0] * 80
            assert len(pool.places) > 4

    run(main)


def test_async_grader_runs_many_at_once_in_a_process() -> None:
    async def main() -> None:
        async with hosting(hostile.Awaiting, s=0.1) as pool:
            task = await pool.task(0, 30.0)
            await asyncio.gather(*(pool.feedback(0, task, [Turn(text="a")], 30.0) for _ in range(1000)))
            assert len(pool.places) <= 2  # on a busy machine one more may look useful

    run(main)


def test_environments_of_windfall_get_one_process_per_core_by_default() -> None:
    """They compute. A user's own environment may wait for a server."""
    own, users = EnvPool(parse_recipe({}, where="test").env, 0), EnvPool(section(hostile.Computes), 0)
    cores = len(os.sched_getaffinity(0))
    assert own.limit == min(cores, pools.MAX_CHILDREN)
    assert users.limit == min(max(cores, pools.MIN_CHILDREN), pools.MAX_CHILDREN)
    assert EnvPool(section(hostile.Computes), 0, processes=3).limit == 3


@pytest.mark.parametrize("env", [hostile.SlowTasks, hostile.BadTasks])
def test_task_that_fails_is_named(env: type) -> None:
    async def main() -> None:
        async with hosting(env, from_task=3) as pool:
            futures = [pool.task(i, 0.5) for i in range(5)]
            await asyncio.wait(futures)
            assert [f.result().id for f in futures[:3]] == ["hostile/0", "hostile/1", "hostile/2"]
            said = "waited 0.5 s for SlowTasks.task(3)" if env is hostile.SlowTasks else "row 3 is broken"
            assert said in str(futures[3].exception())

    run(main)


def test_task_that_differs_the_second_time_is_refused() -> None:
    async def main() -> None:
        async with hosting(hostile.Forgetful) as pool:
            task = await pool.task(1, 5.0)
            assert (await pool.feedback(1, task, [Turn(text="")], 5.0)).reward == 1.0
            await failure(pool.feedback(1, task, [Turn(text="leave")], 5.0))
            error = await failure(pool.feedback(1, task, [Turn(text="")], 5.0))
            assert "the same number must always give the same task" in error.error

    run(main)


def test_canceled_call_frees_its_place() -> None:
    async def main() -> None:
        async with hosting(hostile.Hangs) as pool:
            calls = [asyncio.create_task(ask(pool, i, "hang", 60.0)) for i in range(20)]
            await asyncio.sleep(0.2)
            task = Task(id="hostile/1", prompt="1+1=")
            calls.append(asyncio.create_task(pool.feedback(1, task, [Turn(text="hang")], 60.0)))  # pyright: ignore
            await asyncio.sleep(0)
            await asyncio.sleep(0)  # sent, and canceled before it can begin
            for call in calls:
                call.cancel()
            await asyncio.gather(*calls, return_exceptions=True)
            assert (await ask(pool, 0)).reward == 1.0
            assert not pool.places[0].sent
            slow = asyncio.create_task(ask(pool, 3, "hang", 60.0))
            await asyncio.sleep(0.2)
            before = dict(pool._took_s)
            slow.cancel()
            await asyncio.sleep(0.2)
            assert pool._took_s == before  # what was cancelled says nothing

    run(main)


def test_children_of_builtin_environments_see_no_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET_KEY", "x")
    monkeypatch.setenv("WINDFALL_TOKEN", "y")

    async def environment(said: Any) -> set[str]:
        async with EnvPool(said, 0) as pool:
            await pool.ready()
            pid = environment_pid(pool)
            return {entry.split("=")[0] for entry in Path(f"/proc/{pid}/environ").read_text().split("\0")}

    builtin = asyncio.run(environment(parse_recipe({}, where="test").env))
    assert {"SECRET_KEY", "WINDFALL_TOKEN"} & builtin == set()
    assert "PYTHONHASHSEED" in builtin
    own = asyncio.run(environment(section(hostile.Sound)))
    assert {"SECRET_KEY", "WINDFALL_TOKEN"} & own == {"SECRET_KEY"}  # it may need its own keys, but never ours


@pytest.mark.skipif(importlib.util.find_spec("math_verify") is None, reason="needs math_verify")
def test_answer_that_takes_too_long_to_score_is_wrong(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n')

    async def main() -> None:
        async with hosting("windfall.envs.dataset:Dataset", path=str(tmp_path / "a.jsonl"), cpu_s=1.0) as pool:
            assert await ask(pool, 0, "\\boxed{9^{9^{9}}}", 60.0) == Feedback(reward=0.0)
            assert await ask(pool, 0, "\\boxed{2}", 60.0) == Feedback(reward=1.0)

    run(main)
