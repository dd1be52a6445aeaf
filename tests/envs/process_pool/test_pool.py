"""Hostile environments in child processes: whatever they do, a call ends in a value or in a failure that names them."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from hostile import environments as hostile

from windfall import config
from windfall.envs.failures import EnvFailed
from windfall.envs.grade import grade
from windfall.envs.process_pool import child_process as processes
from windfall.envs.process_pool import pool as pools
from windfall.envs.process_pool.pool import EnvPool
from windfall.envs.trial import trial
from windfall.errors import WindfallError
from windfall.types import Feedback, Task, Turn


def section(env: type | str, **options: Any) -> Any:
    named = env if isinstance(env, str) else hostile.factory(env)
    return config.parse({"env": {"name": "custom", "factory": named, "options": options}}, where="test").env


@contextlib.asynccontextmanager
async def hosting(env: type | str, *, build_s: float = 60.0, **options: Any) -> AsyncIterator[EnvPool]:
    async with EnvPool(section(env, **options), 0, build_s=build_s) as pool:
        await pool.ready()
        yield pool


async def ask(pool: EnvPool, index: int, text: str = "abc", limit_s: float = 20.0) -> Feedback:
    task = await pool.task(index, 20.0)
    return await pool.feedback(index, task, [Turn(text=text)], limit_s)


async def failure(wait: Awaitable[Any]) -> EnvFailed:
    with pytest.raises(EnvFailed) as caught:
        await wait
    return caught.value


def run(test: Callable[[], Any]) -> Any:
    return asyncio.run(test())


@pytest.mark.parametrize("env", [hostile.Sound, hostile.Awaiting])
def test_plain_and_async_functions_run_elsewhere(env: type) -> None:
    async def go() -> None:
        async with hosting(env) as pool:
            assert pool.name == env.__name__
            assert await pool.task(7, 5.0) == Task(id="hostile/7", prompt="7+1=")
            got = await asyncio.gather(*(ask(pool, i, "x" * i) for i in range(50)))
            assert [f.reward for f in got] == [float(i) for i in range(50)]

    run(go)


@pytest.mark.parametrize("env", [hostile.Sleeps, hostile.HoldsTheLock])
def test_blocking_call_is_killed_at_its_limit_and_named(env: type) -> None:
    """Neither a sleep nor a computation under the interpreter's lock stops our loop, or the other calls."""

    async def go() -> None:
        async with hosting(env, from_task=1) as pool:
            await ask(pool, 0)
            began, ticks = time.monotonic(), 0
            blocked = asyncio.create_task(failure(ask(pool, 1, limit_s=0.5)))
            while not blocked.done():
                await asyncio.sleep(0.01)
                ticks += 1
            error = await blocked
            assert 0.4 < time.monotonic() - began < 5.0
            assert ticks > 10
            assert error.error == f"waited 0.5 s for {env.__name__}.feedback of task 'hostile/1'"
            assert "in misbehave" in error.traceback
            assert (await ask(pool, 0, "four")).reward == 4.0

    run(go)


def test_child_that_cannot_be_ended_holds_nobody_up(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """As one in uninterruptible sleep: its signal is not delivered."""
    killpg, pids = os.killpg, list[int]()
    monkeypatch.setattr(processes, "REAP_S", 1.0)
    monkeypatch.setattr(processes.os, "killpg", lambda pid, _: pids.append(pid))

    async def go() -> None:
        async with hosting(hostile.Sleeps, from_task=1) as pool:
            error = await failure(ask(pool, 1, limit_s=0.5))
            assert pool._killing  # the call has failed, and its child is still being waited for
            assert "in misbehave" in error.traceback
            assert (await ask(pool, 0, "four")).reward == 4.0

    try:
        run(lambda: asyncio.wait_for(go(), 20.0))
    finally:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                killpg(pid, signal.SIGKILL)
    assert "was killed and has not ended after 1 s" in capfd.readouterr().err


def test_waiting_call_is_cancelled_and_the_others_go_on() -> None:
    async def go() -> None:
        async with hosting(hostile.Hangs) as pool:
            pid = pool._children[0].process._process.pid
            hang = asyncio.create_task(failure(ask(pool, 1, "hang", 0.4)))
            assert (await ask(pool, 2)).reward == 1.0
            error = await hang
            assert error.error == "waited 0.4 s for Hangs.feedback of task 'hostile/1'"
            assert "await asyncio.Event().wait()" in error.traceback
            assert pool._children[0].process._process.pid == pid

    run(go)


def test_only_the_call_that_blocks_the_loop_is_blamed() -> None:
    async def go() -> None:
        async with hosting(hostile.SleepsOnTheLoop) as pool:
            texts = ["block" if i == 5 else "fine" for i in range(12)]
            got = await asyncio.gather(*(ask(pool, i, t, 1.0) for i, t in enumerate(texts)), return_exceptions=True)
            assert [f.reward for i, f in enumerate(got) if i != 5] == [1.0] * 11  # pyright: ignore
            assert "waited 1 s for SleepsOnTheLoop.feedback of task 'hostile/5'" in str(got[5])

    run(go)


def test_loop_that_is_blocked_by_nobodys_call_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pools, "SILENT_S", 0.3)

    async def go() -> None:
        async with hosting(hostile.BlocksElsewhere) as pool:
            assert "waited 0.5 s" in (await failure(ask(pool, 1, limit_s=0.5))).error

    run(go)


def test_call_that_swallows_its_cancellation_is_killed_while_others_are_answered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pools, "SILENT_S", 0.3)

    async def go() -> None:
        async with hosting(hostile.Stubborn) as pool:
            hang = asyncio.create_task(failure(ask(pool, 1, "hang", 0.4)))
            deadline = time.monotonic() + 10.0
            while not hang.done() and time.monotonic() < deadline:
                assert (await ask(pool, 2)).reward == 1.0
            assert hang.done()
            error = await hang
            assert error.error == "waited 0.4 s for Stubborn.feedback of task 'hostile/1'"
            assert "await asyncio.sleep(1e6)" in error.traceback

    run(go)


@pytest.mark.parametrize(
    ("env", "text", "says"),
    [
        (hostile.Raises, "abc", "Raises.feedback of task 'hostile/1' raised KeyError: 'no such key: abc'"),
        (hostile.Leaves, "abc", "the process that ran Leaves.feedback of task 'hostile/1' ended with status 3"),
        (hostile.Crashes, "abc", "the process that ran Crashes.feedback of task 'hostile/1' was killed by SIGSEGV"),
        (hostile.ExitsPolitely, "abc", "raised SystemExit: I have had enough"),
        (hostile.Garbage, "none", "is wrong: it is a NoneType, not a Feedback"),
        (hostile.Garbage, "text", "is wrong: it is a str, not a Feedback"),
        (hostile.Garbage, "nan", "is wrong: the reward is nan"),
        (hostile.Garbage, "vast", "Garbage.feedback of task 'hostile/1' is wrong: the reward is a number too large"),
        (hostile.Garbage, "large", "is wrong: the reward is beyond 1,000,000,000 in size"),
        (hostile.Garbage, "empty", "is wrong: neither a reward nor an observation"),
        (hostile.Garbage, "list", "is wrong: the observation is a list, not text"),
        (hostile.Garbage, "half", "is wrong: the observation is not valid Unicode"),
        (hostile.Garbage, "huge", "is wrong: the observation has 8,388,608 characters"),
    ],
)
def test_failure_is_named_and_the_next_call_works(env: type, text: str, says: str) -> None:
    async def go() -> None:
        async with hosting(env, from_task=1) as pool:
            error = await failure(ask(pool, 1, text))
            assert says in error.error
            assert error.cause
            if env in (hostile.Raises, hostile.Crashes, hostile.ExitsPolitely):
                assert "in misbehave" in error.traceback
                assert "windfall/envs" not in error.traceback
            assert (await ask(pool, 0, "four")).reward == 4.0

    run(go)


@pytest.mark.parametrize("text", ["no JSON", "3", '[77, "value", 0, 0, 1.0, null]', '[2, "value", 0, 0, "x", null]'])
def test_what_is_not_an_answer_fails_the_call_and_not_the_controller(text: str) -> None:
    async def go() -> None:
        async with hosting(hostile.Scribbles, from_task=1) as pool:
            error = await failure(ask(pool, 1, text))
            assert "environment Scribbles: its process sent what is not an answer to a call; does it fork?" in str(
                error
            )
            assert (await ask(pool, 0, "four")).reward == 4.0

    run(go)


def test_environment_that_forks_ends_its_process_only(capfd: pytest.CaptureFixture[str]) -> None:
    async def go() -> None:
        errors = list[Any]()
        async with hosting(hostile.Forks, from_task=1) as pool:
            asyncio.get_running_loop().set_exception_handler(lambda _, context: errors.append(context))
            with contextlib.suppress(EnvFailed):
                await ask(pool, 1)
            await asyncio.sleep(0.3)
            assert (await ask(pool, 0, "four")).reward == 4.0
        assert errors == []

    run(go)
    assert "environment Forks: its process sent what is not an answer" in capfd.readouterr().err


def test_processes_that_end_unseen_are_not_multiplied_by_tries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pools, "MOST_MOVES", 1)

    async def go() -> None:
        async with hosting(hostile.LeavesUnseen) as pool:
            graded = await grade(pool, 1, await pool.task(1, 5.0), [Turn(text="abc")], tries=3)
            assert graded.tries == 1
            assert "2 processes ended under LeavesUnseen.feedback of task 'hostile/1'" in graded.error

    run(go)


def test_same_failure_has_the_same_cause_whatever_it_says() -> None:
    async def go() -> None:
        async with hosting(hostile.Raises) as pool:
            errors = [await failure(ask(pool, i, f"text {i}")) for i in range(3)]
            assert len({e.error for e in errors}) == 3
            assert len({e.cause for e in errors}) == 1

    run(go)


def test_output_goes_to_the_log_and_touches_no_messages(capfd: pytest.CaptureFixture[str]) -> None:
    async def go() -> None:
        async with hosting(hostile.Chatty, from_task=0) as pool:
            assert (await ask(pool, 1)).reward == 0.0

    run(go)
    out, err = capfd.readouterr()
    assert out == ""
    assert "said on stdout" in err
    assert "said on stderr" in err


def test_slow_grader_loses_nothing_and_gets_more_processes() -> None:
    """400 responses of 0.1 s at once: 40 s one after the other, each with a limit of 1 s."""

    async def go() -> float:
        async with hosting(hostile.Sleeps, s=0.1) as pool:
            task, began = await pool.task(0, 5.0), time.monotonic()
            calls = [pool.feedback(0, task, [Turn(text="a")], 1.0) for _ in range(400)]
            assert [f.reward for f in await asyncio.gather(*calls)] == [1.0] * 400
            assert len(pool._children) > 4
            return time.monotonic() - began

    assert run(go) < 30.0


def test_async_grader_runs_many_at_once_in_a_process() -> None:
    async def go() -> float:
        async with hosting(hostile.Awaiting, s=0.1) as pool:
            task, began = await pool.task(0, 5.0), time.monotonic()
            await asyncio.gather(*(pool.feedback(0, task, [Turn(text="a")], 5.0) for _ in range(1000)))
            assert len(pool._children) <= 2  # a busy machine may have made one more look useful
            return time.monotonic() - began

    assert run(go) < 20.0


def test_computing_grader_gets_no_more_processes_than_cores() -> None:
    """However busy the machine is: waiting for a core is not sleeping."""

    async def go() -> None:
        async with hosting(hostile.Computes, s=0.04) as pool:
            task = await pool.task(0, 5.0)
            await asyncio.gather(*(pool.feedback(0, task, [Turn(text="a")], 20.0) for _ in range(80)))
            assert len(pool._children) <= len(os.sched_getaffinity(0))

    run(go)


@pytest.mark.parametrize("env", [hostile.SlowTasks, hostile.BadTasks])
def test_task_that_cannot_be_made_is_named(env: type) -> None:
    async def go() -> None:
        async with hosting(env, from_task=3) as pool:
            futures = [pool.task(i, 0.5) for i in range(5)]
            await asyncio.wait(futures)
            assert [f.result().id for f in futures[:3]] == ["hostile/0", "hostile/1", "hostile/2"]
            said = "waited 0.5 s for SlowTasks.task(3)" if env is hostile.SlowTasks else "row 3 is broken"
            assert said in str(futures[3].exception())

    run(go)


def test_task_that_is_another_one_the_second_time_is_refused() -> None:
    async def go() -> None:
        async with hosting(hostile.Forgetful) as pool:
            task = await pool.task(1, 5.0)
            assert (await pool.feedback(1, task, [Turn(text="")], 5.0)).reward == 1.0
            await failure(pool.feedback(1, task, [Turn(text="leave")], 5.0))
            error = await failure(pool.feedback(1, task, [Turn(text="")], 5.0))
            assert "the same number must always give the same task" in error.error

    run(go)


def test_cancelled_call_frees_its_place() -> None:
    async def go() -> None:
        async with hosting(hostile.Hangs) as pool:
            calls = [asyncio.create_task(ask(pool, i, "hang", 60.0)) for i in range(20)]
            await asyncio.sleep(0.2)
            task = Task(id="hostile/1", prompt="1+1=")
            calls.append(asyncio.create_task(pool.feedback(1, task, [Turn(text="hang")], 60.0)))  # pyright: ignore
            await asyncio.sleep(0)
            await asyncio.sleep(0)  # sent, and cancelled before it can begin
            for call in calls:
                call.cancel()
            await asyncio.gather(*calls, return_exceptions=True)
            assert (await ask(pool, 0)).reward == 1.0
            assert not pool._children[0].sent
            slow = asyncio.create_task(ask(pool, 3, "hang", 60.0))
            await asyncio.sleep(0.2)
            before = pool._sizing._took_s["feedback"]
            slow.cancel()
            await asyncio.sleep(0.2)
            assert pool._sizing._took_s["feedback"] == before  # what was cancelled says nothing

    run(go)


def ended(pid: int) -> bool:
    """Also if its parent has not asked for its status yet."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def test_children_end_with_the_pool_and_take_along_what_they_started(capfd: pytest.CaptureFixture[str]) -> None:
    async def go() -> list[int]:
        async with hosting(hostile.Threads) as pool:
            call = asyncio.create_task(ask(pool, 1, limit_s=60.0))
            while "started" not in (said := capfd.readouterr().err):
                await asyncio.sleep(0.05)
            call.cancel()
            return [pool._children[0].process._process.pid, int(said.split("started ")[1].split()[0])]

    for pid in run(go):
        assert ended(pid)


@pytest.mark.parametrize("env", ["Sleeps", "HoldsTheLock", "Threads"])
def test_kill_9_of_the_parent_leaves_no_child(env: str) -> None:
    program = f"""
import asyncio
from test_pool import *
async def go():
    async with hosting("hostile.environments:{env}") as pool:
        print(pool._children[0].process._process.pid, flush=True)
        await ask(pool, 1, limit_s=600.0)
asyncio.run(go())
"""
    path = os.pathsep.join([str(Path(__file__).parent), *filter(None, sys.path)])
    parent = subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": path}
    )
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    time.sleep(0.6)  # the call is under way
    group = [int(p.name) for p in Path("/proc").glob("[0-9]*") if _group(int(p.name)) == pid]
    assert len(group) >= (2 if env == "Threads" else 1)  # with what the environment has started
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    parent.stdout.close()
    deadline = time.monotonic() + 10.0
    while any(map(_running, group)):
        assert time.monotonic() < deadline, "the child is still there"
        time.sleep(0.02)


def _group(pid: int) -> int:
    try:
        return os.getpgid(pid)
    except ProcessLookupError:
        return 0


def _running(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def test_children_of_builtin_environments_see_no_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET_KEY", "x")
    monkeypatch.setenv("WINDFALL_TOKEN", "y")

    async def environment(said: Any) -> set[str]:
        async with EnvPool(said, 0) as pool:
            await pool.ready()
            pid = pool._children[0].process._process.pid
            return {entry.split("=")[0] for entry in Path(f"/proc/{pid}/environ").read_text().split("\0")}

    builtin = asyncio.run(environment(config.parse({}, where="test").env))
    assert {"SECRET_KEY", "WINDFALL_TOKEN"} & builtin == set()
    assert "PYTHONHASHSEED" in builtin
    own = asyncio.run(environment(section(hostile.Sound)))
    assert {"SECRET_KEY", "WINDFALL_TOKEN"} & own == {"SECRET_KEY"}  # it may need keys of its own; never ours


# environments that cannot be built


def refused(env: str, folder: Path, monkeypatch: pytest.MonkeyPatch, *, build_s: float = 60.0) -> str:
    monkeypatch.chdir(folder)

    async def go() -> None:
        async with hosting(env, build_s=build_s):
            pass

    with pytest.raises(WindfallError) as caught:
        asyncio.run(go())
    return str(caught.value)


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("def task(:\n", "broken_env.py:1: importing broken_env found a syntax error"),
        ("\n\n1 / 0\n", "broken_env.py:3: importing broken_env raised ZeroDivisionError"),
        ("import no_such_thing\n", "broken_env.py:1: importing broken_env raised ModuleNotFoundError"),
        ("import sys\nsys.exit(4)\n", "broken_env.py:2: importing broken_env raised SystemExit: 4"),
        ("x = 1\n", "env.factory: no 'Env' in broken_env"),
        ("class Env:\n    def __init__(self):\n        pass\n", "cannot be called so"),
        ("class Env:\n    def __init__(self, seed):\n        self.f()\n", "broken_env.py:3: building broken_env:Env"),
        ("class Env:\n    def __init__(self, seed):\n        pass\n", "made a Env without task and feedback"),
        ("import os\nos._exit(7)\n", "the process that builds it ended with status 7"),
    ],
)
def test_broken_module_is_refused_with_file_and_line(
    source: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "broken_env.py").write_text(source)
    assert says in refused("broken_env:Env", tmp_path, monkeypatch)


def test_module_that_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said = refused("no_such_env:Env", tmp_path, monkeypatch)
    assert "env.factory: cannot import 'no_such_env': there is no module 'no_such_env'" in said
    assert str(tmp_path) in said


def test_module_that_hangs_on_import(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(pools, "QUIET_S", 0.3)
    (tmp_path / "slow_env.py").write_text("import time\ntime.sleep(1e6)\n")
    said = refused("slow_env:Env", tmp_path, monkeypatch, build_s=1.0)
    assert "waited 1 s for it to be imported and built" in said
    assert 'slow_env.py", line 2' in said
    assert "building environment slow_env:Env; waiting up to 1 s" in capfd.readouterr().err


def test_environment_that_can_be_built_only_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "once.py").write_text(
        "import os\nfrom hostile.environments import Leaves\n"
        "class Env(Leaves):\n    def __init__(self, seed):\n        super().__init__(seed)\n        os.mkdir('was')\n"
    )

    async def go() -> None:
        async with hosting("once:Env") as pool:
            await failure(ask(pool, 1))
            with pytest.raises(WindfallError, match="FileExistsError"):
                await ask(pool, 1)

    asyncio.run(go())


# the trial call


def test_trial_says_what_came_back() -> None:
    task, said = asyncio.run(trial(EnvPool(section(hostile.NeverDone), 0), 5.0))
    assert task.prompt == "0+1="
    assert said.startswith("environment NeverDone: task 'hostile/0' was made; an empty response to it got an obs")


@pytest.mark.parametrize(
    ("env", "says"),
    [
        (hostile.Sleeps, "waited 0.5 s for Sleeps.feedback of task 'hostile/0'"),
        (hostile.Raises, "raised KeyError"),
        (hostile.SlowTasks, "waited 0.5 s for SlowTasks.task(0)"),
    ],
)
def test_trial_refuses_what_fails(env: type, says: str) -> None:
    with pytest.raises(WindfallError) as caught:
        asyncio.run(trial(EnvPool(section(env), 0), 0.5))
    assert f"environment {env.__name__}: " in str(caught.value)
    assert says in str(caught.value)


def test_trial_is_made_again_after_a_failure_that_passes(tmp_path: Path) -> None:
    env = section(hostile.FailsAtFirst, file=str(tmp_path / "calls"), failures=2)
    with pytest.raises(WindfallError, match=r"raised ConnectionError.*\(2 trial calls"):
        asyncio.run(trial(EnvPool(env, 0), 5.0, tries=2))
    (tmp_path / "calls").unlink()
    _, said = asyncio.run(trial(EnvPool(env, 0), 5.0, tries=3))
    assert said.endswith("got reward 0")


@pytest.mark.skipif(importlib.util.find_spec("math_verify") is None, reason="needs math_verify")
def test_answer_that_never_ends_is_wrong(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n')

    async def go() -> None:
        async with hosting("windfall.envs.jsonl:JsonLines", path=str(tmp_path / "a.jsonl"), cpu_s=1.0) as pool:
            assert await ask(pool, 0, "\\boxed{9^{9^{9}}}", 60.0) == Feedback(reward=0.0)
            assert await ask(pool, 0, "\\boxed{2}", 60.0) == Feedback(reward=1.0)

    run(go)
