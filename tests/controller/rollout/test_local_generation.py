"""The trainer's engine generates, is paused, and takes over when there is no other worker. Real sessions, memory links,
virtual time."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from tests.support.engines.scripted_engine import SEED, Asks, CharacterText, Scripted
from tests.support.fleets.virtual_fleet import LoopHost
from tests.support.fleets.virtual_loop import StepLoop
from windfall.controller.rollout.dispatch import Dispatch
from windfall.controller.rollout.local_generation import LocalGeneration
from windfall.controller.rollout.stream import Rollout
from windfall.controller.scheduling.local_time import LocalPlan, Progress, RemoteFleet, StepMeasurement
from windfall.controller.workers.borrowing import HOLD_S
from windfall.controller.workers.members import WorkerState
from windfall.controller.workers.versions import Offer
from windfall.envs.in_process import InProcess
from windfall.events.log import EventLog, read
from windfall.link import messages
from windfall.link.memory import pair
from windfall.recipe.sections import Recipe
from windfall.recipe.sections import RolloutSection as Options
from windfall.run.commands.in_process import weights_already_loaded
from windfall.types import LOCAL, Feedback, Lease, Sampling, Task, Turn
from windfall.worker.worker_link import WorkerLink


class Fixed:
    """A policy with a constant local time that records its arguments."""

    def __init__(self, local_s: float) -> None:
        self.local_s, self.hold = local_s, False
        self.planned: list[tuple[StepMeasurement | None, RemoteFleet]] = []
        self.replanned: list[RemoteFleet] = []

    def plan(self, last: StepMeasurement | None, fleet: RemoteFleet) -> LocalPlan:
        self.planned.append((last, fleet))
        return LocalPlan(local_s=self.local_s, why="a test", hold=self.hold)

    def replan(self, fleet: RemoteFleet, now: Progress) -> LocalPlan | None:
        self.replanned.append(fleet)
        return None


async def right(task: Task, turns: Sequence[Turn]) -> Feedback:
    return Feedback(reward=1.0)


@asynccontextmanager
async def worker(dispatch: Dispatch, step_s: float, *, name: str) -> AsyncIterator[None]:
    """While this context is open, an engine generates for `dispatch`, one token of each response in `step_s`."""
    ours, theirs = pair("controller", name)
    host = LoopHost(Scripted(lambda request: "x" * (20 - request.position)), 64, step_s)
    awake = asyncio.Event()
    awake.set()
    hello = messages.Hello(
        protocol=messages.PROTOCOL, nonce=b"", proof=b"", name=name, lease=Lease(kind="reserved", device="here")
    )
    session = WorkerLink(theirs, host, weights_already_loaded, heartbeat_s=0.5)
    work = (dispatch.attend(ours, hello), session.serve(), host.live(awake))
    tasks = [asyncio.create_task(it) for it in work]
    try:
        yield
    finally:
        await ours.close("over")
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class World:
    def __init__(self, folder: Path, local_s: float) -> None:
        self.folder = folder
        self.events = EventLog(folder / "events.jsonl")
        self.dispatch = Dispatch(events=self.events)
        self.policy = Fixed(local_s)
        self.local_generation = LocalGeneration(self.dispatch, self.policy, self.events, responses=12)
        text: Any = CharacterText()
        recipe = Recipe(rollout=Options(max_tokens=40, reward_tries=1))
        self.rollout = Rollout(self.dispatch, InProcess(Asks(right)), {"": text}, recipe, seed=SEED, events=self.events)

    async def step(self, tasks: Sequence[int] = (0, 1, 2)) -> float:
        """Runs the rollout of a step; returns its seconds."""
        time = asyncio.get_running_loop().time
        started = time()
        self.local_generation.begin(1)
        groups = [g async for g in self.rollout.groups(tasks, size=4, sampling=lambda policy: Sampling())]
        self.local_generation.generated()
        self.local_generation.end(tokens=self.rollout.sampled_tokens, train_s=0.5, train_wait_s=0.1)
        assert sorted(g.index for g in groups) == list(tasks)
        assert all(len(r.tokens) == 21 for g in groups for r in g.responses)
        assert self.dispatch.ledger.lost_tokens() == 0
        return time() - started

    def state(self, name: str = LOCAL) -> WorkerState | None:
        return next((m.state for m in self.dispatch.members.here() if m.name == name), None)

    def generated(self, name: str) -> int:
        return sum(m.generated for m in self.dispatch.members.all.values() if m.name == name)

    async def until(self, true: Callable[[], object]) -> None:
        async with asyncio.timeout(10):
            while not true():
                await asyncio.sleep(0.002)


@asynccontextmanager
async def world(folder: Path, local_s: float, *engines: tuple[str, float]) -> AsyncIterator[World]:
    w = World(folder, local_s)

    async def tick() -> None:
        while True:
            w.local_generation.tick()
            await asyncio.sleep(0.01)

    tasks = [asyncio.create_task(tick()), asyncio.create_task(w.dispatch.watch())]
    w.dispatch.set_offer(Offer(version=0, digest="as it is"))
    inner = [worker(w.dispatch, step_s, name=name) for name, step_s in engines]
    try:
        for it in inner:
            await it.__aenter__()
        await w.until(lambda: sum(m.state is WorkerState.READY for m in w.dispatch.members.here()) == len(engines))
        yield w
        w.dispatch.ledger.check()
        w.dispatch.members.check()
    finally:
        for it in inner:
            with suppress(Exception):  # the test may have closed it already
                await it.__aexit__(None, None, None)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        w.events.close()


def play(coroutine: Any) -> None:
    with asyncio.Runner(loop_factory=StepLoop) as runner:
        runner.run(asyncio.wait_for(coroutine, 240))
        assert not runner.get_loop().errors  # pyright: ignore[reportAttributeAccessIssue]


def test_alone_the_trainers_engine_generates_everything(tmp_path: Path) -> None:
    async def main() -> None:
        async with world(tmp_path, 0.01, (LOCAL, 0.002)) as w:
            await w.step()
            assert w.generated(LOCAL) == 12 * 21
            assert w.local_generation.last is not None
            assert w.local_generation.last.local_tokens == 12 * 21
            assert w.local_generation.last.workers == 0

    play(main())


def test_engine_is_paused_after_local_time_and_its_responses_continue_elsewhere(tmp_path: Path) -> None:
    async def main() -> None:
        async with world(tmp_path, 0.1, (LOCAL, 0.01), ("w", 0.01)) as w:
            time = asyncio.get_running_loop().time
            began = time()
            step = asyncio.create_task(w.step())
            await w.until(lambda: w.policy.planned)
            await w.until(w.local_generation.may_train.is_set)
            assert 0.08 < time() - began < 0.12
            assert w.state() is WorkerState.PAUSED
            await step
            assert 0 < w.generated(LOCAL) < 12 * 21
            assert w.generated(LOCAL) + w.generated("w") == 12 * 21, "nothing is generated twice"
            last = w.local_generation.last
            assert last is not None
            assert (last.local_tokens, last.train_s, last.train_wait_s) == (w.generated(LOCAL), 0.5, 0.1)
            assert 0.08 < last.local_s < 0.12
            assert 0.9 < last.workers <= 1
            await w.step([3, 4])  # the engine takes part in the next step
            assert [o.workers for _, o in w.policy.planned] == [1, 1]
            assert w.policy.planned[1][1].tok_per_s > 0

    play(main())


def test_engines_of_several_ranks_are_paused_and_resumed_together(tmp_path: Path) -> None:
    async def main() -> None:
        async with world(tmp_path, 0.1, (LOCAL, 0.01), (f"{LOCAL}-1", 0.01)) as w:
            names = (LOCAL, f"{LOCAL}-1")
            async with worker(w.dispatch, 0.01, name="w"):
                await w.until(lambda: w.state("w") is WorkerState.READY)
                step = asyncio.create_task(w.step())
                await w.until(lambda: all(w.generated(name) for name in names))
                assert not w.local_generation.may_train.is_set()
                await w.until(w.local_generation.may_train.is_set)
                assert [w.state(name) for name in names] == [WorkerState.PAUSED] * 2
                assert w.policy.planned[0][1].workers == 1
            await w.until(lambda: [w.state(name) for name in names] == [WorkerState.READY] * 2)
            assert not w.local_generation.may_train.is_set(), "no other worker can continue"
            await step
            last = w.local_generation.last
            assert last is not None
            assert last.local_tokens == sum(map(w.generated, names))
            assert last.local_tokens + w.generated("w") == 12 * 21

    play(main())


def test_training_waits_for_an_engine_that_still_loads(tmp_path: Path) -> None:
    """Otherwise it would get work when it is ready, while its rank trains."""

    async def main() -> None:
        async with world(tmp_path, 0.0, (LOCAL, 0.01), ("w", 0.01)) as w:
            ours, theirs = pair("controller", "loads")
            hello = messages.Hello(
                protocol=messages.PROTOCOL, nonce=b"", proof=b"", name=f"{LOCAL}-1", lease=Lease(device="here")
            )
            loads = asyncio.create_task(w.dispatch.attend(ours, hello))
            await w.until(lambda: w.state(f"{LOCAL}-1") is WorkerState.PULLING)
            step = asyncio.create_task(w.step())
            await asyncio.sleep(0.1)
            assert not w.local_generation.may_train.is_set()
            await theirs.close("it is gone")
            await w.until(w.local_generation.may_train.is_set)
            assert w.state() is WorkerState.PAUSED
            await step
            await asyncio.gather(loads, return_exceptions=True)

    play(main())


def test_plan_is_reviewed_when_the_speed_of_the_fleet_becomes_known(tmp_path: Path) -> None:
    """The plan was made when the worker's speed was unknown. It is reviewed while the trainer's engine still
    generates."""

    async def main() -> None:
        async with world(tmp_path, 5.0, (LOCAL, 0.05), ("w", 0.05)) as w:
            await w.step()
            (_, first), replanned = w.policy.planned[0], w.policy.replanned
            assert first.workers == 1
            assert replanned
            assert all(fleet.workers == 1 for fleet in replanned)
            assert replanned[-1].tok_per_s > 1.1 * first.tok_per_s

    play(main())


def test_zero_local_time_lets_training_begin_at_once(tmp_path: Path) -> None:
    """Also in the second step, when the engine is still paused from the first."""

    async def main() -> None:
        async with world(tmp_path, 0.0, (LOCAL, 0.005), ("w", 0.005)) as w:
            for tasks in ([0, 1, 2], [3, 4, 5]):
                count = len(w.policy.planned)
                step = asyncio.create_task(w.step(tasks))
                await w.until(lambda count=count: len(w.policy.planned) > count)
                began = asyncio.get_running_loop().time()
                await w.until(w.local_generation.may_train.is_set)
                assert asyncio.get_running_loop().time() - began < 0.02
                assert not step.done()
                await step

    play(main())


@pytest.mark.parametrize("local_s", [0.0, 0.05])
def test_engine_generates_until_something_is_trainable(tmp_path: Path, local_s: float) -> None:
    """Even with a very short local time: the trainer could only wait."""

    async def main() -> None:
        async with world(tmp_path, local_s, (LOCAL, 0.01), ("w", 0.01)) as w:
            w.policy.hold = True
            step = asyncio.create_task(w.step())
            await w.until(lambda: w.generated(LOCAL) > 40)
            assert (w.state(), w.local_generation.may_train.is_set()) == (WorkerState.READY, False)
            w.local_generation.trainable()
            assert (w.state(), w.local_generation.may_train.is_set()) == (WorkerState.PAUSED, True)
            await step
            assert w.generated(LOCAL) + w.generated("w") == 12 * 21
            await w.step([3, 4])  # nothing becomes trainable: it generates until the end
            assert w.local_generation.may_train.is_set()

    play(main())


def test_engine_resumes_when_all_other_workers_are_lost(tmp_path: Path) -> None:
    async def main() -> None:
        async with world(tmp_path, 0.03, (LOCAL, 0.005)) as w:
            other = worker(w.dispatch, 0.01, name="w")
            await other.__aenter__()
            await w.until(lambda: w.state("w") is WorkerState.READY)
            step = asyncio.create_task(w.step())
            await w.until(lambda: w.state() is WorkerState.PAUSED)
            await other.__aexit__(None, None, None)
            await step
            assert w.generated(LOCAL) + w.generated("w") == 12 * 21

    play(main())
    assert "local_resumed" in [e["name"] for e in read(tmp_path / "events.jsonl")]


def test_booting_worker_does_not_keep_the_engine_paused(tmp_path: Path) -> None:
    """The other workers are lost while one boots, which may take minutes: the trainer's engine takes over."""

    async def main() -> None:
        async with world(tmp_path, 0.03, (LOCAL, 0.005)) as w:
            other = worker(w.dispatch, 0.01, name="w")
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


def test_lender_whose_service_needs_it_does_not_keep_the_engine_paused(tmp_path: Path) -> None:
    """It is there, has the weights, and may have no slot for hours."""

    async def main() -> None:
        async with world(tmp_path, 0.03, (LOCAL, 0.005), ("w", 0.01)) as w:
            member = w.dispatch.members.all["w"]
            member.lends, member.able_s = True, asyncio.get_running_loop().time() + 1.0 - HOLD_S
            member.capacity = messages.Capacity(slots=64, state="normal", use=0.1, lent=0.0)
            step = asyncio.create_task(w.step())
            await w.until(lambda: w.state() is WorkerState.PAUSED)
            member.capacity = messages.Capacity(slots=0, state="frozen", use=0.9, lent=0.0)
            w.dispatch._released(member, tuple(e.handle for e in w.dispatch.ledger.held("w")))
            await asyncio.wait_for(step, 4.0)

    play(main())
    assert "local_resumed" in [e["name"] for e in read(tmp_path / "events.jsonl")]


def test_time_before_the_step_does_not_count_as_local_time(tmp_path: Path) -> None:
    async def main() -> None:
        async with world(tmp_path, 0.1, (LOCAL, 0.01), ("w", 0.01)) as w:
            w.local_generation.begin_evaluation()
            await asyncio.sleep(0.5)
            await w.step()
            assert w.local_generation.last is not None
            assert w.local_generation.last.local_s < 0.4

    play(main())


def test_engine_that_joins_during_a_step_takes_part_in_it(tmp_path: Path) -> None:
    async def main() -> None:
        async with world(tmp_path, math.inf, ("w", 0.02)) as w:
            step = asyncio.create_task(w.step(range(20)))  # more responses than `w` has slots
            await w.until(w.local_generation.may_train.is_set)
            async with worker(w.dispatch, 0.005, name=LOCAL):
                await w.until(lambda: not w.local_generation.may_train.is_set())
                await w.until(lambda: w.generated(LOCAL) > 0)
                await step
            assert w.local_generation.last is not None
            assert w.local_generation.last.local_tokens > 0

    play(main())


def test_worker_that_released_its_last_response_is_billed_as_waiting(tmp_path: Path) -> None:
    async def main() -> None:
        async with world(tmp_path, math.inf, ("v", 0.05), ("w", 0.05)) as w:
            step = asyncio.create_task(w.step())
            await w.until(lambda: w.dispatch.ledger.running("v") > 0)
            w.dispatch.members.all["v"].suspect = True  # so that it gets nothing new
            w.dispatch._request_release("v", w.dispatch.ledger.held("v"))
            await w.until(lambda: w.dispatch.ledger.running("v") == 0)
            time = asyncio.get_running_loop().time
            before = w.dispatch.accounts.of("v", time()).seconds
            await asyncio.sleep(0.2)
            after = w.dispatch.accounts.of("v", time()).seconds
            assert after["waiting"] - before.get("waiting", 0.0) > 0.15
            await step

    play(main())


def test_engine_continues_after_local_time_until_another_worker_joins(tmp_path: Path) -> None:
    async def main() -> None:
        async with world(tmp_path, 0.0, (LOCAL, 0.01)) as w:
            step = asyncio.create_task(w.step())
            await w.until(lambda: w.generated(LOCAL) > 24)
            async with worker(w.dispatch, 0.005, name="late"):
                await w.until(lambda: w.state() is WorkerState.PAUSED)
                assert w.local_generation.may_train.is_set()
                await step
            assert w.generated("late") > 0

    play(main())


def test_flapping_worker_does_no_harm(tmp_path: Path) -> None:
    async def main() -> None:
        async with world(tmp_path, 0.05, (LOCAL, 0.004)) as w:
            step = asyncio.create_task(w.step(range(6)))
            n = 0
            while not step.done():
                async with worker(w.dispatch, 0.004, name="flaps"):
                    await asyncio.sleep(0.03)
                n += 1
                await asyncio.sleep(0.005)
            await step
            assert n > 2

    play(main())


@pytest.mark.parametrize("local_s", [0.02, math.inf])
def test_worker_ten_times_slower_does_not_delay_the_end(tmp_path: Path, local_s: float) -> None:
    async def main() -> None:
        engines = ((LOCAL, 0.01), ("quick", 0.01), ("slow", 0.1))
        async with world(tmp_path, local_s, *engines) as w:
            for n in (9, 10):  # speeds are learned
                await w.step([n])
            before = {name: w.generated(name) for name in ("slow", "quick", LOCAL)}
            took = await w.step(range(6))
            made = {name: w.generated(name) - before[name] for name in before}
            assert made["slow"] < made["quick"] + made[LOCAL]
            assert took < 21 * 0.1 / 2, "half the time of one response on the slow worker"

    play(main())


def test_without_an_engine_training_may_begin_at_once(tmp_path: Path) -> None:
    async def main() -> None:
        async with world(tmp_path, math.inf, ("w", 0.001)) as w:
            step = asyncio.create_task(w.step())
            await asyncio.sleep(0)
            assert w.local_generation.may_train.is_set()
            await step

    play(main())
