"""Fixtures of the tests in a real browser."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.runs.page_run import sample, small_log, write_run
from tests.support.servers.browser import CHROMIUM, Served


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    sync_api = pytest.importorskip("playwright.sync_api")
    with sync_api.sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield chromium
        chromium.close()


@pytest.fixture
def page(browser: Any) -> Iterator[Any]:
    tab = browser.new_page(viewport={"width": 1280, "height": 760})
    errors: list[str] = []
    tab.on("pageerror", lambda e: errors.append(str(e)))
    # The server may end before the tab does. A violated content policy is a console message, too.
    ended = "Failed to load resource"
    tab.on("console", lambda m: errors.append(m.text) if m.type == "error" and ended not in m.text else None)
    yield tab
    tab.close()
    assert errors == []


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    run = write_run(tmp_path / "case", small_log(5))
    (run / "samples.jsonl").write_text(json.dumps(sample(1)) + "\n")
    server = Served(run)
    yield server
    server.close()
