"""What Dispatch does with a worker's capabilities: fresh seeds, work only when idle, and the engine of every token."""

from __future__ import annotations

import contextlib
from array import array
from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.controller.rollout.dispatch.test_dispatch_limits import OFFER, World, play, take
from windfall.controller.rollout.assignment import fresh_seed
from windfall.events.log import read
from windfall.link import messages as m
from windfall.link.base import LinkClosed
from windfall.types import Capabilities

EXACT, INEXACT = Capabilities(name="torch"), Capabilities(name="vllm", version="0.23.0", exact=False)


async def ready(world: World, name: str, engine: Capabilities, slots: int = 9) -> Any:
    link = world.join(name)
    load = await take(link, m.Load)
    await link.send(
        m.Loaded(version=load.version, digest=load.digest, slots=slots, s=0.0, pulled_bytes=0, engine=engine)
    )
    return link


def tokens(work: m.Work, values: list[int]) -> m.Tokens:
    return m.Tokens(
        version=1, handles=(work.handle,), positions=(work.position,), counts=(len(values),),
        tokens=array("I", values).tobytes(), logprobs=array("f", [-0.5] * len(values)).tobytes(), finished={},
    )  # fmt: skip


def test_continuation_gets_a_fresh_seed_unless_the_engine_is_exact(tmp_path: Path) -> None:
    """A response moves from an exact engine to one that is not, and back."""

    async def part(world: World) -> None:
        world.open("0/0")
        world.dispatch.set_offer(OFFER)
        seeds = []
        for n, engine in enumerate((EXACT, INEXACT, INEXACT, EXACT)):
            link = await ready(world, f"w{n}", engine)
            (work,) = (await take(link, m.Assign)).work
            seeds.append(work.seed)
            assert work.position == n
            await link.send(tokens(work, [7]))
            await link.send(m.Left(why="enough"))
        assert seeds == [1, fresh_seed(1, 1), fresh_seed(1, 2), 1]
        assert len({fresh_seed(1, n) for n in range(100)}) == 100

    play(tmp_path, part)


def test_response_that_begins_keeps_its_seed_on_any_engine(tmp_path: Path) -> None:
    async def part(world: World) -> None:
        world.open("0/0")
        world.dispatch.set_offer(OFFER)
        link = await ready(world, "a", INEXACT)
        assert (await take(link, m.Assign)).work[0].seed == 1

    play(tmp_path, part)


def test_every_token_knows_its_engine(tmp_path: Path) -> None:
    async def part(world: World) -> None:
        world.open("0/0")
        world.dispatch.set_offer(OFFER)
        for n, engine in enumerate((EXACT, INEXACT, Capabilities(name="cuda", kv_dtype="fp8"))):
            link = await ready(world, f"w{n}", engine)
            (work,) = (await take(link, m.Assign)).work
            await link.send(tokens(work, [7, 8]))
            await link.send(m.Left(why="enough"))
            with contextlib.suppress(LinkClosed):
                await take(link, m.Drain)  # until the worker is gone
        episode = world.dispatch.ledger.entries["0/0"].episode
        assert episode.engine_runs == [("torch", 2), ("vllm", 2), ("cuda fp8", 2)]
        assert replace(episode, finish="stop").close(1.0).engines == tuple(episode.engine_runs)

    play(tmp_path, part)
    ready_events = [e for e in read(tmp_path / "events.jsonl") if e["name"] == "worker_ready"]
    shown = [(e["engine"], e["exact"]) for e in ready_events]
    assert shown == [("torch", True), ("vllm 0.23.0", False), ("cuda fp8", True)]


def test_engine_without_live_slots_gets_work_only_when_idle(tmp_path: Path) -> None:
    async def part(world: World) -> None:
        world.open("0/0")
        world.dispatch.set_offer(OFFER)
        link = await ready(world, "a", Capabilities(name="batch", live_slots=False))
        (work,) = (await take(link, m.Assign)).work
        world.open("1/0")
        await link.send(tokens(work, [7]))
        await link.send(m.Stats(running=1, made=1, steps=1, idle_s=0.0))
        frame = m.Tokens(
            version=1, handles=(work.handle,), positions=(1,), counts=(), tokens=array("I", [0]).tobytes(),
            logprobs=array("f", [-0.5]).tobytes(), finished={0: "stop"},
        )  # fmt: skip
        assert list(world.dispatch.ledger.queues[""]) == ["1/0"]
        await link.send(frame)
        assert (await take(link, m.Assign)).work[0].handle == work.handle + 1

    play(tmp_path, part)
