"""Limits of Dispatch: size of a frame, number of load attempts, number of workers that one response may cost."""

from __future__ import annotations

import asyncio
import itertools
from array import array
from pathlib import Path
from typing import Any

import pytest

from tests.support.fleets.response_owner import FunctionOwner
from windfall.controller.ledger import ledger as ledgers
from windfall.controller.ledger.episode import Episode
from windfall.controller.rollout import loading
from windfall.controller.rollout.dispatch import Dispatch
from windfall.controller.workers.members import WorkerState
from windfall.controller.workers.versions import Offer
from windfall.events.log import EventLog, read
from windfall.link import messages as m
from windfall.link.base import LinkClosed
from windfall.link.memory import MemoryLink, pair
from windfall.sim.core import loop as loops
from windfall.types import Sampling

OFFER = Offer(version=1, digest="one")


class World:
    """A Dispatch, and workers whose messages a test sends."""

    def __init__(self, folder: Path) -> None:
        self.events = EventLog(folder / "events.jsonl")
        self.dispatch = Dispatch(events=self.events)
        self.rejected: list[tuple[str, str]] = []
        self.listener = FunctionOwner(
            turn_ended=lambda id: None, rejected=lambda id, why: self.rejected.append((id, why))
        )
        self.tasks: list[asyncio.Task[None]] = []

    def open(self, id: str, prompt: tuple[int, ...] = (5, 6)) -> None:
        episode = Episode(id=id, prompt=prompt, seed=1, max_tokens=9, sampling=Sampling(), stop=frozenset({0}))
        self.dispatch.open(episode, self.listener)

    def join(self, name: str) -> MemoryLink:
        ours, theirs = pair("controller", name)
        hello = m.Hello(protocol=m.PROTOCOL, nonce=b"", proof=b"", name=name)
        self.tasks.append(asyncio.create_task(self.dispatch.attend(ours, hello)))
        return theirs

    async def ready(self, name: str, slots: int = 999) -> MemoryLink:
        """A worker that has loaded the offered version."""
        link = self.join(name)
        load = await take(link, m.Load)
        await link.send(m.Loaded(version=load.version, digest=load.digest, slots=slots, s=0.0, pulled_bytes=0))
        return link


async def take(link: MemoryLink, kind: type[Any]) -> Any:
    async with asyncio.timeout(5):
        while not isinstance(message := await link.receive(), kind):
            pass
        return message


def play(folder: Path, part: Any) -> World:
    async def main() -> World:
        world = World(folder)
        watching = asyncio.create_task(world.dispatch.watch())
        try:
            await part(world)
            world.dispatch.ledger.check()
            world.dispatch.members.check()
        finally:
            for task in [watching, *world.tasks]:
                task.cancel()
            await asyncio.gather(watching, *world.tasks, return_exceptions=True)
        return world

    return loops.run(lambda _: main())


def test_work_is_split_into_frames_within_the_limit_of_a_link(tmp_path: Path) -> None:
    async def part(world: World) -> None:
        for n in range(40):
            world.open(f"{n}/0", prompt=tuple(range(1, 100_001)))  # 400 kB each, 16 MB in total
        world.dispatch.set_offer(OFFER)
        link = await world.ready("a")
        got: list[m.Work] = []
        while len(got) < 40:
            frame = await take(link, m.Assign)
            assert len(m.encode(frame)) < m.MAX_FRAME_BYTES / 4
            got += frame.work
        assert sorted(w.handle for w in got) == list(range(1, 41))
        assert all(array("I", w.prompt).tolist() == list(range(1, 100_001)) for w in got)

    play(tmp_path, part)


def test_response_longer_than_a_frame_gets_its_own_frame(tmp_path: Path) -> None:
    async def part(world: World) -> None:
        for n in range(3):
            world.open(f"{n}/0", prompt=(1,) * 300_000)
        world.dispatch.set_offer(OFFER)
        link = await world.ready("a")
        assert [len((await take(link, m.Assign)).work) for _ in range(3)] == [1, 1, 1]

    play(tmp_path, part)


@pytest.mark.parametrize("how", ["crashes", "sends NaN"])
def test_response_that_costs_worker_after_worker_is_rejected(tmp_path: Path, how: str) -> None:
    async def part(world: World) -> None:
        world.open("7/3")
        world.dispatch.set_offer(OFFER)
        for n in range(ledgers.MAX_LOST_IN_A_ROW):
            assert world.rejected == []
            link = await world.ready(f"w{n}")
            (work,) = (await take(link, m.Assign)).work
            if how == "crashes":
                await link.close("its engine broke")
            else:
                nan = array("f", [float("nan")]).tobytes()
                await link.send(
                    m.Tokens(version=1, handles=(work.handle,), positions=(0,), counts=(),
                             tokens=array("I", [7]).tobytes(), logprobs=nan, finished={})
                )  # fmt: skip
            while world.dispatch.ledger.entries["7/3"].state == "running":
                await asyncio.sleep(0)
        ((id, why),) = world.rejected
        assert id == "7/3"
        assert f"{ledgers.MAX_LOST_IN_A_ROW} workers in a row" in why
        assert ("its engine broke" if how == "crashes" else "invalid log-prob, in 7/3") in why

    play(tmp_path, part)


@pytest.mark.parametrize("others", [False, True])
def test_one_worker_with_a_bad_link_has_far_more_tries(tmp_path: Path, others: bool) -> None:
    """It reconnects again and again, and is lost each time with its work. If there are no other workers, the response
    is blamed in the end."""

    async def part(world: World) -> None:
        world.open("7/3")
        world.dispatch.set_offer(OFFER)
        most = ledgers.MIN_LOST_NAMES * ledgers.MAX_LOST_IN_A_ROW
        for n in range(most):
            assert world.rejected == []
            link = await world.ready("b" if others and n == 20 else "a")
            await take(link, m.Assign)
            await link.close("the network failed")
            while world.dispatch.ledger.entries["7/3"].state == "running":
                await asyncio.sleep(0)
        assert [id for id, _ in world.rejected] == ["7/3"]
        assert f"{most} workers in a row" in world.rejected[0][1]

    play(tmp_path, part)


def test_response_that_gets_a_token_now_and_then_is_not_rejected(tmp_path: Path) -> None:
    async def part(world: World) -> None:
        world.open("7/3")
        world.dispatch.set_offer(OFFER)
        for n in range(3 * ledgers.MAX_LOST_IN_A_ROW):
            link = await world.ready(f"w{n}")
            (work,) = (await take(link, m.Assign)).work
            if n % 4 == 3 and work.position < 8:
                await link.send(
                    m.Tokens(version=1, handles=(work.handle,), positions=(work.position,), counts=(),
                             tokens=array("I", [7]).tobytes(), logprobs=array("f", [-1.0]).tobytes(), finished={})
                )  # fmt: skip
            await link.close("taken")
            while world.dispatch.ledger.entries["7/3"].state == "running":
                await asyncio.sleep(0)
        assert world.rejected == []

    play(tmp_path, part)


def test_failed_loads_are_retried_with_back_off_and_then_the_worker_is_drained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loading, "LOAD_TRIES", 4)

    async def part(world: World) -> None:
        world.dispatch.set_offer(OFFER)
        link, times = world.join("a"), []
        loop = asyncio.get_running_loop()
        for _ in range(4):
            await take(link, m.Load)
            times.append(loop.time())
            await link.send(m.LoadFailed(version=1, why="connection refused " * 100))
        assert "failed to load the weights 4 times: connection refused" in (await take(link, m.Drain)).why
        gaps = [b - a for a, b in itertools.pairwise(times)]
        assert gaps[0] > 0.4
        assert gaps[2] > 1.5 * gaps[1] > 2 * gaps[0]

    play(tmp_path, part)
    said = [e["why"] for e in read(tmp_path / "events.jsonl") if e["name"] == "load_failed"]
    assert len(said) == 4
    assert max(map(len, said)) <= loading.MAX_CHARS


def test_pulling_worker_is_asked_for_a_newer_version_when_there_is_work(tmp_path: Path) -> None:
    async def part(world: World) -> None:
        world.dispatch.set_offer(OFFER)
        link = world.join("a")
        assert (await take(link, m.Load)).version == 1
        world.dispatch.set_offer(Offer(version=2, digest="two"))
        world.open("1/0")
        assert (await take(link, m.Load)).version == 2
        await link.send(m.Loaded(version=2, digest="two", slots=4, s=0.0, pulled_bytes=0))
        assert len((await take(link, m.Assign)).work) == 1
        assert world.dispatch.members.all["a"].state is WorkerState.READY

    play(tmp_path, part)


def test_long_message_of_a_peer_is_truncated(tmp_path: Path) -> None:
    async def part(world: World) -> None:
        link = world.join("a")
        await link.send(m.Left(why="x" * 100_000))
        with pytest.raises(LinkClosed):
            await take(link, m.Assign)

    play(tmp_path, part)
    (lost,) = [e for e in read(tmp_path / "events.jsonl") if e["name"] == "worker_lost"]
    assert len(lost["why"]) <= loading.MAX_CHARS
