"""A copy takes over its original after the same steps, also if their trainer is replaced between two of them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

from windfall.controller.run_policy import RunPolicy
from windfall.events.log import EventLog
from windfall.recipe.file import parse_recipe
from windfall.training import NewVersion

RECIPE = parse_recipe(
    {"policies": {"player": {"lora": {"rank": 4}}, "old": {"copy_of": "player", "every": 2}}}, where="here"
)
START = {"step": 0, "next_task": 0, "open_tasks": (), "replay": (), "selection": ()}


class Trainer:
    """The trainer of a policy: it only notes what is to be published."""

    weights = None

    def __init__(self) -> None:
        self.hello: Any = None
        self.orders: list[str] = []

    async def connected(self, timeout_s: float) -> Any:
        return self.hello

    async def publish(self, *, id: str) -> NewVersion:
        self.orders.append(id)
        return version(int(id.partition("/")[0]))


def version(number: int) -> NewVersion:
    return NewVersion(version=number, digest="", update_bytes=0)


async def unless_stopped(work: Awaitable[Any]) -> Any:
    return await work


def test_a_copy_waits_until_its_original_continues_with_the_same_process(tmp_path: Path) -> None:
    trainers: Any = {"player": Trainer(), "old": Trainer()}
    life: Any = SimpleNamespace(
        recipe=RECIPE, events=EventLog(tmp_path / "events.jsonl"), policies={}, resumed=False,
        dispatch=MagicMock(), unless_stopped=unless_stopped, on_trainer=lambda hello: None,
        restored_of=lambda name: ((), 0),
    )  # fmt: skip
    policies = life.policies
    orders = trainers["old"].orders

    async def start(pid: int) -> None:
        """Both trainers are replaced, and the copy is the first to notice."""
        for trainer in trainers.values():
            trainer.hello = SimpleNamespace(facts={"pid": pid}, version=0, digest="", **START)
        policies["old"]._wake.set()
        while policies["old"]._announced is not trainers["old"].hello:
            await asyncio.sleep(0)
        await asyncio.sleep(0)
        orders.append(f"process {pid}")
        await policies["player"].connected()
        await policies["player"].restore(SimpleNamespace(restore=lambda **_: None))

    async def main() -> None:
        for name, trainer in trainers.items():
            policies[name] = RunPolicy(name, RECIPE.of(name), life, MagicMock())
            policies[name].trainer = trainer
        running = asyncio.create_task(policies["old"].run())
        await start(1)
        for number in (1, 2, 3):
            await policies["player"].offer(version(number))
        await start(2)
        for number in (1, 2, 3, 4):
            await policies["player"].offer(version(number))
        running.cancel()
        with suppress(asyncio.CancelledError):
            await running

    asyncio.run(main())
    assert orders == ["process 1", "2/publish", "process 2", "2/publish", "4/publish"]
