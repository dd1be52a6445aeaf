"""Serves the page of a run's folder as its controller does: `python -m tests.support.servers.page_server RUN`."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from windfall.link.socket import Port
from windfall.page.feed import TICK_S, Feed
from windfall.page.runs import RunReader, recipe_facts
from windfall.page.server import PageServer

KEY = "0123456789abcdef0123456789abcdef"


async def main(run: Path) -> None:
    reader = RunReader(run)
    feed = Feed(reader.history, name=reader.name, recipe=recipe_facts(reader.folder), status=lambda: reader.status)
    feed.snapshot = reader.snapshot()
    server = PageServer(feed, reader.samples, KEY, title=f"{reader.name} · windfall")
    port = Port("127.0.0.1", 0, {}, None, pages=server.handlers())
    server.welcome = port.welcome
    await port.open()
    print(f"http://127.0.0.1:{port.port}/page?key={KEY}", flush=True)
    while True:
        await asyncio.sleep(TICK_S)
        reader.read_new()
        feed.snapshot = reader.snapshot()
        feed.tick()


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1])))
