"""The page in a real browser. `make test-page` runs these; without Chromium and playwright they are skipped."""

from __future__ import annotations

import asyncio
import json
import os
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.support.runs.page_run import event, sample, small_log, step, write_run
from tests.support.servers.browser import MARKS, Served, append, written
from windfall.page import command as pages

pytest.importorskip("playwright.sync_api")
pytestmark = MARKS

SHOTS = os.environ.get("WINDFALL_SHOTS", "")
"""Folder for screenshots of a real run, which WINDFALL_SHOTS_RUN names."""


def test_live_updates_arrive(page: Any, served: Served, tmp_path: Path) -> None:
    page.goto(served.url)
    page.get_by_text("5 / 100").wait_for()
    append(tmp_path / "case", step(70, 6, reward=0.9375))
    page.get_by_text("6 / 100").wait_for(timeout=8000)
    page.locator(".value", has_text="0.938").wait_for()
    assert page.evaluate("windfall.updates") >= 2


def test_every_tab_opens_by_keyboard_in_light_and_dark_and_on_a_phone(page: Any, served: Served) -> None:
    page.goto(served.url)
    for theme in ("light", "dark"):
        page.emulate_media(color_scheme=theme)
        for n, text in enumerate(
            ("Last problems", "moves", "gradient norm", "Where it went", "color by", "workers lost"), 1
        ):
            page.keyboard.press(str(n))
            page.get_by_text(text).first.wait_for()
    page.set_viewport_size({"width": 360, "height": 700})
    for n in range(1, 7):
        page.keyboard.press(str(n))
        page.wait_for_timeout(150)
        assert page.evaluate("document.documentElement.scrollWidth") <= 360


def test_the_timeline_zooms_and_pans(page: Any, served: Served) -> None:
    page.goto(served.url + "#timeline")
    canvas = page.locator("canvas")
    canvas.wait_for()
    page.wait_for_function("windfall.timeline.drawn > 0")

    def span() -> tuple[float, float]:
        return tuple(page.evaluate("[windfall.timeline.from, windfall.timeline.to]"))

    everything = span()
    canvas.hover(position={"x": 600, "y": 60})
    assert "waiting for" in page.locator(".tip").inner_text()
    page.mouse.wheel(0, -600)
    page.wait_for_function(f"windfall.timeline.to - windfall.timeline.from < {(everything[1] - everything[0]) / 2}")
    zoomed = span()
    page.keyboard.press("ArrowLeft")
    assert span()[0] < zoomed[0]
    page.keyboard.press("m")
    page.keyboard.press("0")
    assert span() == everything
    page.wait_for_timeout(200)
    pixels = "c => new Set(c.getContext('2d').getImageData(0, 0, c.width, c.height).data).size"
    assert canvas.evaluate(pixels) > 20


def test_what_drafts_predictions_and_gathering_brought_is_shown(page: Any, served: Served) -> None:
    page.goto(served.url + "#now")
    page.get_by_text("drafts: 1.42 tokens per step").wait_for()
    page.get_by_text("correlation within groups 0.70").wait_for()
    page.goto(served.url + "#money")
    page.get_by_text("moving the last responses of steps together saved").wait_for()


def test_a_migration_can_be_seen(page: Any, served: Served) -> None:
    page.goto(served.url + "#responses")
    page.get_by_text("→ w1").wait_for()
    tokens = page.locator(".token")
    assert tokens.all_inner_texts() == ["a", "b", "c", "d"]
    colors = tokens.evaluate_all("spans => spans.map(s => s.style.background)")
    assert (colors[0] == colors[1], colors[1] == colors[2]) == (True, False)
    page.keyboard.press("c")
    colors = page.locator(".token").evaluate_all("spans => spans.map(s => s.style.background)")
    assert (colors[1] == colors[2], colors[2] == colors[3]) == (True, False)


def test_turns_and_tool_calls_of_an_agent(page: Any, tmp_path: Path) -> None:
    turns = {
        "prompt": "user: 40+2?", "tokens": ["call", "tool: 42", "It is ", "42"], "cut": 0,
        "logprobs": [-1.0, 0.0, -0.5, -0.5], "versions": [[0, 1], [-1, 1], [0, 2]],
        "workers": [["w0", 1], ["", 1], ["w1", 2]], "calls": [[0, "add", "{}"]],
    }  # fmt: skip
    page.goto(written(tmp_path, small_log(), [sample(1, turns=4, tools=2, **turns, more=[turns])]) + "#responses")
    page.get_by_text("segment 2: the agent changed its history").wait_for()
    headings = page.locator(".turn").all_inner_texts()
    assert (
        headings == ["turn 1: 1 token by w0", "observed: from the environment or a tool", "turn 2: 2 tokens by w1"] * 2
    )
    assert page.locator(".call").all_inner_texts() == ["calls add {}"] * 2
    assert page.locator(".tokens.observed").first.inner_text() == "tool: 42"
    assert page.locator(".move").count() == 0  # the next turn of an agent may go anywhere


def test_lenders_have_the_last_rows(page: Any, tmp_path: Path) -> None:
    log = small_log(3)
    log.insert(2, event(1, "instant", "worker_joined", worker="chat-7", lease="borrowed", device="H100", age_s=0.5))
    page.goto(written(tmp_path, log) + "#timeline")
    page.wait_for_function("window.windfall?.timeline?.drawn > 0")
    assert page.evaluate("windfall.runs[0].rows[0].name") == "trainer"
    assert page.evaluate("windfall.runs[0].rows.at(-1).name") == "chat-7"


def test_hostile_output_is_only_text(page: Any, tmp_path: Path) -> None:
    attack = "</script><script>window.attacked = 1</script><img src=x onerror='window.attacked = 1'>"
    tokens = [attack, "x" * 1_000_000, "\u202eright to left\u202c", "👩‍👩‍👧‍👦", "\u0000\u0007", "\ud800"]
    hostile = sample(
        1, tokens=tokens, logprobs=[-1.0] * 6, versions=[[0, 6]], workers=[[attack, 6]], prompt=attack, task=attack
    )
    began = time.monotonic()
    page.goto(written(tmp_path, small_log(why=attack), [hostile]))
    page.get_by_text("Last problems").wait_for()
    assert attack in page.locator("main").inner_text()
    page.keyboard.press("5")
    page.locator(".token").nth(5).wait_for()
    assert page.locator(".token").nth(0).inner_text() == attack
    assert "👩‍👩‍👧‍👦" in page.locator(".tokens").inner_text()
    assert len(page.locator(".token").nth(1).inner_text()) < 30_000
    assert page.evaluate("window.attacked") is None
    assert page.locator("main img, main script").count() == 0
    assert page.evaluate("document.documentElement.scrollWidth") <= 1280
    assert time.monotonic() - began < 20


def test_a_file_needs_no_network(page: Any, tmp_path: Path) -> None:
    requests: list[str] = []
    page.on("request", lambda r: requests.append(r.url))
    page.goto(written(tmp_path, small_log()))
    for n in range(1, 7):
        page.keyboard.press(str(n))
    assert [url.partition(":")[0] for url in requests] == ["file"]


def test_how_a_run_ended_is_shown(page: Any, tmp_path: Path) -> None:
    end = event(60, "instant", "end", step=5, finished=True)
    page.goto(written(tmp_path / "a", [*small_log(), end]))
    page.locator(".status.finished").wait_for()
    page.goto(written(tmp_path / "b", small_log()))  # no process holds its lock, and it has no end
    page.locator(".status.killed").wait_for()


def test_runs_are_compared(page: Any, tmp_path: Path) -> None:
    runs = [write_run(tmp_path / name, small_log(n)) for name, n in (("measured", 5), ("predicted", 10))]
    page.goto(pages.write(runs, tmp_path / "page.html").as_uri() + "#compare")
    page.get_by_text("predicted (killed)").wait_for()
    assert "(+100.0 %)" in page.locator("table").first.inner_text()


def test_a_prediction_stands_beside_what_was_measured(page: Any, tmp_path: Path) -> None:
    log = small_log(8)
    log[0]["device"] = "simulated"
    simulated = write_run(tmp_path / "sim", [])
    (simulated / "events.jsonl").unlink()
    (simulated / "windfall-0.jsonl").write_text("".join(json.dumps(e) + "\n" for e in log))
    run = write_run(tmp_path / "measured", small_log(5))
    page.goto(pages.write([run, simulated], tmp_path / "page.html").as_uri() + "#compare")
    page.get_by_text("sim/windfall-0 (simulated)").wait_for()
    page.keyboard.press("3")
    page.locator(".u-label", has_text="sim/windfall-0").first.wait_for()  # in the same charts
    assert page.locator("figcaption", has_text="reward").count() == 1
    page.get_by_label("Run").select_option("sim/windfall-0")
    page.locator(".status.simulated").wait_for()


def test_no_key_no_page(served: Served) -> None:
    for path in ("/page", "/page/stream", "/page/samples", "/page/sample?at=0", "/page?key=wrong"):
        url = served.url.partition("/page")[0] + path
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(url, timeout=60)
        assert refused.value.code == 403


def test_fifty_viewers_and_a_stuck_one(page: Any, served: Served, tmp_path: Path) -> None:
    """Everyone gets the next step, while one viewer reads nothing at all."""
    stream = served.url.replace("/page?", "/page/stream?")

    async def watch() -> list[int]:
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(connector=connector, read_bufsize=1 << 20) as session:

            async def follow() -> int:
                async with session.get(stream) as answer:
                    async for line in answer.content:
                        if line.startswith(b"data: ") and json.loads(line[6:])["history"].get("step") == 6:
                            return 6
                return 0

            async with session.get(stream):  # never reads
                viewers = [asyncio.create_task(follow()) for _ in range(50)]
                await asyncio.sleep(2.0)
                append(tmp_path / "case", step(70, 6))
                return await asyncio.wait_for(asyncio.gather(*viewers), 240)

    page.goto(served.url)
    with ThreadPoolExecutor(1) as pool:  # playwright has a loop of its own in this thread
        assert pool.submit(lambda: asyncio.run(watch())).result(30) == [6] * 50
    page.get_by_text("6 / 100").wait_for(timeout=8000)


@pytest.mark.skipif(not SHOTS, reason="only to renew the pictures of the docs")
def test_pictures_of_a_real_run(page: Any) -> None:
    """WINDFALL_SHOTS=docs/pictures WINDFALL_SHOTS_RUN=runs/demo make test-page"""
    out = Path(SHOTS)
    out.mkdir(parents=True, exist_ok=True)
    html = pages.write([Path(os.environ["WINDFALL_SHOTS_RUN"])], out / ".page.html")
    heights = {"now": 660, "timeline": 330, "learning": 640, "money": 640, "responses": 430}
    for n, (name, height) in enumerate(heights.items(), 1):
        page.set_viewport_size({"width": 1180, "height": height})
        page.goto(f"{html.resolve().as_uri()}?{n}")  # a new page: nothing is left of the last picture
        page.keyboard.press(str(n))
        page.wait_for_timeout(400)
        if name == "timeline":
            page.keyboard.press("m")
            for _ in range(2):
                page.keyboard.press("+")
        elif name == "responses":
            page.get_by_label("Order").select_option("longest")
            page.locator(".item", has_text="moved").first.click()
        page.wait_for_timeout(500)
        page.screenshot(path=out / f"page-{name}.png")
    html.unlink()


def test_every_policy_has_lines_cards_and_dollars(page: Any, tmp_path: Path) -> None:
    names = ("solver", "verifier")
    log = [{**e, "bases": {"solver": names}} if e["name"] == "start" else e for e in small_log(4)]
    mine = ("step", "train", "trainer_ready")
    log = [new for e in log for new in ([{**e, "policy": p} for p in names] if e["name"] in mine else [e])]
    segment = {**sample(1), "role": "verifier"}
    url = written(tmp_path, log, [sample(1, role="solver", more=[segment])])
    page.goto(url + "#now")
    page.get_by_text("reward, verifier").wait_for()
    legends = page.locator(".u-legend").all_inner_texts()
    assert ["verifier" in text for text in legends] == [True, False], "all policies have the throughput in common"
    page.goto(url + "#money")
    page.get_by_text("By policy").wait_for()
    page.goto(url + "#compare")
    page.get_by_text("case, verifier (killed)").wait_for()
    page.goto(url + "#responses")
    page.get_by_text("segment 2: verifier").wait_for()
