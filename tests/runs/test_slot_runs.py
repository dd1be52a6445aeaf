"""A run with slots in processes of its own: the trainer is killed and slots are filled again, and everything is as if
it had not been; workers go on with what they have."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.support.runs.slot_run import SlotRun
from tests.trainer.test_slot_run import FEW, PROMPTS, RECIPE, check_sampled, train
from windfall import errors
from windfall.controller.assembly import ControllerLife
from windfall.controller.process import ControllerProcess
from windfall.events.log import EventLog, read
from windfall.link import auth
from windfall.models.text import Text
from windfall.processes import process
from windfall.processes.process import Handle
from windfall.recipe.file import load_recipe
from windfall.trainer.ranks.rank_place import RankPlace
from windfall.training import CheckpointState, TrainerLost

Script = Callable[[SlotRun], Awaitable[None]]


class ScriptedLoop:
    """A loop of one's own: the frozen policy is offered, and a script uses the slots."""

    def __init__(self, script: Script) -> None:
        self._script = script

    async def run(self, life: ControllerLife, text: Callable[[str], Text]) -> CheckpointState:
        for policy in life.policies.values():
            await policy.connected()
        assert text("base").prompt("1+1=")
        offering = asyncio.create_task(life.policies["base"].run())
        try:
            await self._script(SlotRun(life=life))
        finally:
            offering.cancel()
            await asyncio.gather(offering, return_exceptions=True)
        return CheckpointState(step=life.recipe.run.steps, next_task=0)

    def snapshot(self) -> dict[str, Any]:
        return {}


class Processes:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._started: list[Handle] = []

    def start(self, name: str, *arguments: str, env: dict[str, str] | None = None) -> Handle:
        argv = [sys.executable, "-m", "windfall.run.cli", *arguments]
        handle = process.start(name=name, argv=argv, env=os.environ | (env or {}), log=self.folder / f"{name}.log")
        self._started.append(handle)
        return handle

    def trainer(self) -> Handle:
        place = RankPlace(base="base")
        return self.start(place.name, "_trainer", str(self.folder), "base", env=place.environment())

    async def worker(self) -> Handle:
        address = self.folder / "address.json"
        async with asyncio.timeout(60):
            while not address.is_file():
                await asyncio.sleep(0.05)
        url = json.loads(address.read_text())["url"]
        options = ["--token", str(self.folder / "token"), "--device", "cpu", "--threads", "1", "--clouds", "none"]
        return self.start("worker", "worker", "--join", url, "--name", "w0", *options)

    async def end(self) -> None:
        for handle in self._started:
            with contextlib.suppress(ProcessLookupError):
                handle.kill()
            await handle.wait()


def run(folder: Path, script: Callable[[SlotRun, Processes, Handle], Awaitable[None]]) -> None:
    (folder / "recipe.toml").write_text(RECIPE)
    for secret in ("token", "trainer.secret"):
        auth.make_token(folder / secret)

    async def main() -> None:
        processes, events = Processes(folder), EventLog(folder / "events.jsonl")
        trainer = processes.trainer()

        async def play(run: SlotRun) -> None:
            await processes.worker()
            await script(run, processes, trainer)

        controller = ControllerProcess(
            load_recipe(folder / "recipe.toml"), folder, events, resumed=False, own_loop=ScriptedLoop(play)
        )
        try:
            async with asyncio.timeout(240):
                await errors.guard(controller.run())
        finally:
            await processes.end()
            events.close()

    asyncio.run(main())


async def sampled(run: SlotRun, name: str) -> list[Sequence[int]]:
    return [r.tokens for r in await run.sample(name, PROMPTS, 5)]


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_killed_trainer_leaves_the_same_results(tmp_path: Path) -> None:
    async def script(run: SlotRun, processes: Processes, trainer: Handle) -> None:
        t0, s0, saved = run.trainer("t0"), run.trainer("s0"), str(tmp_path / "saved")
        await t0.load_adapter(FEW, id="")
        await train(run, "t0", range(2))
        await t0.save_adapter(saved, optimizer=True, id="")
        ahead = await train(run, "t0", range(2, 4))
        await s0.load_adapter(path=saved, id="")
        await run.offer("s0", 1)
        found = await check_sampled(run, "s0")
        digest = run.life.dispatch.versions["s0"].offer

        trainer.kill()
        await trainer.wait()
        with pytest.raises(TrainerLost):
            await train(run, "t0", range(1))
        assert await sampled(run, "s0") == found, "the worker has the adapter"
        processes.trainer()
        for name in ("t0", "s0"):
            await run.policy(name).connected()
        await t0.load_adapter(path=saved, optimizer=True, id="")
        assert await train(run, "t0", range(2, 4)) == ahead, "bit for bit"
        await s0.load_adapter(path=saved, id="")
        await run.offer("s0", 1)  # the same adapter: the same version
        assert run.life.dispatch.versions["s0"].offer == digest
        assert await sampled(run, "s0") == found
        assert await check_sampled(run, "base") != found

    run(tmp_path, script)
    names = [event["name"] for event in read(tmp_path / "events.jsonl")]
    assert names.count("worker_joined") == 1
    assert names[-1] == "end"


def test_run_without_a_loop_of_its_own_is_refused(tmp_path: Path) -> None:
    (tmp_path / "recipe.toml").write_text(RECIPE)
    for secret in ("token", "trainer.secret"):
        auth.make_token(tmp_path / secret)

    async def main() -> None:
        events = EventLog(tmp_path / "events.jsonl")
        controller = ControllerProcess(load_recipe(tmp_path / "recipe.toml"), tmp_path, events, resumed=False)
        with pytest.raises(errors.WindfallError, match="nothing fills the slots of this recipe"):
            await errors.guard(controller.run())
        events.close()

    asyncio.run(asyncio.wait_for(main(), 60))
