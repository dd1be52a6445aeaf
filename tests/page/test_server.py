"""The page over HTTP, without a browser."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from typer.testing import CliRunner

from tests.support.runs.page_run import sample, small_log, step, write_run
from windfall import html_page
from windfall.link.socket import Port
from windfall.page.feed import Feed
from windfall.page.runs import RunReader
from windfall.page.server import PageServer
from windfall.run import cli

KEY = "0123456789abcdef"


async def message(stream: aiohttp.StreamReader) -> tuple[str, Any]:
    """The next event of a stream, and its data."""
    event = (await stream.readline()).decode().removeprefix("event: ").strip()
    data = b""
    while not data.endswith(b"\n"):  # a line may be longer than the reader's limit
        data += await stream.readany()
    return event, json.loads(data.partition(b"\n\n")[0].removeprefix(b"data: "))


def test_page_stream_and_samples_need_the_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(html_page, "REFUSAL_S", 0.0)
    run = write_run(tmp_path / "run", small_log(2))
    (run / "samples.jsonl").write_text(json.dumps(sample(1)) + "\n")

    async def main() -> None:
        reader = RunReader(run)
        feed = Feed(reader.history, name="run", recipe={}, status=lambda: "running")
        server = PageServer(feed, reader.samples, KEY, title="run")
        port = Port("127.0.0.1", 0, {}, None, pages=server.handlers())
        server.welcome = port.welcome
        await port.open()
        url = f"http://127.0.0.1:{port.port}/page"
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=30)) as http:
            for path in ("", "/stream", "/samples", "/sample"):
                for key in ("", "wrong"):
                    async with http.get(url + path, params={"key": key}) as answer:
                        assert answer.status == 403
            async with http.get(url, params={"key": KEY}) as answer:
                assert "script-src 'sha256-" in answer.headers["Content-Security-Policy"]
            async with http.get(f"{url}/samples", params={"key": KEY}) as answer:
                (head,) = await answer.json()
            async with http.get(f"{url}/sample", params={"key": KEY, "at": head["at"]}) as answer:
                assert (await answer.json())["tokens"] == ["a", "b", "c", "d"]
            async with http.get(f"{url}/sample", params={"key": KEY, "at": "x"}) as answer:
                assert answer.status == 404
            async with http.get(f"{url}/stream", params={"key": KEY}) as answer:
                kind, full = await message(answer.content)
                assert (kind, full["history"]["step"]) == ("full", 2)
                while not feed._following:
                    await asyncio.sleep(0.01)
                feed.tick()  # the first changes are those since the run began
                await message(answer.content)
                reader.history.add(step(60, 3))
                feed.tick()
                kind, changes = await message(answer.content)
                assert (kind, changes["history"]["step"]) == ("changes", 3)
                assert changes["history"]["series"][""]["step"] == [3]
        await port.close()

    asyncio.run(main())


def test_the_command_writes_a_file(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", small_log(2))
    done = CliRunner().invoke(cli.app, ["page", str(run)])
    assert (done.exit_code, done.output.strip()) == (0, str(run / "page.html"))
    assert "windfall" in (run / "page.html").read_text()
