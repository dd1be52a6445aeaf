"""Dispatch and lenders whose reports a test sends: lies, late reports, and what must never wait for a lender."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.fleets.response_owner import FunctionOwner
from windfall.controller.ledger.episode import Episode
from windfall.controller.rollout.dispatch import Dispatch
from windfall.controller.workers.members import Member, WorkerState
from windfall.controller.workers.versions import Offer
from windfall.events.log import EventLog, read
from windfall.link import messages as m
from windfall.link.memory import MemoryLink, pair
from windfall.sim.core import loop as loops
from windfall.types import Lease, LeaseKind, Sampling

SLOTS = 4


class World:
    def __init__(self, folder: Path, **options: Any) -> None:
        self.log = folder / "events.jsonl"
        self.dispatch = Dispatch(events=EventLog(self.log), **options)
        self.listener = FunctionOwner(turn_ended=lambda id: None, rejected=lambda id, why: pytest.fail(f"{id}: {why}"))
        self.links: dict[str, MemoryLink] = {}
        self.got: dict[str, list[Any]] = {}
        self.tasks: list[asyncio.Task[None]] = []

    def publish(self, version: int) -> None:
        self.dispatch.set_offer(Offer(version=version, digest=f"v{version}"))

    def open(self, *ids: str, max_tokens: int = 9, **more: Any) -> None:
        for id in ids:
            self.dispatch.open(
                Episode(id=id, prompt=(5, 6), seed=1, max_tokens=max_tokens, sampling=Sampling(), stop=frozenset({0}),
                        **more),
                self.listener,
            )  # fmt: skip

    async def join(self, name: str, *, kind: LeaseKind = "borrowed", lends: bool = True) -> Member:
        ours, self.links[name] = pair("controller", name)
        hello = m.Hello(protocol=m.PROTOCOL, nonce=b"", proof=b"", name=name, lease=Lease(kind=kind), lends=lends)
        self.tasks.append(asyncio.create_task(self.dispatch.attend(ours, hello)))
        self.got[name] = []
        self.tasks.append(asyncio.create_task(self._receive(name)))
        await settle()
        return self.dispatch.members.all[name]

    async def _receive(self, name: str) -> None:
        while True:
            self.got[name].append(await self.links[name].receive())

    async def own(self, name: str) -> Member:
        return await self.join(name, kind="reserved", lends=False)

    async def load(self, *names: str, version: int = 1, longest: int = 0) -> None:
        for name in names:
            await self.links[name].send(
                m.Loaded(version=version, digest=f"v{version}", slots=SLOTS, s=0.0, pulled_bytes=0, longest=longest)
            )
        await settle()

    async def report(self, name: str, slots: int, **more: Any) -> None:
        await self.links[name].send(m.Capacity(**{"slots": slots, "state": "normal", "use": 0.1, "lent": 0.0} | more))
        await settle()

    def work(self, name: str) -> int:
        """Number of responses that a worker runs."""
        return self.dispatch.ledger.running(name)

    def loads(self, name: str) -> list[int]:
        """The versions that a worker was asked to load."""
        return [x.version for x in self.got[name] if isinstance(x, m.Load)]


async def settle() -> None:
    for _ in range(60):
        await asyncio.sleep(0)


def play(folder: Path, part: Callable[[World], Awaitable[None]], **options: Any) -> World:
    async def main() -> World:
        world = World(folder, **options)
        watching = asyncio.create_task(world.dispatch.watch())
        try:
            world.publish(1)
            await part(world)
            world.dispatch.ledger.check()
            world.dispatch.members.check()
        finally:
            for task in [watching, *world.tasks]:
                task.cancel()
            await asyncio.gather(watching, *world.tasks, return_exceptions=True)
        return world

    return loops.run(lambda _: main())


def test_lender_gets_nothing_before_its_first_report(tmp_path: Path) -> None:
    async def part(world: World) -> None:
        world.open(*(f"{n}/0" for n in range(3)))
        await world.join("l")
        await world.load("l")
        assert world.work("l") == 0, "its service may be busy"
        await world.report("l", 2)
        await asyncio.sleep(0.3)  # the next look of the controller
        assert world.work("l") == 2

    play(tmp_path, part)


def test_worker_with_a_borrowed_lease_that_serves_nobody_is_like_any_other(tmp_path: Path) -> None:
    """An idle node of a cluster: `fleet.borrowed_max` is not about it."""

    async def part(world: World) -> None:
        world.open(*(f"{n}/0" for n in range(3)))
        member = await world.join("idle", lends=False)
        await world.load("idle")
        assert (world.work("idle"), member.open_slots) == (3, SLOTS)
        await world.report("idle", 1)
        assert member.state is WorkerState.GONE, "it does not lend, so it has no capacity to report"

    play(tmp_path, part, borrowed_max=0)


@pytest.mark.parametrize(
    "lie", [{"slots": -1}, {"use": math.nan}, {"use": -0.1}, {"lent": math.inf}, {"slack_s": math.nan},
            {"slack_s": -math.inf}]
)  # fmt: skip
def test_lender_that_reports_nonsense_is_disconnected_and_its_responses_go_on(
    tmp_path: Path, lie: dict[str, Any]
) -> None:
    async def part(world: World) -> None:
        member = await world.join("l")
        await world.load("l")
        await world.report("l", 4)
        world.open("1/0", "1/1")
        await settle()
        assert world.work("l") == 2
        await world.report("l", **{"slots": 4} | lie)
        assert member.state is WorkerState.GONE
        assert "capacity" in member.why
        await world.own("own")
        await world.load("own")
        assert world.work("own") == 2

    play(tmp_path, part)


def test_lender_that_claims_far_too_much_gets_what_its_engine_takes(tmp_path: Path) -> None:
    async def part(world: World) -> None:
        await world.join("l")
        await world.load("l")
        await world.report("l", 2**40)
        world.open(*(f"{n}/0" for n in range(20)))
        await settle()
        assert world.work("l") == SLOTS

    play(tmp_path, part)


def test_response_that_fits_only_on_a_lender_gets_it(tmp_path: Path) -> None:
    async def part(world: World) -> None:
        await world.own("own")
        await world.join("l")
        await world.load("own", longest=50)
        await world.load("l", longest=5000)
        await world.report("l", SLOTS)
        for batch in (1, 8):  # steps hardly depend on the batch: no lender is needed for speed
            for _ in range(20):
                world.dispatch.placement.speeds.observe("own", batch, 10 * batch, 0.1)
        world.open("1/0", max_tokens=9)
        world.open("2/0", max_tokens=900)
        await settle()
        assert (world.work("own"), world.work("l")) == (1, 1)
        assert not world.dispatch.ledger.queues[""]

    play(tmp_path, part)


def test_lender_without_slots_loads_the_next_version_once_it_has_some(tmp_path: Path) -> None:
    async def part(world: World) -> None:
        await world.own("own")
        await world.join("l")
        await world.load("own", "l")
        await world.report("l", 0)
        world.publish(2)
        world.open("1/0")
        await settle()
        assert (world.loads("own"), world.loads("l")) == ([1, 2], [1])
        await world.report("l", SLOTS)
        await asyncio.sleep(0.3)
        assert world.loads("l") == [1, 2]

    play(tmp_path, part)


def test_lenders_without_slots_do_not_hold_work_back(tmp_path: Path) -> None:
    """A worker that pulls will soon take its share, but not one that may not be used."""

    async def part(world: World) -> None:
        await world.own("own")
        for name in ("l", "k"):
            await world.join(name)
            await world.load(name)
            await world.report(name, 0)
        await world.load("own")
        world.dispatch.members.pull_s = 60.0
        for name in ("l", "k"):
            world.dispatch.members.pull(name, asyncio.get_running_loop().time())
        world.open(*(f"{n}/0" for n in range(SLOTS)))
        await settle()
        assert world.work("own") == SLOTS

    play(tmp_path, part)


def test_slow_lender_is_noticed_and_does_not_make_own_machines_of_its_device_look_slow(tmp_path: Path) -> None:
    async def part(world: World) -> None:
        await world.own("own")
        await world.join("l")
        await world.load("own", "l")
        await world.report("l", SLOTS)
        speeds = world.dispatch.placement.speeds
        for n in range(60):
            speeds.observe("own", 4, 40, 0.1, 4000 + n)
        speeds.prefilled("own", 10_000, 1.0)
        before = speeds.profile("own")
        for n in range(60):
            speeds.observe("l", 4, 10, 0.1, 4000 + n)
        speeds.prefilled("l", 10_000, 9.0)
        assert speeds.prefill_tok_per_s("own") == pytest.approx(10_000)
        assert speeds.prefill_tok_per_s("l") == pytest.approx(10_000 / 9)
        assert speeds.profile("own") == before
        assert speeds.tok_per_s("own", 4) / speeds.tok_per_s("l", 4) == pytest.approx(4.0, rel=0.1)
        for n in range(60):  # six quiet seconds of its service
            speeds.observe("l", 4, 40, 0.1, 4000 + n)
        assert speeds.tok_per_s("own", 4) / speeds.tok_per_s("l", 4) == pytest.approx(1.0, rel=0.3)
        world.open(*(f"{n}/0" for n in range(2)))
        await settle()

    play(tmp_path, part)


def test_run_says_that_it_waits_if_all_lenders_need_their_machines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("windfall.controller.rollout.dispatch.NO_WORKERS_S", 0.1)

    async def part(world: World) -> None:
        member = await world.join("l")
        await world.load("l")
        await world.report("l", 0)
        world.open("1/0")
        await asyncio.sleep(0.6)
        assert next(e for e in read(world.log) if e["name"] == "no_workers")["lenders"] == 1
        member.able_s = asyncio.get_running_loop().time()
        before = len([e for e in read(world.log) if e["name"] == "no_workers"])
        await asyncio.sleep(0.4)
        assert len([e for e in read(world.log) if e["name"] == "no_workers"]) == before

    play(tmp_path, part)
