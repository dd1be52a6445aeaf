"""The page of a service over HTTP, without a browser, and what it knows of the devices."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer

from tests.support.runs.service_folder import job, snapshot, turn, write
from windfall import html_page
from windfall.jobs.views import page
from windfall.jobs.views.device_history import BUCKETS, WINDOWS_S, DeviceHistory
from windfall.jobs.views.page import JobsPage, ServiceFiles
from windfall.link import auth

TOKEN = "t" * 32


def shares(history: DeviceHistory, window_s: float, now_s: float, device: str = "gpu0") -> dict[tuple[str, str], float]:
    """Seconds by job and kind within a window."""
    found: dict[tuple[str, str], float] = {}
    for parts in history.changes(window_s, 0, now_s).get(device, {}).values():
        for name, kind, share in parts:
            found[name, kind] = found.get((name, kind), 0.0) + share * window_s / BUCKETS
    return found


def test_turns_are_counted_in_every_window_that_reaches_them() -> None:
    history, now_s = DeviceHistory(), 1_000_000.0
    history.add(turn("gpu0", "a", "train", now_s - 50.0, 30.0), now_s)
    history.add(turn("gpu0", "b", "rollout", now_s - 20.0, 5.0), now_s)
    history.add(turn("gpu0", "a", "rollout", now_s - 5000.0, 1000.0), now_s)
    for window_s in WINDOWS_S[:3]:
        found = shares(history, window_s, now_s)
        assert found == {("a", "train"): pytest.approx(30.0, rel=0.02), ("b", "rollout"): pytest.approx(5.0, rel=0.02)}
    assert shares(history, WINDOWS_S[3], now_s)["a", "rollout"] == pytest.approx(1000.0, rel=0.02)


def test_memory_does_not_grow_with_time() -> None:
    history = DeviceHistory()
    for n in range(5000):
        at_s = 1_000_000.0 + 3.0 * n
        history.add(turn("gpu0", "a", "rollout", at_s, 2.0), at_s + 2.0)
    assert all(len(row) <= 2 * BUCKETS + 2 for rows in history._rows.values() for row in rows.values())
    end_s = 1_000_000.0 + 3.0 * 5000
    assert shares(history, 3600.0, end_s)["a", "rollout"] == pytest.approx(2400.0, rel=0.01)


@pytest.mark.parametrize(
    "odd",
    [
        {"device": 1},
        {"job": None},
        {"kind": "dance"},
        {"start_s": "x"},
        {"start_s": float("nan")},
        {"end_s": 0.0},
        {"end_s": 9e99},
    ],
)
def test_odd_turns_are_left_out(odd: dict[str, Any]) -> None:
    history = DeviceHistory()
    history.add({**turn("gpu0", "a", "train", 1000.0, 1.0), **odd}, 1001.0)
    assert history.changed == 0


def test_files_are_followed_over_rotation_and_half_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page, "READ_S", 0.0)
    files, now_s = ServiceFiles(tmp_path), time.time()
    files.read()  # there is nothing yet
    first = [turn("gpu0", "a", "train", now_s - 20, 1.0), turn("gpu0", "a", "train", now_s - 18, 1.0)]
    write(tmp_path, snapshot({"a": job()}), first)
    with (tmp_path / "turns.jsonl").open("a") as file:
        file.write("{broken\n[]\n")
        line = json.dumps(turn("gpu0", "b", "rollout", now_s - 10, 1.0)) + "\n"
        file.write(line[:20])
    files.read()
    assert (files.history.changed, list(files.snapshot["jobs"])) == (2, ["a"])
    with (tmp_path / "turns.jsonl").open("a") as file:
        file.write(line[20:])
    files.read()
    assert files.history.changed == 3
    files.read()
    assert files.history.changed == 3
    (tmp_path / "turns.jsonl").replace(tmp_path / "turns.jsonl.1")
    files.read()
    write(tmp_path, snapshot({"a": job()}), [turn("gpu0", "c", "train", now_s - 5, 1.0)])
    files.read()
    assert shares(files.history, 60.0, now_s).keys() == {("a", "train"), ("b", "rollout"), ("c", "train")}


def test_a_long_file_is_read_from_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page, "MOST_BYTES", 1000)
    now_s = time.time()
    write(tmp_path, snapshot({}), [turn("gpu0", f"j{n}", "train", now_s - 50 + n / 10, 0.05) for n in range(100)])
    files = ServiceFiles(tmp_path)
    files.read()
    names = {name for name, _ in shares(files.history, 600.0, now_s)}
    assert "j99" in names
    assert 4 <= len(names) <= 10


def test_page_and_data_need_the_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(html_page, "REFUSAL_S", 0.0)
    monkeypatch.setattr(page, "READ_S", 0.0)
    now_s = time.time()
    write(tmp_path, snapshot({"<b>": job()}), [turn("gpu0", "a", "train", now_s - 5, 1.0)])

    async def main() -> None:
        app = web.Application()
        for path, handler in JobsPage(tmp_path, TOKEN).handlers().items():
            app.router.add_get(path, handler)
        async with TestClient(TestServer(app)) as http:
            key = page.link("", TOKEN).partition("key=")[2]
            for path in ("/page", "/page/data"):
                for wrong in ("", "wrong", TOKEN, auth.page_key("another token of a job")):
                    assert (await http.get(path, params={"key": wrong})).status == 403
            answer = await http.get("/page", params={"key": key})
            assert "script-src 'sha256-" in answer.headers["Content-Security-Policy"]
            assert TOKEN not in await answer.text()
            answer = await http.get("/page/data", params={"key": key, "window": "60"})
            text = await answer.text()
            data = json.loads(text)
            assert "<b>" not in text
            assert list(data["snapshot"]["jobs"]) == ["<b>"]
            assert list(data["devices"]) == ["gpu0"]
            later = {"key": key, "window": "60", "since": str(data["changed"]), "life": data["life"]}
            assert (await (await http.get("/page/data", params=later)).json())["devices"] == {}
            restarted = {**later, "life": "other"}
            assert list((await (await http.get("/page/data", params=restarted)).json())["devices"]) == ["gpu0"]
            for odd in ("61", "x", "nan"):
                assert (await http.get("/page/data", params={"key": key, "window": odd})).status == 400

    asyncio.run(main())
