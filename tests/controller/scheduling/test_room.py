"""Workers too small for some responses: other workers take these, and the run fails only if no worker can."""

from __future__ import annotations

import asyncio
import math
from array import array
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.papers.rlboost import Algorithm2
from tests.controller.rollout.dispatch.test_dispatch_limits import OFFER, World, play, take
from windfall.controller.ledger.episode import Episode
from windfall.controller.ledger.ledger import Ledger, room
from windfall.controller.rollout import dispatch
from windfall.controller.scheduling.balance import WorkerLoad
from windfall.controller.scheduling.placement import Placement
from windfall.events.log import read
from windfall.link import messages as m
from windfall.types import Sampling


def episode(id: str, prompt: int, max_tokens: int = 9) -> Episode:
    return Episode(id=id, prompt=(1,) * prompt, seed=1, max_tokens=max_tokens, sampling=Sampling(), stop=frozenset({0}))


async def joined(world: World, name: str, longest: int = 0) -> Any:
    link = world.join(name)
    load = await take(link, m.Load)
    said = m.Loaded(version=load.version, digest=load.digest, slots=9, s=0.0, pulled_bytes=0, longest=longest)
    await link.send(said)
    return link


def test_rejected_response_goes_to_another_worker_and_never_back(tmp_path: Path) -> None:
    async def part(world: World) -> None:
        world.dispatch.set_offer(OFFER)
        small = await joined(world, "small")
        world.open("1/0", prompt=(5,) * 50)
        (work,) = (await take(small, m.Assign)).work
        await small.send(m.Rejected(handle=work.handle, why="59 tokens do not fit into 40"))
        while world.dispatch.ledger.entries["1/0"].state == "running":
            await asyncio.sleep(0)
        large = await joined(world, "large")
        (work,) = (await take(large, m.Assign)).work
        assert len(array("I", work.prompt)) == 50
        world.open("2/0", prompt=(5,) * 60)  # longer still, so it must not go to the small worker either
        world.open("3/0")
        assert {len(w.prompt) // 4 for w in (await take(small, m.Assign)).work} == {2}
        assert {len(w.prompt) // 4 for w in (await take(large, m.Assign)).work} == {60}
        assert world.rejected == []

    world = play(tmp_path, part)
    (event,) = [e for e in read(world.events.path) if e["name"] == "work_rejected"]
    assert (event["worker"], event["response"], event["tokens"]) == ("small", "1/0", 59)


def test_invalid_response_fails_and_says_nothing_about_room(tmp_path: Path) -> None:
    async def part(world: World) -> None:
        world.dispatch.set_offer(OFFER)
        worker = await joined(world, "worker", longest=100)
        world.open("1/0", prompt=(5, 1_000_000))
        (work,) = (await take(worker, m.Assign)).work
        await worker.send(m.Rejected(handle=work.handle, why="token ids must be below 99", invalid=True))
        while not world.rejected:
            await asyncio.sleep(0)
        world.dispatch.withdraw(["1/0"])
        world.open("2/0", prompt=(5,) * 90)
        assert {len(w.prompt) // 4 for w in (await take(worker, m.Assign)).work} == {90}
        ((id, why),) = world.rejected
        assert (id, "below 99" in why) == ("1/0", True)

    play(tmp_path, part)


def test_reported_room_prevents_rejections(tmp_path: Path) -> None:
    """Nothing is rejected, because no response that is too long is assigned."""

    async def part(world: World) -> None:
        world.dispatch.set_offer(OFFER)
        small = await joined(world, "small", longest=40)
        large = await joined(world, "large", longest=400)
        for n in range(6):
            world.open(f"{n}/0", prompt=(5,) * (50 if n < 3 else 5))
        long = [len(w.prompt) // 4 for w in (await take(large, m.Assign)).work]
        short = [len(w.prompt) // 4 for w in (await take(small, m.Assign)).work]
        assert long.count(50) == 3
        assert set(short) == {5}

    play(tmp_path, part)


@pytest.mark.parametrize("helped", [False, True])
def test_response_that_fits_no_worker_ends_the_run_after_a_while(
    tmp_path: Path, helped: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dispatch, "NO_ROOM_S", 0.6)

    async def part(world: World) -> None:
        world.dispatch.set_offer(OFFER)
        await joined(world, "small", longest=40)
        world.open("7/3", prompt=(5,) * 50)
        async with asyncio.timeout(10):
            while not any(e["name"] == "no_room" for e in read(world.events.path)):
                await asyncio.sleep(0.01)
        assert world.rejected == []
        if helped:
            starting = world.join("large")  # its room is not known yet, so the run continues
            load = await take(starting, m.Load)
            await asyncio.sleep(1.2)
            assert world.rejected == []
            await starting.send(
                m.Loaded(version=load.version, digest=load.digest, slots=9, s=0, pulled_bytes=0, longest=99)
            )
            await take(starting, m.Assign)
            return
        async with asyncio.timeout(10):
            while not world.rejected:
                await asyncio.sleep(0.01)
        ((id, why),) = world.rejected
        assert id == "7/3"
        assert "room for 59 tokens" in why
        assert "no worker has had more than 40. Set engine.kv_tokens to 60 or more" in why

    play(tmp_path, part)


SIZES = st.one_of(st.just(math.inf), st.integers(10, 80))


@given(
    prompts=st.lists(st.integers(1, 70), min_size=1, max_size=25),
    workers=st.lists(st.tuples(SIZES, st.integers(1, 6)), min_size=1, max_size=6),
    balancing=st.sampled_from([(Placement, True), (Placement, False), (Algorithm2, True)]),
)
@settings(deadline=None, max_examples=150)
def test_responses_are_assigned_only_where_they_fit(prompts: list[int], workers: list[Any], balancing: Any) -> None:
    ledger = Ledger()
    for n, prompt in enumerate(prompts):
        ledger.open(episode(f"{n}/0", prompt))
    kind, balanced = balancing
    placement = kind(ledger, balancing=balanced)
    longest = {f"w{n}": size for n, (size, _) in enumerate(workers)}
    loads = [WorkerLoad(worker=f"w{n}", running=0, slots=slots) for n, (_, slots) in enumerate(workers)]
    before = list(ledger.queues[""])
    out = placement.assign(loads, dict.fromkeys(longest, 1), coming=0, longest=longest)
    ledger.check()
    for worker, entries in out.items():
        assert len(entries) <= next(load.slots for load in loads if load.worker == worker)
        assert all(room(entry.episode) <= longest[worker] for entry in entries)
    given_ids = {e.episode.id for entries in out.values() for e in entries}
    assert list(ledger.queues[""]) == [id for id in before if id not in given_ids], (
        "the rest of the queue keeps its order"
    )
    for id in ledger.queues[""]:  # no worker with enough room has a free slot
        able = [load for load in loads if longest[load.worker] >= room(ledger.entries[id].episode)]
        assert all(len(out.get(load.worker, ())) == load.slots for load in able)


def test_responses_move_only_where_they_fit() -> None:
    ledger = Ledger()
    placement = Algorithm2(ledger)
    for n in range(3):
        ledger.open(episode(f"{n}/0", 50))
    placement.assign([WorkerLoad(worker="a", running=0, slots=9)], {"a": 1}, coming=0)
    loads = [WorkerLoad(worker="a", running=3, slots=9, waiting=2), WorkerLoad(worker="b", running=0, slots=9)]
    assert placement.reclaim(loads, {"a": 99, "b": 40}) == []
    assert placement.move_targets == {}
    assert len(placement.reclaim(loads, {"a": 99, "b": 59})) == 1
