"""Which call is blamed for the end of its process: the one that did it. The others are answered."""

from __future__ import annotations

import asyncio
import os
import signal
import sys

import pytest

from tests.support.hostile import environments as hostile
from tests.support.hostile.pool_calls import ask, environment_pid, failure, hosting, run, section
from windfall.envs.failures import EnvFailed
from windfall.envs.process_pool.pool import EnvPool
from windfall.types import Feedback, Turn


async def ask_together(pool: EnvPool, texts: list[str]) -> list[Feedback | BaseException]:
    """All are sent at once, so that they are in the same child."""
    tasks = [await pool.task(n, 20.0) for n in range(len(texts))]
    calls = [pool.feedback(n, task, [Turn(text=texts[n])], 20.0) for n, task in enumerate(tasks)]
    return await asyncio.gather(*calls, return_exceptions=True)


def check_only_one_fails(env: type, text: str, says: str, *, of: int = 12) -> None:
    async def main() -> None:
        async with hosting(env) as pool:
            await ask_together(pool, ["fine"] * of)  # from now on calls are known to be short, and queue at the child
            got = await ask_together(pool, [text if n == of // 2 else "fine" for n in range(of)])
            failed = [n for n, value in enumerate(got) if isinstance(value, BaseException)]
            assert failed == [of // 2], got
            error = got[of // 2]
            assert isinstance(error, EnvFailed)
            assert f"{env.__name__}.feedback of task 'hostile/{of // 2}'" in error.error
            assert says in error.error

    run(main)


@pytest.mark.parametrize("text", ["close", "replace"])
def test_only_the_call_that_closes_the_files_of_its_process_fails(text: str) -> None:
    check_only_one_fails(hostile.ClosesFiles, text, "closed or replaced files of its process")


def test_environment_may_close_its_standard_files() -> None:
    async def main() -> None:
        async with hosting(hostile.ClosesFiles) as pool:
            pid = environment_pid(pool)
            texts = ["standard" if n == 3 else "fine" for n in range(12)]
            assert await ask_together(pool, texts) == [Feedback(reward=1.0)] * 12
            assert environment_pid(pool) == pid

    run(main)


def test_only_the_call_that_writes_to_the_link_fails() -> None:
    check_only_one_fails(hostile.ScribblesOnce, "no JSON", "wrote something to the connection of its process")


@pytest.mark.parametrize("text", ["scribble", pytest.param("leave", marks=pytest.mark.slow)])
def test_call_that_harms_its_process_unseen_fails_alone(text: str) -> None:
    """It is not known which of the waiting calls it was. With fewer calls in a child each time, it becomes known."""
    check_only_one_fails(hostile.AwaitsAndHarms, text, "", of=8)


def test_call_that_ran_alone_does_not_limit_its_process_afterwards() -> None:
    """While calls are in progress all the time, a process would otherwise have few calls at once forever."""

    async def main() -> None:
        async with EnvPool(section(hostile.Hangs), 0, processes=1) as pool:
            await pool.ready()
            task = await pool.task(0, 20.0)
            suspect = asyncio.create_task(pool.feedback(0, task, [Turn(text="abc")], 20.0))
            await asyncio.sleep(0)
            pool._pending[0].moves = 2  # it may share a process with three others
            hanging = [asyncio.create_task(ask(pool, n, "hang", 600.0)) for n in range(1, 9)]
            assert (await suspect).reward == 1.0
            assert (await ask(pool, 9)).reward == 1.0
            assert not any(call.done() for call in hanging)
            for call in hanging:
                call.cancel()

    run(main)


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
def test_process_that_takes_long_to_end_is_described_as_it_ended() -> None:
    """On a busy machine, its reapers may take seconds to notice that it has crashed."""

    async def main() -> None:
        async with hosting(hostile.Sleeps, from_task=1) as pool:
            failing = asyncio.create_task(failure(ask(pool, 1, limit_s=600.0)))
            child = pool.places[0]
            while not child.running_call()[0]:
                await asyncio.sleep(0.01)
            os.kill(child.process.pid, signal.SIGSTOP)
            os.kill(environment_pid(pool), signal.SIGSEGV)
            await asyncio.sleep(1.5)
            os.kill(child.process.pid, signal.SIGCONT)
            assert "was killed (SIGSEGV)" in (await failing).error

    run(main)


JUNK = ["no JSON", "3", '[77, "value", 0, 0, 1.0, null]', '[2, "value", 0, 0, "x", null]', "[" * 100_000]


def test_invalid_answer_fails_the_call_and_not_the_controller() -> None:
    async def main() -> None:
        async with hosting(hostile.Scribbles, from_task=1) as pool:
            errors = [await failure(ask(pool, 1, text)) for text in JUNK]
            for error in errors:
                assert "Scribbles.feedback of task 'hostile/1' wrote something to the connection of its" in str(error)
            assert (await ask(pool, 0, "four")).reward == 4.0

    run(main)


def test_line_without_an_end_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("windfall.envs.process_pool.child_process.MAX_LINE_BYTES", 1 << 20)

    async def main() -> None:
        async with hosting(hostile.Scribbles, from_task=1, end="", times=40) as pool:
            error = await failure(ask(pool, 1, "x" * (1 << 16), 20.0))
            assert "wrote something to the connection" in str(error)
            assert (await ask(pool, 0, "four")).reward == 4.0

    run(main)


SAID = {
    "own": "raised OwnError: mine",
    "unprintable": "raised UnprintableError: (its text cannot be read: str() raised ValueError)",
    "canceled": "raised CancelledError",
    "closed": "raised GeneratorExit",
    "stop": "raised StopIteration: no more rows",
    "surrogate": "raised ValueError: ?",
}


@pytest.mark.parametrize("env", [hostile.RaisesStrangely, hostile.RaisesStrangelyLater])
def test_any_exception_is_named_with_file_and_line(env: type) -> None:
    async def main() -> None:
        async with hosting(env) as pool:
            for text, says in SAID.items():
                error = await failure(ask(pool, 1, text))
                assert f"{env.__name__}.feedback of task 'hostile/1' {says}" in error.error
                assert "hostile/environments.py:" in error.cause
                assert "in misbehave" in error.traceback
                error.error.encode()  # it can be printed
                assert not error.final

    run(main)
