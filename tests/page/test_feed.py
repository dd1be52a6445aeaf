"""What viewers get, without a browser."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from tests.support.runs.page_run import small_log
from windfall.page import feed as feeds
from windfall.page.feed import Feed
from windfall.page.history import RunHistory


class Line:
    """A connection that takes everything, or nothing."""

    def __init__(self) -> None:
        self.got: list[bytes] = []
        self.waiting = 0

    def write(self, data: bytes) -> None:
        self.got.append(data)

    def get_write_buffer_size(self) -> int:
        return self.waiting

    def is_closing(self) -> bool:
        return False

    def messages(self) -> list[dict[str, Any]]:
        lines = b"".join(self.got).splitlines()
        return [json.loads(line[6:]) for line in lines if line.startswith(b"data: ")]


def made() -> Feed:
    history = RunHistory()
    for e in small_log(2):
        history.add(e)
    return Feed(history, name="run", recipe={}, status=lambda: "running")


def fleet(present: int, gone: int) -> dict[str, Any]:
    states = ["ready"] * present + ["gone"] * gone
    return {"t": 1.0, "workers": [{"worker": f"w{n}", "lease": "spot", "state": s} for n, s in enumerate(states)]}


async def followed(feed: Feed, ticks: int) -> list[dict[str, Any]]:
    """What a viewer gets with these ticks, without the first message."""
    line = Line()

    async def write(data: bytes) -> None:
        del data

    task = asyncio.create_task(feed.follow(write, line))
    await asyncio.sleep(0)
    for _ in range(ticks):
        feed.tick()
    task.cancel()
    await asyncio.wait([task], timeout=60)
    return line.messages()


def test_workers_that_left_do_not_hide_those_that_are_there() -> None:
    """The count of workers and their table always come together, however many have left."""
    feed = made()
    feed.snapshot = fleet(2, 100)
    for message in asyncio.run(followed(feed, 4)):
        assert [w["worker"] for w in message["snapshot"]["workers"]] == ["w0", "w1"]


def test_a_large_fleet_is_sent_with_every_fifth_tick() -> None:
    feed = made()
    feed.snapshot = fleet(feeds.FEW_WORKERS + 1, 0)
    sent = ["workers" in message["snapshot"] for message in asyncio.run(followed(feed, 10))]
    assert sent.count(True) == 2


def test_the_clock_of_a_snapshot_is_that_of_the_page() -> None:
    feed = made()
    feed.history._time.shift_s = -3600.0
    feed.snapshot = fleet(1, 0)
    (message,) = asyncio.run(followed(feed, 1))
    assert message["snapshot"]["t"] == 1.0 - 3600.0
