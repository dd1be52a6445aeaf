"""Local generates, is paused, trains; and takes over whenever nobody else is there. Real sessions over memory links."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from scripted import SEED, Asks, Scripted, Words

from windfall.config import RolloutSection as Options
from windfall.envs.in_process import InProcess
from windfall.events.log import EventLog, read
from windfall.link import messages
from windfall.link.memory import pair
from windfall.rollout.assignment import Offer
from windfall.rollout.dispatch import Dispatch
from windfall.rollout.groups import Rollout
from windfall.rollout.seeding import Seeding
from windfall.scheduling.members import WorkerState
from windfall.scheduling.seed_time import Measured, Others, SeedPlan
from windfall.scheduling.step_model import Mark
from windfall.types import LOCAL, Feedback, Lease, Sampling, Task, Turn
from windfall.worker.in_process import in_process_worker


class Fixed:
    """An Offload that always says the same, and hears what was measured."""

    def __init__(self, seed_s: float) -> None:
        self.seed_s, self.hold = seed_s, False
        self.heard: list[tuple[Measured | None, Others]] = []
        self.asked_again: list[Others] = []

    def plan(self, last: Measured | None, others: Others) -> SeedPlan:
        self.heard.append((last, others))
        return SeedPlan(seed_s=self.seed_s, most_workers=math.inf, why="a test", hold=self.hold)

    def again(self, others: Others, now: Mark) -> SeedPlan | None:
        self.asked_again.append(others)
        return None


async def right(task: Task, turns: Sequence[Turn]) -> Feedback:
    return Feedback(reward=1.0)


def slow(step_s: float, words: int = 20) -> Scripted:
    engine = Scripted(lambda request: "x" * (words - request.position))
    engine.stepped = lambda: time.sleep(step_s)
    return engine


class World:
    def __init__(self, folder: Path, seed_s: float) -> None:
        self.folder = folder
        self.events = EventLog(folder / "events.jsonl")
        self.dispatch = Dispatch(events=self.events)
        self.policy = Fixed(seed_s)
        self.seeding = Seeding(self.dispatch, self.policy, self.events, responses=12)
        text: Any = Words()
        options = Options(max_tokens=40, reward_tries=1)
        self.rollout = Rollout(self.dispatch, InProcess(Asks(right)), text, options, seed=SEED, events=self.events)

    async def step(self, tasks: Sequence[int] = (0, 1, 2)) -> float:
        """A step's rollout; how long it took."""
        started = time.monotonic()
        self.seeding.begin(1)
        groups = [g async for g in self.rollout.groups(tasks, size=4, sampling=Sampling())]
        self.seeding.generated()
        self.seeding.end(tokens=self.rollout.made, train_s=0.5, train_wait_s=0.1)
        assert sorted(g.index for g in groups) == list(tasks)
        assert all(len(r.tokens) == 21 for g in groups for r in g.responses)
        assert self.dispatch.ledger.lost() == 0
        return time.monotonic() - started

    def state(self, name: str = LOCAL) -> WorkerState | None:
        return next((m.state for m in self.dispatch.members.here() if m.name == name), None)

    def made(self, name: str) -> int:
        return sum(m.made for m in self.dispatch.members.all.values() if m.name == name)

    async def until(self, true: Callable[[], object]) -> None:
        async with asyncio.timeout(10):
            while not true():
                await asyncio.sleep(0.002)


@asynccontextmanager
async def world(folder: Path, seed_s: float, *engines: tuple[str, Scripted]) -> AsyncIterator[World]:
    w = World(folder, seed_s)

    async def tick() -> None:
        while True:
            w.seeding.tick()
            await asyncio.sleep(0.01)

    tasks = [asyncio.create_task(tick()), asyncio.create_task(w.dispatch.watch())]
    w.dispatch.set_offer(Offer(version=0, digest="as it is", url=""))
    inner = [in_process_worker(w.dispatch, engine, 64, name=name) for name, engine in engines]
    try:
        for it in inner:
            await it.__aenter__()
        await w.until(lambda: sum(m.state is WorkerState.READY for m in w.dispatch.members.here()) == len(engines))
        yield w
        w.dispatch.ledger.check()
        w.dispatch.members.check()
    finally:
        for it in inner:
            with suppress(Exception):  # a test may have ended it before
                await it.__aexit__(None, None, None)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        w.events.close()


def play(coroutine: Any) -> None:
    asyncio.run(asyncio.wait_for(coroutine, 30))


def test_alone_it_makes_everything_whatever_the_plan(tmp_path: Path) -> None:
    async def main() -> None:
        async with world(tmp_path, 0.01, (LOCAL, slow(0.002))) as w:
            await w.step()
            assert w.made(LOCAL) == 12 * 21
            assert w.seeding.last is not None
            assert w.seeding.last.local_tokens == 12 * 21
            assert w.seeding.last.workers == 0

    play(main())


def test_paused_at_its_time_and_its_responses_go_on_elsewhere(tmp_path: Path) -> None:
    async def main() -> None:
        async with world(tmp_path, 0.1, (LOCAL, slow(0.01)), ("w", slow(0.01))) as w:
            began = time.monotonic()
            step = asyncio.create_task(w.step())
            await w.until(lambda: w.policy.heard)
            await w.until(w.seeding.over.is_set)
            assert 0.05 < time.monotonic() - began < 0.5
            assert w.state() is WorkerState.PAUSED
            await step
            assert 0 < w.made(LOCAL) < 12 * 21
            assert w.made(LOCAL) + w.made("w") == 12 * 21, "nothing twice"
            last = w.seeding.last
            assert last is not None
            assert (last.local_tokens, last.train_s, last.train_wait_s) == (w.made(LOCAL), 0.5, 0.1)
            assert 0.08 < last.seed_s < 0.3
            assert 0.9 < last.workers <= 1
            await w.step([3, 4])  # and it is there again in the next
            assert [o.workers for _, o in w.policy.heard] == [1, 1]
            assert w.policy.heard[1][1].tok_per_s > 0

    play(main())


def test_a_fleet_whose_speed_becomes_known_is_planned_for_again(tmp_path: Path) -> None:
    """The plan was made when nothing was known of the worker. It is reviewed while local still generates."""

    async def main() -> None:
        async with world(tmp_path, 5.0, (LOCAL, slow(0.05)), ("w", slow(0.05))) as w:
            await w.step()
            (_, planned), again = w.policy.heard[0], w.policy.asked_again
            assert planned.workers == 1
            assert again
            assert all(others.workers == 1 for others in again)
            assert again[-1].tok_per_s > 1.1 * planned.tok_per_s

    play(main())


def test_no_time_for_seeding_and_training_may_begin_at_once(tmp_path: Path) -> None:
    """Also in the second step, when local is paused from the first."""

    async def main() -> None:
        async with world(tmp_path, 0.0, (LOCAL, slow(0.005)), ("w", slow(0.005))) as w:
            for tasks in ([0, 1, 2], [3, 4, 5]):
                heard = len(w.policy.heard)
                step = asyncio.create_task(w.step(tasks))
                await w.until(lambda heard=heard: len(w.policy.heard) > heard)
                began = time.monotonic()
                await w.until(w.seeding.over.is_set)
                assert time.monotonic() - began < 0.06
                assert not step.done()
                await step

    play(main())


@pytest.mark.parametrize("seed_s", [0.0, 0.05])
def test_it_generates_until_there_is_something_to_train_on(tmp_path: Path, seed_s: float) -> None:
    """However short its time is. The trainer could only wait."""

    async def main() -> None:
        async with world(tmp_path, seed_s, (LOCAL, slow(0.01)), ("w", slow(0.01))) as w:
            w.policy.hold = True
            step = asyncio.create_task(w.step())
            await w.until(lambda: w.made(LOCAL) > 40)
            assert (w.state(), w.seeding.over.is_set()) == (WorkerState.READY, False)
            w.seeding.trainable()
            assert (w.state(), w.seeding.over.is_set()) == (WorkerState.PAUSED, True)
            await step
            assert w.made(LOCAL) + w.made("w") == 12 * 21
            await w.step([3, 4])  # nothing ever: then to the end
            assert w.seeding.over.is_set()

    play(main())


def test_a_fleet_that_collapses_brings_it_back(tmp_path: Path) -> None:
    async def main() -> None:
        async with world(tmp_path, 0.03, (LOCAL, slow(0.005))) as w:
            other = in_process_worker(w.dispatch, slow(0.01), 64, name="w")
            await other.__aenter__()
            await w.until(lambda: w.state("w") is WorkerState.READY)
            step = asyncio.create_task(w.step())
            await w.until(lambda: w.state() is WorkerState.PAUSED)
            await other.__aexit__(None, None, None)
            await step
            assert w.made(LOCAL) + w.made("w") == 12 * 21

    play(main())
    assert "local_resumed" in [e["name"] for e in read(tmp_path / "events.jsonl")]


def test_one_that_is_still_starting_does_not_keep_it_paused(tmp_path: Path) -> None:
    """The others are lost while somebody boots, who may take minutes: local takes over."""

    async def main() -> None:
        async with world(tmp_path, 0.03, (LOCAL, slow(0.005))) as w:
            other = in_process_worker(w.dispatch, slow(0.01), 64, name="w")
            await other.__aenter__()
            await w.until(lambda: w.state("w") is WorkerState.READY)
            ours, theirs = pair("controller", "boots")
            hello = messages.Hello(protocol=messages.PROTOCOL, nonce=b"", proof=b"", name="boots", lease=Lease())
            boots = asyncio.create_task(w.dispatch.attend(ours, hello))
            await w.until(lambda: w.state("boots") is WorkerState.PULLING)
            step = asyncio.create_task(w.step())
            await w.until(lambda: w.state() is WorkerState.PAUSED)
            await other.__aexit__(None, None, None)
            await asyncio.wait_for(step, 2.0)
            assert w.state("boots") is WorkerState.PULLING
            await theirs.close("over")
            await asyncio.gather(boots, return_exceptions=True)

    play(main())


def test_time_that_it_generated_before_the_step_is_not_the_steps(tmp_path: Path) -> None:
    async def main() -> None:
        async with world(tmp_path, 0.1, (LOCAL, slow(0.01)), ("w", slow(0.01))) as w:
            w.seeding.everybody()  # an evaluation
            await asyncio.sleep(0.5)
            await w.step()
            assert w.seeding.last is not None
            assert w.seeding.last.seed_s < 0.4

    play(main())


def test_local_that_comes_after_the_step_began_takes_part_in_it(tmp_path: Path) -> None:
    async def main() -> None:
        async with world(tmp_path, math.inf, ("w", slow(0.02))) as w:
            step = asyncio.create_task(w.step(range(20)))  # more than `w` has slots for
            await w.until(w.seeding.over.is_set)
            async with in_process_worker(w.dispatch, slow(0.005), 64, name=LOCAL):
                await w.until(lambda: not w.seeding.over.is_set())
                await w.until(lambda: w.made(LOCAL) > 0)
                await step
            assert w.seeding.last is not None
            assert w.seeding.last.local_tokens > 0

    play(main())


def test_who_gave_back_its_last_response_waits(tmp_path: Path) -> None:
    async def main() -> None:
        async with world(tmp_path, math.inf, ("v", slow(0.05)), ("w", slow(0.05))) as w:
            step = asyncio.create_task(w.step())
            await w.until(lambda: w.dispatch.ledger.running("v") > 0)
            w.dispatch.members.all["v"].suspect = True  # so that it gets nothing new
            w.dispatch._give_back("v", w.dispatch.ledger.held("v"))
            await w.until(lambda: w.dispatch.ledger.running("v") == 0)
            time = asyncio.get_running_loop().time
            before = w.dispatch.accounts.of("v", time()).seconds
            await asyncio.sleep(0.2)
            after = w.dispatch.accounts.of("v", time()).seconds
            assert after["waiting"] - before.get("waiting", 0.0) > 0.15
            await step

    play(main())


def test_nobody_there_at_its_time_so_it_goes_on_until_somebody_is(tmp_path: Path) -> None:
    async def main() -> None:
        async with world(tmp_path, 0.0, (LOCAL, slow(0.01))) as w:
            step = asyncio.create_task(w.step())
            await w.until(lambda: w.made(LOCAL) > 24)
            async with in_process_worker(w.dispatch, slow(0.005), 64, name="late"):
                await w.until(lambda: w.state() is WorkerState.PAUSED)
                assert w.seeding.over.is_set()
                await step
            assert w.made("late") > 0

    play(main())


def test_a_worker_that_flaps_does_no_harm(tmp_path: Path) -> None:
    async def main() -> None:
        async with world(tmp_path, 0.05, (LOCAL, slow(0.004))) as w:
            step = asyncio.create_task(w.step(range(6)))
            n = 0
            while not step.done():
                async with in_process_worker(w.dispatch, slow(0.004), 64, name="flaps"):
                    await asyncio.sleep(0.03)
                n += 1
                await asyncio.sleep(0.005)
            await step
            assert n > 2

    play(main())


@pytest.mark.parametrize("seed_s", [0.02, math.inf])
def test_a_worker_ten_times_slower_does_not_hold_up_the_end(tmp_path: Path, seed_s: float) -> None:
    async def main() -> None:
        engines = ((LOCAL, slow(0.01)), ("quick", slow(0.01)), ("slow", slow(0.1)))
        async with world(tmp_path, seed_s, *engines) as w:
            for n in (9, 10):  # speeds are learned
                await w.step([n])
            before = {name: w.made(name) for name in ("slow", "quick")}
            took = await w.step(range(6))
            assert w.made("slow") - before["slow"] < w.made("quick") - before["quick"]
            assert took < 21 * 0.1 / 2, "half of what one response takes there"

    play(main())


def test_without_a_local_engine_training_may_begin_at_once(tmp_path: Path) -> None:
    async def main() -> None:
        async with world(tmp_path, math.inf, ("w", slow(0.001))) as w:
            step = asyncio.create_task(w.step())
            await asyncio.sleep(0)
            assert w.seeding.over.is_set()
            await step

    play(main())
