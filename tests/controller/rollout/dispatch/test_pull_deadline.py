"""A worker that hangs in a pull is found because it receives no bytes, whatever else it reports."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from tests.controller.rollout.dispatch.test_dispatch_limits import OFFER, World, play, take
from windfall.controller.workers import members as membership
from windfall.controller.workers.members import Members, Patience, WorkerState
from windfall.events.log import read
from windfall.link import messages as m
from windfall.types import LOCAL, Lease

STALLED_S = 10.0


def pulling(name: str = "w") -> Members:
    members = Members(Patience(suspect_s=3.0, gone_s=8.0, stalled_s=STALLED_S))
    members.join(name, Lease(), 0.0)
    members.pull(name, 0.0)
    members.all[name].first.requested = (3, "d")
    return members


def beat(members: Members, now_s: float, loading: Any, pulled: int = 0, name: str = "w") -> list[str]:
    members.seen(name, now_s, m.Stats(running=0, made=0, steps=0, idle_s=0.0, loading=loading, pulled_bytes=pulled))
    return [change.why for change in members.tick(now_s) if change.what == "stuck"]


def test_pull_without_a_byte_is_stuck() -> None:
    members = pulling()
    why = [beat(members, s / 4, "pull") for s in range(50)]
    (first, *_) = [n for n, said in enumerate(why) if said]
    assert STALLED_S <= first / 4 <= STALLED_S + 0.5
    assert why[first] == [f"it has received no byte of version 3 for {STALLED_S:.0f} s"]


def test_slow_pull_that_makes_progress_is_not_stuck() -> None:
    members = pulling()
    assert not any(beat(members, s / 4, "pull", pulled=s // 30) for s in range(2000))
    assert any(beat(members, 500 + s / 4, "pull", pulled=66) for s in range(60))


def test_failed_attempts_are_no_progress() -> None:
    """Its network drops everything: each attempt fails after a while, and the next begins."""
    members = pulling()
    members.all["w"].first.failed = 2
    why = [beat(members, s / 4, "pull" if s % 8 else "") for s in range(60)]
    assert any(said and "and 2 attempts failed" in said[0] for said in why)


def test_building_and_swapping_have_longer_deadlines() -> None:
    members = pulling()
    assert not any(beat(members, s / 4, "build") for s in range(4 * 900))
    late = [beat(members, 900 + s / 4, "build") for s in range(4 * 80)]
    assert any(said and "it has been building its engine for" in said[0] for said in late)
    members = pulling()
    why = [beat(members, s / 4, "swap") for s in range(4 * 160)]
    assert any(said and "it has been swapping in the weights for 150 s" in said[0] for said in why)


def test_no_worker_is_stuck_while_the_weights_are_not_served() -> None:
    members = pulling()
    for s in range(400):
        members.extend_deadlines(s / 4)
        assert not beat(members, s / 4, "pull")
    assert not any(beat(members, 100 + s / 4, "pull") for s in range(38))
    assert any(beat(members, 110 + s / 4, "pull") for s in range(4))


def test_stall_of_the_controller_does_not_count() -> None:
    members = pulling()
    assert not beat(members, 1.0, "pull")
    assert not beat(members, 1000.0, "pull"), "its messages could not be received"


def test_trainers_own_engine_has_no_deadline() -> None:
    members = pulling(LOCAL)
    assert not any(beat(members, s / 4, "swap", name=LOCAL) for s in range(2000))


def test_draining_worker_that_stays_is_gone() -> None:
    members = pulling()
    members.move("w", WorkerState.DRAINING)
    members.all["w"].drain_sent_s = 0.0
    gone = []
    for s in range(100):
        members.seen("w", s / 4)
        gone += [(s / 4, c.why) for c in members.tick(s / 4) if c.what == "gone"]
    assert gone[0][0] == membership.LEAVING_S
    assert "asked to drain, and still connected after 20 s" in gone[0][1]


@pytest.mark.parametrize("served", [True, False])
def test_stuck_worker_is_drained(tmp_path: Path, served: bool) -> None:
    async def part(world: World) -> None:
        world.dispatch.members.patience = Patience(stalled_s=0.5, tick_s=0.05)
        world.dispatch.loading.served = lambda policy: served
        world.open("1/0")
        world.dispatch.set_offer(OFFER)
        link = world.join("w")
        await take(link, m.Load)
        hears = asyncio.create_task(take(link, m.Drain))
        for _ in range(20):
            await link.send(m.Stats(running=0, made=0, steps=0, idle_s=0.0, loading="pull", pulled_bytes=7))
            await asyncio.sleep(0.05)
        if not served:
            assert not hears.done()
            await link.send(m.LoadFailed(version=1, why="nobody answers"))
            await asyncio.sleep(0.05)
            assert world.dispatch.members.all["w"].first.failed == 0
            hears.cancel()
            return
        assert "it has received no byte of version 1" in (await hears).why
        await link.send(m.Left(why="as told"))
        while world.dispatch.members.all["w"].state is not WorkerState.GONE:
            await asyncio.sleep(0)

    world = play(tmp_path, part)
    names = [e["name"] for e in read(world.events.path)]
    assert ("worker_stuck" in names, "worker_left" in names) == (served, served)
