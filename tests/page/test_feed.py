"""What viewers get, without a browser."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from tests.support.page_run import small_log, step
from windfall.page import feed as feeds
from windfall.page.feed import Feed
from windfall.page.history import RunHistory


class Viewer:
    """Takes everything, or nothing until `room` is set."""

    def __init__(self) -> None:
        self.got = b""
        self.room = asyncio.Event()
        self.room.set()

    async def write(self, data: bytes) -> None:
        await self.room.wait()
        self.got += data

    def messages(self) -> list[dict[str, Any]]:
        lines = self.got.splitlines()
        return [json.loads(line[6:]) for line in lines if line.startswith(b"data: ")]


def made() -> Feed:
    history = RunHistory()
    for e in small_log(2):
        history.add(e)
    return Feed(history, name="run", recipe={}, status=lambda: "running")


def fleet(present: int, gone: int) -> dict[str, Any]:
    states = ["ready"] * present + ["gone"] * gone
    return {"t": 1.0, "workers": [{"worker": f"w{n}", "lease": "spot", "state": s} for n, s in enumerate(states)]}


def watched(use: Callable[[Feed, Viewer], Awaitable[None]]) -> None:
    async def main() -> None:
        feed, viewer = made(), Viewer()
        task = asyncio.create_task(feed.follow(viewer.write))
        await settle()
        await use(feed, viewer)
        task.cancel()
        await asyncio.wait([task], timeout=5)
        assert feed.viewers == 0

    asyncio.run(main())


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def test_workers_that_left_do_not_hide_those_that_are_there() -> None:
    async def use(feed: Feed, viewer: Viewer) -> None:
        feed.snapshot = fleet(2, 100)
        feed.tick(at_once=True)
        await settle()
        assert [w["worker"] for w in viewer.messages()[-1]["snapshot"]["workers"]] == ["w0", "w1"]

    watched(use)


def test_the_clock_of_a_snapshot_is_that_of_the_page() -> None:
    async def use(feed: Feed, viewer: Viewer) -> None:
        feed.history._time.shift_s = -3600.0
        feed.snapshot = fleet(1, 0)
        feed.tick(at_once=True)
        await settle()
        assert viewer.messages()[-1]["snapshot"]["t"] == 1.0 - 3600.0

    watched(use)


def test_a_slow_viewer_gets_the_newest_page_and_nothing_in_between() -> None:
    async def use(feed: Feed, viewer: Viewer) -> None:
        viewer.room.clear()
        for n in range(3, 6):
            feed.history.add(step(60 + n, n))
            feed.tick(at_once=True)
            await settle()
        viewer.room.set()
        await settle()
        assert [m["history"]["step"] for m in viewer.messages()] == [2, 3, 5]

    watched(use)


def test_a_large_page_is_sent_rarely(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feeds, "RATE", 1e-3)

    async def use(feed: Feed, viewer: Viewer) -> None:
        for _ in range(5):
            feed.tick()
            await settle()
        assert len(viewer.messages()) == 1

    watched(use)


def test_a_stuck_viewer_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feeds, "STUCK_S", 0.01)

    async def main() -> None:
        feed, viewer = made(), Viewer()
        viewer.room.clear()
        with pytest.raises(TimeoutError):
            await feed.follow(viewer.write)
        assert feed.viewers == 0

    asyncio.run(main())
