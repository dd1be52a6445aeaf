"""The limit on open sessions: who waits, who is closed, and that waiting counts against no time limit."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import pytest

from windfall.envs import sessions as session_limits
from windfall.envs.failures import EnvFailed
from windfall.envs.process_pool.pool import EnvPool
from windfall.envs.sessions import OpenSessions
from windfall.recipe.env_sections import CustomEnv
from windfall.types import Turn


@pytest.fixture(autouse=True)
def _importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))


def run(main: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(main, 120))


def pool(max_sessions: int, **options: Any) -> EnvPool:
    return EnvPool(CustomEnv(name="custom", factory="lighthouse:build", options=options, max_sessions=max_sessions), 0)


async def first_turn(host: EnvPool, index: int, limit_s: float = 10.0) -> list[Turn]:
    task = await host.task(index, 10.0)
    feedback = await host.feedback(index, task, [Turn(text="east")], limit_s)
    return [Turn(text="east", observation=feedback.observation)]


def test_opening_waits_for_room_and_not_against_its_limit() -> None:
    """Two of five sessions at once, which never yield. All get to their end."""

    async def main() -> None:
        async with pool(2, replayable=False) as host:
            await host.ready()
            most = waiting = 0

            async def play(index: int) -> float | None:
                nonlocal most, waiting
                turns = await first_turn(host, index, limit_s=0.9)
                task = await host.task(index, 10.0)
                while True:
                    most, waiting = max(most, len(host.sessions)), max(waiting, host.load().queued)
                    await asyncio.sleep(0.2)  # the policy samples
                    feedback = await host.feedback(index, task, [*turns, Turn(text="east")], 0.9)
                    if feedback.observation is None:
                        return feedback.reward
                    turns.append(Turn(text="east", observation=feedback.observation))

            assert await asyncio.gather(*(play(index) for index in range(5))) == [1.0] * 5
            assert most == 2
            assert waiting >= 3

    run(main())


def test_idle_session_yields_if_it_can_be_replayed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(session_limits, "YIELD_S", 1.0)

    async def main() -> None:
        log = tmp_path / "log"
        async with pool(1, log=str(log)) as host:
            await host.ready()
            turns = await first_turn(host, 3)
            opened = asyncio.create_task(first_turn(host, 4))
            await asyncio.sleep(0.1)
            assert not opened.done()  # a session that became idle just now is not closed
            await opened
            assert log.read_text() == "closed\n"
            again = await host.feedback(3, await host.task(3, 10.0), [*turns, Turn(text="east")], 10.0)
            assert again.observation == "at 2"  # replayed, once the other one had been idle for long enough

    run(main())


def test_session_that_cannot_be_replayed_keeps_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session_limits, "YIELD_S", 0.0)

    async def main() -> None:
        async with pool(1, replayable=False) as host:
            await host.ready()
            turns = await first_turn(host, 3)
            opened = asyncio.create_task(first_turn(host, 4))
            await asyncio.sleep(0.4)
            assert not opened.done()
            host.end_session(3, await host.task(3, 10.0), turns)
            await opened

    run(main())


@pytest.mark.parametrize("text", ["crash", "die"])
def test_failed_sessions_free_their_place(text: str) -> None:
    async def main() -> None:
        async with pool(1, replayable=False) as host:
            await host.ready()
            task = await host.task(3, 10.0)
            for _ in range(3):
                with pytest.raises(EnvFailed):
                    await host.feedback(3, task, [Turn(text=text)], 10.0)
            await first_turn(host, 3)

    run(main())


def test_canceled_calls_free_their_place() -> None:
    async def main() -> None:
        async with pool(1, replayable=False) as host:
            await host.ready()
            task = await host.task(3, 10.0)
            for delay_s in (0.0, 0.001, 0.01):
                call = asyncio.create_task(host.feedback(3, task, [Turn(text="east")], 10.0))
                await asyncio.sleep(delay_s)
                call.cancel()
                await asyncio.wait([call])
                if not call.cancelled():  # it was answered first
                    host.end_session(3, task, [Turn(text="east", observation="at 1")])
            await first_turn(host, 3)

    run(main())


def test_answer_that_is_never_seen_leaves_no_session(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever waits is canceled after the answer has arrived, and before it could be read."""

    async def main() -> None:
        async with pool(1, replayable=False) as host:
            await host.ready()
            task, keep = await host.task(3, 10.0), host.sessions.keep

            def keep_and_cancel(*args: Any) -> None:
                keep(*args)
                asyncio.get_running_loop().call_soon(call.cancel)

            monkeypatch.setattr(host.sessions, "keep", keep_and_cancel)
            call = asyncio.create_task(host.feedback(3, task, [Turn(text="east")], 10.0))
            with pytest.raises(asyncio.CancelledError):
                await call
            monkeypatch.setattr(host.sessions, "keep", keep)
            await first_turn(host, 3)

    run(main())


def test_lost_places_and_expired_sessions() -> None:
    now = [0.0]
    sessions: OpenSessions[str] = OpenSessions(10, clock=lambda: now[0])
    for n, place in enumerate(("a", "b", "a")):
        sessions.keep(("light", ("east", "at 1")), place)
        now[0] = float(n)
    sessions.drop("a")
    assert len(sessions) == 1
    assert sessions.expire() is None
    now[0] = session_limits.IDLE_S + 1.0
    assert sessions.expire() == (("light", ("east", "at 1")), "b")
    assert sessions.take(("light", ("east", "at 1"))) is None
