"""What the page shows, in a real browser: predictions, small numbers, phones, runs in odd states."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.runs.page_run import START_T, event, sample, small_log, step, write_run
from tests.support.servers.browser import MARKS, Served, append, written
from windfall.page import command as pages
from windfall.plan.section import PlannedWorkers, PlanSection
from windfall.recipe.file import dump_recipe, load_recipe

pytest.importorskip("playwright.sync_api")
pytestmark = MARKS


def planned(path: Path) -> Path:
    """A recipe with a plan: steps of 8 s, 125 tokens per second, $3.6 per hour."""
    worker = PlannedWorkers(device="cpu", lease="spot", count=3, worker={"fixed_s": 0.01})
    plan = PlanSection(name="3 cpu", step_s=8.0, tok_per_s=125.0, usd_per_h=3.6, workers=[worker])
    recipe = load_recipe(write_run(path.parent / "recipe", []) / "recipe.toml")
    path.write_text(dump_recipe(recipe.model_copy(update={"plan": plan})))
    return path


def cells(page: Any, label: str) -> list[str]:
    """The row of the first table that begins with this label."""
    row = page.locator("tr", has=page.locator("td:first-child", has_text=label)).first
    return row.locator("td").all_inner_texts()[1:]


def test_the_plan_of_a_run_stands_beside_what_it_measured(page: Any, tmp_path: Path) -> None:
    run = write_run(tmp_path / "measured", small_log(5))
    planned(run / "recipe.toml")
    page.goto(pages.write([run], tmp_path / "page.html").as_uri() + "#compare")
    page.get_by_text("measured (planned)").wait_for()
    assert cells(page, "seconds per step") == ["10", "8 (-20.0 %)"]
    assert cells(page, "tokens trained per second") == ["100", "125 (+25.0 %)"]
    assert cells(page, "$ per million trained tokens") == ["$11.00", "$8.00 (-27.3 %)"]
    assert cells(page, "workers, mean") == ["3", "3 (+0.0 %)"]
    assert cells(page, "workers lost") == ["1", ""]  # a plan does not say


def test_the_bound_on_staleness_is_shown_only_if_it_is_known(page: Any, tmp_path: Path) -> None:
    older = [*small_log(4), step(53, 5, staleness_mean=1.9, staleness_max=2)]
    newer = [*older[:-1], {**older[-1], "staleness_bound": 3}]
    for name, log, shown in (("older", older, "largest: 2"), ("newer", newer, "largest: 2; bound: 3")):
        (tmp_path / name).mkdir()
        page.goto(written(tmp_path / name, log))
        page.get_by_text(shown, exact=True).wait_for()


def test_legends_have_small_numbers_and_the_last_evaluation(page: Any, tmp_path: Path) -> None:
    log = small_log(5)
    log.insert(10, event(20, "scalar", "eval", step=1, reward=0.4375, graded=3, responses=4))
    page.goto(written(tmp_path, log) + "#learning")
    gap = page.locator("figure", has_text="log-prob disagreement")
    assert "1.0e-6" in gap.locator(".u-legend").inner_text()
    legend = page.locator("figure", has_text="held-out").locator(".u-legend").inner_text()
    assert "0.438 (3 of 4 responses graded)" in legend


def test_words_in_tables_are_whole_on_a_phone(page: Any, tmp_path: Path) -> None:
    advice = event(40, "instant", "advice", lease="spot cpu at $0.30/h", now=2, count=1, why="training limits",
                   tokens_per_usd_now=1e6, tokens_per_usd_best=2e6)  # fmt: skip
    page.set_viewport_size({"width": 360, "height": 700})
    page.goto(written(tmp_path, [*small_log(), advice]))
    for tab in "146":
        page.keyboard.press(tab)
        page.locator("td").first.wait_for()
        tall = page.locator("tr").evaluate_all("rows => rows.map(r => r.offsetHeight).filter(height => height > 130)")
        assert tall == []
        assert page.evaluate("document.documentElement.scrollWidth") <= 360


def test_tabs_stay_where_they_are(page: Any, served: Served) -> None:
    page.goto(served.url)
    page.get_by_text("5 / 100").wait_for()
    places = set()
    for n in range(1, 7):
        page.keyboard.press(str(n))
        page.wait_for_timeout(100)
        places.add(tuple(page.locator("nav button").evaluate_all("tabs => tabs.map(t => t.offsetLeft)")))
    assert len(places) == 1


def test_new_responses_join_the_list_and_the_open_one_stays_open(page: Any, served: Served, tmp_path: Path) -> None:
    page.goto(served.url + "#responses")
    page.locator(".token").first.wait_for()
    with (tmp_path / "case" / "samples.jsonl").open("a") as file:
        file.write(json.dumps(sample(6)) + "\n")
    append(tmp_path / "case", step(70, 6))
    page.locator(".item").nth(1).wait_for(timeout=8000)
    chosen = page.locator(".item[aria-selected=true]")
    assert "step 1" in chosen.inner_text()
    page.keyboard.press("k")
    page.locator(".item[aria-selected=true]", has_text="step 6").wait_for()
    page.get_by_text("response 6/0").wait_for()


def test_a_run_without_events_says_so(page: Any, tmp_path: Path) -> None:
    page.goto(written(tmp_path, []))
    for n in range(1, 7):
        page.keyboard.press(str(n))
        page.wait_for_timeout(100)
    page.keyboard.press("1")
    page.get_by_text("This log has no events yet.").wait_for()


def test_a_log_with_foreign_lines_and_odd_events_opens(page: Any, tmp_path: Path) -> None:
    run = write_run(tmp_path / "case", small_log(5))
    with (run / "events.jsonl").open("ab") as file:
        file.write(b'\xff\xfe\x00 not json\n{"t": 1}\n[]\n')
        for odd in ({"worker": None}, {"worker": {"a": 1}}):
            line = json.dumps({"t": START_T + 60, "m": 60.0, "kind": "instant", "name": "worker_joined", **odd})
            file.write(line.encode() + b"\n")
        file.write(b'{"t": 179')
    page.goto(pages.write([run], tmp_path / "page.html").as_uri())
    page.get_by_text("5 events in the log have fields").wait_for()
    page.get_by_text("5 / 100").wait_for()
