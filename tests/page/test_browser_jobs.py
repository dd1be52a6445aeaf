"""The page of a service with several jobs, in a real browser."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.runs.service_folder import device, job, snapshot, turn, write
from tests.support.servers.browser import MARKS, Served

pytest.importorskip("playwright.sync_api")
pytestmark = MARKS

SHOTS = os.environ.get("WINDFALL_SHOTS", "")
"""Folder for a screenshot."""


def many(jobs: int, devices: int) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """A snapshot and ten minutes of turns: every job generates on all devices and trains on the first."""
    rng, now_s = random.Random(0), time.time()
    names = [f"job-{n}" for n in range(jobs)]
    turns = []
    for d in range(devices):
        at_s = now_s - 600.0
        while at_s < now_s - 2.0:
            train = d == 0 and rng.random() < 0.4
            s = rng.uniform(2.0, 8.0) if train else rng.uniform(0.2, 2.0)
            turns.append(turn(f"gpu{d}", rng.choice(names), "train" if train else "rollout", at_s, s))
            at_s += s + (rng.random() < 0.1) * 2.0
    used = dict.fromkeys(names, 60.0)
    held = {f"gpu{d}": device(names[d % jobs], "train" if d == 0 else "rollout", 30.0, **used) for d in range(devices)}
    states = ("running", "running", "queued", "done", "failed", "over_budget", "stopped")
    rows = {
        name: job(states[n % len(states)], reason="its reason" if n % len(states) > 3 else "")
        for n, name in enumerate(names)
    }
    return snapshot(rows, held), turns


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    write(tmp_path, *many(3, 2))
    server = Served(tmp_path, "tests.support.servers.jobs_page_server")
    yield server
    server.close()


def pixels(page: Any) -> int:
    """Number of different colors on the timelines."""
    code = """() => {
        const canvas = document.querySelector("canvas"), seen = new Set();
        const d = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
        for (let i = 0; i < d.length; i += 4) seen.add(d[i] << 16 | d[i + 1] << 8 | d[i + 2]);
        return seen.size;
    }"""
    return page.evaluate(code)


def until(page: Any, condition: str, timeout_s: float = 20.0) -> None:
    """Wait for it. Playwright's own wait needs `eval`, which the page's content policy forbids."""
    deadline = time.monotonic() + timeout_s
    while not page.evaluate(condition):
        assert time.monotonic() < deadline, f"waited {timeout_s:g} s for {condition}"
        page.wait_for_timeout(50)


def ready(page: Any) -> None:
    until(page, "windfallJobs.updates > 0 && windfallJobs.drawn > 0")


def test_jobs_and_devices_are_shown_live(page: Any, served: Served, tmp_path: Path) -> None:
    page.goto(served.url)
    page.get_by_text("job-1").first.wait_for()
    assert page.locator("tbody tr").count() == 3
    page.get_by_text("2 running, 1 queued").wait_for()
    page.get_by_text("bill $3.00, of which $1.00 idle").wait_for()
    until(page, "windfallJobs.rows.size === 2")
    before = page.evaluate("windfallJobs.changed")
    state, _ = many(3, 2)
    state["jobs"]["job-0"]["step"] = 7
    state["jobs"]["new"] = job("queued", waiting_for="one of 4 places")
    write(tmp_path, state, [turn("gpu1", "job-2", "rollout", time.time() - 1.0, 0.9)])
    page.get_by_text("7 / 10").wait_for(timeout=8000)
    page.get_by_text("one of 4 places").wait_for()
    until(page, f"windfallJobs.changed === {before + 1}")


def test_windows_are_chosen_by_keys_and_colors_are_of_jobs(page: Any, served: Served) -> None:
    page.goto(served.url)
    ready(page)
    assert pixels(page) > 6
    for n, window_s in enumerate((60, 600, 3600, 21600, 86400, 604800), 1):
        page.keyboard.press(str(n))
        until(page, f"windfallJobs.window === {window_s} && windfallJobs.rows.size === 2")
        assert page.locator("button.on").count() == 1
    colors = page.locator("tbody td:first-child i").evaluate_all("marks => marks.map(m => m.style.background)")
    assert len(set(colors)) == 3


def test_a_job_is_highlighted_and_a_slice_explained(page: Any, served: Served) -> None:
    page.goto(served.url)
    ready(page)
    page.locator("tbody tr").first.click()
    assert page.evaluate("windfallJobs.selected") == "job-0"
    assert page.locator("tr[aria-selected=true]").count() == 1
    page.locator("tbody tr").first.press("Enter")
    assert page.evaluate("windfallJobs.selected") == ""
    page.locator("canvas").hover(position={"x": 800, "y": 10})
    text = page.locator(".tip").inner_text()
    assert text.startswith("gpu0, ")
    assert "job-" in text or "idle" in text


def test_twenty_jobs_on_sixteen_devices_also_on_a_phone(page: Any, tmp_path: Path) -> None:
    write(tmp_path, *many(20, 16))
    server = Served(tmp_path, "tests.support.servers.jobs_page_server")
    try:
        page.goto(server.url)
        until(page, "windfallJobs.rows.size === 16")
        assert page.locator("tbody tr").count() == 20
        colors = page.locator("tbody td:first-child i").evaluate_all("marks => marks.map(m => m.style.background)")
        assert len(set(colors)) == 20
        assert page.evaluate("windfallJobs.drawMs") < 200
        if SHOTS:
            page.screenshot(path=Path(SHOTS) / "page-jobs.png", full_page=True)
        for theme in ("dark", "light"):
            page.emulate_media(color_scheme=theme)
            page.set_viewport_size({"width": 360, "height": 700})
            page.wait_for_timeout(150)
            assert page.evaluate("document.documentElement.scrollWidth") <= 360
    finally:
        server.close()


def test_text_of_jobs_is_only_text(page: Any, tmp_path: Path) -> None:
    attack = "</script><script>window.attacked = 1</script><img src=x onerror='window.attacked = 1'>"
    write(tmp_path, snapshot({attack: job("failed", reason=attack)}, {attack: device(attack, "train", 1.0)}))
    server = Served(tmp_path, "tests.support.servers.jobs_page_server")
    try:
        page.goto(server.url)
        ready(page)
        assert attack in page.locator("main").inner_text()
        assert page.evaluate("window.attacked") is None
        assert page.locator("main img, main script").count() == 0
    finally:
        server.close()


def test_a_service_that_is_gone_is_said(page: Any, tmp_path: Path) -> None:
    write(tmp_path, snapshot({"a": job()}, time_s=time.time() - 600))
    server = Served(tmp_path, "tests.support.servers.jobs_page_server")
    page.goto(server.url)
    page.get_by_text("the service has written nothing for 10 m").wait_for()
    server.close()
    page.get_by_text("no answer from the service").wait_for(timeout=15000)
    assert page.locator("tbody tr").count() == 1
