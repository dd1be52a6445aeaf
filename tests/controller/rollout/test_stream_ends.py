"""However a rollout ends early, nothing of it is left in the engine, and it waits for nothing."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.support.engines.scripted_engine import NAMES, STOP, Asks, Scripted, rolling, run
from windfall.controller.rollout.stream import Stopped
from windfall.errors import WindfallError
from windfall.types import Chunk, Feedback, Request, Sampling, Task, Turn


async def right(task: Task, turns: Sequence[Turn]) -> Feedback:
    return Feedback(reward=1.0)


def test_stop_ends_between_two_steps_and_leaves_nothing_running(tmp_path: Path) -> None:
    engine = Scripted(lambda request: "x" * (2 if request.id == "0/0" else 1000))
    cancelled: list[str] = []

    async def judge(task: Task, turns: Sequence[Turn]) -> Feedback:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            cancelled.append(task.id)
            raise
        raise AssertionError

    async def main() -> None:
        async with rolling(engine, Asks(judge), tmp_path, max_tokens=2000) as rollout:
            loop, counts = asyncio.get_running_loop(), rollout.dispatch.ledger.counts
            engine.stepped = lambda: counts.accepted > 20 and loop.call_soon_threadsafe(rollout.interrupt)
            with pytest.raises(Stopped):
                await anext(rollout.groups([0, 1, 2], size=2, sampling=lambda policy: Sampling()))
            assert counts.accepted < 2000
            with pytest.raises(Stopped):  # every later call raises, too
                await anext(rollout.groups([3], size=1, sampling=lambda policy: Sampling()))
            assert len(rollout.dispatch.ledger) == 0

    asyncio.run(main())
    assert sorted(engine.cancelled) == ["0/1", "1/0", "1/1", "2/0", "2/1"]  # 0/0 was being graded
    assert cancelled == ["n/0"]
    assert len(engine) == 0


def test_stop_does_not_wait_for_rewards(tmp_path: Path) -> None:
    async def never(task: Task, turns: Sequence[Turn]) -> Feedback:
        await asyncio.sleep(60)
        raise AssertionError

    async def main() -> float:
        async with rolling(Scripted(lambda request: "x"), Asks(never), tmp_path) as rollout:
            asyncio.get_running_loop().call_later(0.05, rollout.interrupt)
            with pytest.raises(Stopped):
                await anext(rollout.groups([0], size=2, sampling=lambda policy: Sampling()))
            return time.monotonic()

    started = time.monotonic()
    assert asyncio.run(main()) - started < 15, "less than the time limit of a reward"


def test_closing_the_generator_leaves_nothing_running(tmp_path: Path) -> None:
    engine = Scripted(lambda request: "x" * (1 if request.id == "0/0" else 1000))

    async def main() -> None:
        async with rolling(engine, Asks(right), tmp_path, max_tokens=2000) as rollout:
            groups = rollout.groups([0, 1, 2], size=1, sampling=lambda policy: Sampling())
            assert (await anext(groups)).index == 0
            await groups.aclose()

    asyncio.run(main())
    assert sorted(engine.cancelled) == ["1/0", "2/0"]


def test_response_that_no_worker_can_hold_ends_the_rollout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("windfall.controller.rollout.dispatch.NO_ROOM_S", 0.1)

    class Small(Scripted):
        def add(self, request: Request) -> None:
            if NAMES[request.seed] == "1/1":
                raise WindfallError("does not fit")
            super().add(request)

    engine = Small(lambda request: "x" * 100_000)
    with pytest.raises(WindfallError, match="no worker has had more than"):
        run(engine, Asks(right), tmp_path, tasks=[0, 1, 2], size=2, max_tokens=200_000)
    assert sorted(engine.cancelled) == ["0/0", "0/1", "1/0", "2/0", "2/1"]


def test_error_of_the_engine_ends_the_rollout(tmp_path: Path) -> None:
    class Breaks(Scripted):
        def step(self) -> list[Chunk]:
            raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        run(Breaks(lambda request: "x"), Asks(right), tmp_path, tasks=[0])


def test_repeated_tokens_are_counted_and_not_accepted(tmp_path: Path) -> None:
    class Stutters(Scripted):
        def step(self) -> list[Chunk]:
            return [c for c in super().step() for _ in range(2)]

    groups, rollout = run(Stutters(lambda request: "xyz"), Asks(right), tmp_path, tasks=[0])
    assert groups[0].responses[0].tokens == (*map(ord, "xyz"), STOP)
    assert rollout.dispatch.ledger.counts.repeated == 4


def test_stream_that_has_ended_opens_and_drops_nothing(tmp_path: Path) -> None:
    """Its owner may be busy, for example with an update, and learn of the end later."""

    async def main() -> None:
        async with rolling(Scripted(lambda request: "x" * 1000), Asks(right), tmp_path, max_tokens=2000) as rollout:
            stream = rollout.stream(size=2, sampling=lambda policy: Sampling(), on_group=print, on_skipped=print)
            running = asyncio.create_task(stream.run())
            stream.open([0, 1])
            await asyncio.sleep(0.05)
            rollout.interrupt(WindfallError("another trainer replaced it"))
            with pytest.raises(WindfallError):
                await running
            stream.expire({"": 99})
            stream.open([2])
            assert len(rollout.dispatch.ledger) == 0

    asyncio.run(main())
