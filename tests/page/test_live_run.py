"""The page of a real run on the controller's port, while its workers die and until it ends."""

from __future__ import annotations

import re
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from tests.support.servers.browser import MARKS

pytest.importorskip("playwright.sync_api")
pytestmark = [*MARKS, pytest.mark.timeout(540)]

RECIPE = """
[run]
name = "live"
steps = 4
threads = 1
[model]
path = "tiny"
[env]
name = "arithmetic"
[rollout]
groups = 6
group_size = 4
max_tokens = 96
[eval]
tasks = 0
[fleet]
local = false
[trace]
nodes = 2
mean_up_s = 6
mean_down_s = 2
price_usd_per_h = 0.3
[log]
samples = 4
"""


def link(output: Path, process: subprocess.Popen[bytes]) -> str:
    """The link that the run prints."""
    deadline = time.monotonic() + 120
    while not (found := re.search(r"http://\S+/page\?key=\w+", output.read_text())):
        assert process.poll() is None, output.read_text()
        assert time.monotonic() < deadline, f"no link within 120 s: {output.read_text()}"
        time.sleep(0.2)
    return found.group()


def until(page: Any, condition: str, timeout_s: float) -> None:
    """Wait for a condition. The page's content policy does not allow playwright to do that in the page."""
    deadline = time.monotonic() + timeout_s
    while not page.evaluate(condition):
        assert time.monotonic() < deadline, f"{condition} was not true within {timeout_s} s"
        page.wait_for_timeout(300)


def test_a_run_is_watched_until_it_ends(page: Any, tmp_path: Path) -> None:
    (tmp_path / "recipe.toml").write_text(RECIPE)
    output = tmp_path / "output"
    with output.open("w") as file:
        argv = [sys.executable, "-m", "windfall.run.cli", "train", "recipe.toml"]
        process = subprocess.Popen(argv, cwd=tmp_path, stdout=file, stderr=file)
    try:
        url = link(output, process)
        key = url.partition("key=")[2]
        stream = url.replace("/page?", "/page/stream?")
        for refused in (url.partition("?")[0], url + "0", stream.replace(key, "a" * 32)):
            with pytest.raises(urllib.error.HTTPError) as error:
                urllib.request.urlopen(refused, timeout=10)
            assert error.value.code == 403
        page.goto(url)
        page.locator(".status.running").wait_for(timeout=60_000)
        until(page, "windfall.runs[0].history?.step >= 1", 150)
        until(page, "windfall.runs[0].history.lost >= 1", 100)
        page.get_by_text("worker lost").first.wait_for(timeout=10_000)
        rows = page.evaluate("windfall.runs[0].rows.map(r => r.name)")
        assert rows[0] == "trainer"
        assert set(rows[1:]) <= {"n1", "n2"}
        page.keyboard.press("5")
        page.locator(".token").first.wait_for(timeout=20_000)
        page.keyboard.press("4")
        page.get_by_text("every worker-second is priced").or_(page.get_by_text("a lower bound")).wait_for()
        page.locator(".status.finished").wait_for(timeout=250_000)
        page.keyboard.press("1")
        page.get_by_text("4 / 4").wait_for()
    finally:
        process.terminate()
        process.wait(240)
    folder = tmp_path / "runs" / "live"
    leaks = [p for p in folder.rglob("*") if p.is_file() and key.encode() in p.read_bytes()]
    assert leaks == []  # the key is printed, and written nowhere
