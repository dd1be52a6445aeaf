"""What a stream knows of the age of its tasks: which have not begun, and what the journal has of them."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.support.engines.hashing_engine import CharacterText
from tests.support.engines.scripted_engine import SEED, Asks, Scripted, rolling
from windfall.controller.ledger.journal_format import TokenRun
from windfall.controller.rollout.dispatch import Dispatch
from windfall.controller.rollout.stream import Rollout, Stream
from windfall.controller.workers.versions import PolicyVersions
from windfall.envs.in_process import InProcess
from windfall.events.log import EventLog
from windfall.recipe.sections import Recipe
from windfall.recipe.sections import RolloutSection as Options
from windfall.sim.core import loop as loops
from windfall.types import Feedback, Group, Sampling, Task, Turn


async def right(task: Task, turns: Sequence[Turn]) -> Feedback:
    return Feedback(reward=1.0)


class Late(InProcess):
    """An environment whose tasks with odd numbers arrive when `arrive` is set."""

    def __init__(self) -> None:
        super().__init__(Asks(right))
        self.arrive = asyncio.Event()

    def task(self, index: int, timeout_s: float) -> asyncio.Future[Task]:
        if index % 2 == 0:
            return super().task(index, timeout_s)

        async def later() -> Task:
            await self.arrive.wait()
            return self.env.task(index)  # pyright: ignore

        return asyncio.ensure_future(later())


class Opened:
    """A stream of groups of two without any worker. The journal has tokens of these versions for these responses."""

    def __init__(self, folder: Path, journal: dict[str, int]) -> None:
        self.events, self.env = EventLog(folder / "events.jsonl"), Late()
        self.dispatch = Dispatch(events=self.events, versions=[PolicyVersions(staleness=2)])
        text: Any = CharacterText()
        recipe = Recipe(rollout=Options(max_tokens=9))
        self.rollout = Rollout(self.dispatch, self.env, {"": text}, recipe, seed=SEED, events=self.events)
        self.rollout.history = {
            id: [TokenRun(position=0, tokens=array("I", [65, 66]), logprobs=array("f", [-1.0, -1.0]), version=version)]
            for id, version in journal.items()
        }
        self.too_old: list[tuple[int, int]] = []
        self.groups: list[Group] = []
        self.stream: Stream = self.rollout.stream(
            size=2, sampling=self.rollout.sampling, on_group=self.groups.append, on_skipped=lambda index: None,
            on_too_old=lambda index, tokens: self.too_old.append((index, tokens)),
        )  # fmt: skip

    async def close(self, running: asyncio.Task[None]) -> None:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        self.dispatch.ledger.check()
        self.events.close()


def test_tasks_that_have_not_begun(tmp_path: Path) -> None:
    async def main() -> None:
        o = Opened(tmp_path, {"2/1": 4, "3/0": 4})
        running = asyncio.create_task(o.stream.run())
        o.stream.open(range(6))
        assert sorted(o.stream.not_begun()) == [0, 1, 4, 5], "the journal has tokens of 2 and 3"
        o.dispatch.ledger.queues[""].remove("4/1")
        o.dispatch.ledger.assign("4/1", "a", 5)
        assert sorted(o.stream.not_begun()) == [0, 1, 5], "a worker runs a response of 4"
        o.env.arrive.set()
        await asyncio.sleep(0.4)
        assert sorted(o.stream.not_begun()) == [0, 1, 5]
        await o.close(running)

    loops.run(lambda _: main())


def test_task_that_arrives_late_is_dropped_if_the_journal_has_it_too_old(tmp_path: Path) -> None:
    """The bound was applied to the open responses before the environment returned task 1."""

    async def main() -> None:
        o = Opened(tmp_path, {"0/0": 3, "0/1": 5, "1/0": 3, "1/1": 3, "3/0": 3, "3/1": 5})
        running = asyncio.create_task(o.stream.run())
        o.stream.open(range(4))
        o.stream.expire({"": 4})
        assert o.too_old == [(0, 2)]
        o.env.arrive.set()
        await asyncio.sleep(0.4)
        assert sorted(o.too_old) == [(0, 2), (1, 2), (1, 2), (3, 2)]
        assert [(g.index, g.responses) for g in o.groups] == [(1, ())], "the group is handed out, so its place is free"
        assert sorted(o.dispatch.ledger.entries) == ["0/1", "2/0", "2/1", "3/1"]
        await o.close(running)

    loops.run(lambda _: main())


def test_turns_of_an_evaluation_beside_training_are_not_counted(tmp_path: Path) -> None:
    async def main() -> list[int]:
        counted = []
        async with rolling(Scripted(lambda request: "xy"), Asks(right), tmp_path) as rollout:
            for count in (False, True):
                groups = rollout.groups(
                    [1, 2], size=1, sampling=lambda policy: Sampling(), scope=f"{count}:", counted=count
                )
                assert len([g async for g in groups]) == 2
                counted.append(len(rollout.grading._times_s))
        return counted

    assert asyncio.run(main()) == [0, 2]
