"""Environments with sessions behind the Env interface: sessions are continued, lost ones are replayed or missing."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import pytest
from lighthouse import Lighthouse

from examples.guess import Guess
from windfall.envs.failures import EnvFailed
from windfall.envs.grade import grade
from windfall.envs.process_pool.pool import EnvPool
from windfall.envs.sessions import Stateful
from windfall.recipe.env_sections import CustomEnv
from windfall.types import Feedback, Task, Turn


def run(main: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(main, 120))


async def play(env: Any, index: int, texts: list[str], turns: list[Turn] | None = None) -> tuple[Feedback, list[Turn]]:
    task, turns, feedback = env.task(index), list(turns or ()), Feedback()
    for text in texts:
        feedback = await env.feedback(task, [*turns, Turn(text=text)])
        turns.append(Turn(text=text, observation=feedback.observation))
    return feedback, turns


def test_a_session_is_continued_and_closed_at_its_end() -> None:
    async def main() -> None:
        env = Lighthouse()
        stateful = Stateful(env)
        feedback, turns = await play(stateful, 0, ["east", "stay", "east"])
        assert [t.observation for t in turns] == ["at 1", "at 1", None]
        assert feedback.reward == 1.0
        assert (env.opened, env.closed, stateful.idle, stateful.replayed_turns) == (1, 1, 0, 0)

    run(main())


def test_many_sessions_of_one_task_at_once() -> None:
    async def main() -> None:
        env = Lighthouse()
        stateful = Stateful(env)
        walks = [["east"] * 4, ["west", "east"], ["east", "west", "west"], ["east"] * 3] * 5
        done = await asyncio.gather(*(play(stateful, 3, walk) for walk in walks))
        assert [turns[-1].observation for _, turns in done[:4]] == ["at 4", "at 0", "at -1", "at 3"]
        assert (env.opened, stateful.replayed_turns, stateful.idle) == (20, 0, 20)

    run(main())


def test_a_lost_session_is_replayed() -> None:
    async def main() -> None:
        _, turns = await play(Stateful(Lighthouse()), 3, ["east", "west", "east"])
        after = Stateful(Lighthouse())  # the controller was killed: a new process has no sessions
        feedback, _ = await play(after, 3, ["east"], turns)
        assert (feedback.observation, after.replayed_turns) == ("at 2", 3)

    run(main())


@pytest.mark.parametrize("options", [{"noisy": True}, {"replayable": False}])
def test_a_session_that_cannot_be_replayed_is_missing(options: dict[str, Any]) -> None:
    async def main() -> None:
        _, turns = await play(Stateful(Lighthouse(**options)), 3, ["east"])
        fresh = Lighthouse(**options)
        with pytest.raises(EnvFailed, match="is gone"):
            await play(Stateful(fresh), 3, ["east"], turns)
        assert fresh.opened == fresh.closed

    run(main())


def test_a_failed_step_closes_the_session_and_a_retry_replays() -> None:
    async def main() -> None:
        env = Lighthouse()
        stateful = Stateful(env)
        _, turns = await play(stateful, 3, ["east"])
        with pytest.raises(RuntimeError, match="fell"):
            await play(stateful, 3, ["crash"], turns)
        assert (env.opened, env.closed, stateful.idle) == (1, 1, 0)
        feedback, _ = await play(stateful, 3, ["east"], turns)
        assert (feedback.observation, env.opened, stateful.replayed_turns) == ("at 2", 2, 1)

    run(main())


def test_sessions_are_closed_when_the_run_ends(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))

    async def main() -> None:
        async with EnvPool(section(log=str(tmp_path / "log")), 0) as pool:
            await pool.ready()
            task = await pool.task(3, 10.0)
            for text in ("east", "west"):
                await pool.feedback(3, task, [Turn(text=text)], 10.0)
        assert (tmp_path / "log").read_text() == "closed\n" * 2

    run(main())


def test_session_of_a_response_without_further_turns_is_closed_at_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))

    async def main() -> None:
        async with EnvPool(section(log=str(tmp_path / "log")), 0) as pool:
            await pool.ready()
            task = await pool.task(3, 10.0)
            feedback = await pool.feedback(3, task, [Turn(text="east")], 10.0)
            turns = [Turn(text="east", observation=feedback.observation)]
            for _ in range(2):  # the second time, there is nothing to close
                pool.end_session(3, task, turns)
            while not (tmp_path / "log").exists():
                await asyncio.sleep(0.01)
        assert (tmp_path / "log").read_text() == "closed\n"

    run(main())


def test_memory_of_a_users_environment_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))

    async def main(memory_mb: int) -> str:
        given = CustomEnv(name="custom", factory="lighthouse:build", memory_mb=memory_mb)
        async with EnvPool(given, 0) as pool:
            await pool.ready()
            task = await pool.task(3, 10.0)
            graded = await grade(pool, 3, task, [Turn(text="hoard")], tries=1, timeout_s=10.0)
            return "" if graded.failure is None else graded.failure.error

    assert asyncio.run(main(0)) == ""
    assert "MemoryError" in asyncio.run(main(1024))


class GuessSession:
    def __init__(self, env: Guess, task: Task) -> None:
        self.env, self.task, self.turns = env, task, list[Turn]()

    def step(self, text: str) -> Feedback:
        feedback = self.env.feedback(self.task, [*self.turns, Turn(text=text)])
        self.turns.append(Turn(text=text, observation=feedback.observation))
        return feedback

    def close(self) -> None: ...


class GuessSessions(Guess):
    def open(self, task: Task) -> GuessSession:
        return GuessSession(self, task)


def test_environments_without_state_are_the_same_through_sessions() -> None:
    async def main() -> None:
        plain = GuessSessions(seed=3)
        stateful = Stateful(plain)
        for index in range(4):
            turns: list[Turn] = []
            for text in ("1", "words", "20", "7", "10", "13"):
                given = [*turns, Turn(text=text)]
                expected = plain.feedback(plain.task(index), given)
                assert await stateful.feedback(plain.task(index), given) == expected
                if expected.observation is None:
                    break
                turns.append(Turn(text=text, observation=expected.observation))

    run(main())


def section(**options: Any) -> Any:
    return CustomEnv(name="custom", factory="lighthouse:build", options=options)


def test_sessions_in_child_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Turns stay in the process of their session. If it dies, the session is replayed in another one."""
    monkeypatch.syspath_prepend(str(Path(__file__).parent))

    async def main() -> None:
        async with EnvPool(section(), 0) as pool:
            await pool.ready()
            assert pool.name == "Lighthouse"
            task, turns = await pool.task(3, 10.0), list[Turn]()
            for text, observation in (("east", "at 1"), ("east", "at 2")):
                feedback = await pool.feedback(3, task, [*turns, Turn(text=text)], 10.0)
                assert feedback.observation == observation
                turns.append(Turn(text=text, observation=observation))
            with pytest.raises(EnvFailed):  # the process of the session ends
                await pool.feedback(3, task, [*turns, Turn(text="die")], 10.0)
            graded = await grade(pool, 3, task, [*turns, Turn(text="east")], tries=3, timeout_s=10.0)
            assert graded.feedback == Feedback(observation="at 3")

    run(main())


def test_a_lost_session_that_cannot_be_replayed_has_no_reward(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))

    async def main() -> None:
        async with EnvPool(section(pid=True), 0) as pool:  # an observation that differs in every process
            await pool.ready()
            task = await pool.task(3, 10.0)
            first = await pool.feedback(3, task, [Turn(text="east")], 10.0)
            turns = [Turn(text="east", observation=first.observation)]
            with pytest.raises(EnvFailed):
                await pool.feedback(3, task, [*turns, Turn(text="die")], 10.0)
            graded = await grade(pool, 3, task, [*turns, Turn(text="east")], tries=2, timeout_s=10.0)
            assert graded.feedback is None
            assert "a replay differs in turn 1" in str(graded.failure)

    run(main())
