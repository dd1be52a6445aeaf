from __future__ import annotations

import json
from array import array
from base64 import b64decode
from pathlib import Path
from typing import Any

import pytest

from tests.support.runs.page_run import START_T, event, small_log, step, write_long_run, write_run
from windfall.controller.cost.accounts import Accounts
from windfall.page import policy_series, timeline
from windfall.page.history import RunHistory
from windfall.page.runs import RunReader
from windfall.page.timeline import CODE, STATES, Timeline, TimelineRow


def built(events: list[dict[str, Any]]) -> RunHistory:
    history = RunHistory()
    for e in events:
        history.add(e)
    return history


def states(row: TimelineRow) -> list[tuple[float, str]]:
    return [((c >> 4) / 10, STATES[c & 15]) for c in row.changes]


def test_a_worker_s_life_becomes_a_row() -> None:
    history = built(small_log())
    rows = history.timeline.rows
    assert states(rows["w1"]) == [(0.5, "booting"), (2.0, "generating"), (7.0, "waiting")]
    assert states(rows["w0"])[-2:] == [(53.9, "lost"), (54.0, "absent")]
    assert states(rows["trainer"])[:3] == [(0.0, "waiting"), (11.0, "training"), (13.0, "waiting")]
    assert list(history.moves) == [(10, "w0", "w1", 5)]


def test_a_machine_that_comes_back_continues_its_row() -> None:
    events = small_log()
    events.append(event(60, "instant", "worker_joined", worker="w0#2", lease="spot", device="cpu", age_s=2.0))
    events.append(event(70, "instant", "worker_lost", worker="w0", why="late", moved=0, kept_tokens=0, s=1.0))
    assert states(built(events).timeline.rows["w0"])[-1] == (58.0, "booting")


def test_series_money_and_staleness_add_up() -> None:
    history = built([*small_log(4), step(60, 5, staleness_mean=0.5, staleness_max=1, staleness_counts=[3, 3])])
    money = history.money()
    assert history.policies[""].columns["step"] == [1, 2, 3, 4, 5]
    assert history.policies[""].columns["length"] == [40] * 5
    assert money["usd"] == pytest.approx(5 * 0.011)
    assert money["usd_per_million"] == pytest.approx(5 * 0.011 / 5000 * 1e6)
    assert history.full()["policies"][""]["staleness"] == [3, 3]


def test_what_drafts_predictions_and_gathering_brought_is_said() -> None:
    history = built(small_log(4))
    assert history.full()["notes"] == [
        "drafts: 1.42 tokens per step, 38% of 1,000 accepted, 1.21x as fast as without",
        "lengths: predicted within a factor of 1.35 (by the mean of the run: 1.65); correlation within groups 0.70",
    ]
    saved = "saved about 6.0 s and $0.04 (8 moves), and released 4 workers for 12.0 s"
    assert history.money()["gathering"] == f"moving the last responses of steps together {saved}"
    history.add(step(60, 5, drafted=0, predicted=None))
    assert history.full()["notes"] == []


def test_bill_of_an_older_version_has_no_gathering() -> None:
    history = built([step(10, 1, bill={"holders": {}})])
    assert history.money()["gathering"] == ""


def test_evaluations_say_how_many_responses_were_graded() -> None:
    new = event(30, "scalar", "eval", step=2, reward=0.5, graded=3, responses=4)
    old = event(20, "scalar", "eval", step=1, reward=0.25)  # of a version that does not count them
    assert list(built([*small_log(), old, new]).policies[""].evals) == [(1, 20, 0.25, None, None), (2, 30, 0.5, 3, 4)]


def test_a_resume_removes_void_steps_and_keeps_their_cost() -> None:
    history = built([*small_log(5), event(80, "instant", "resumed", step=3), step(95, 4, reward=0.9)])
    assert history.policies[""].columns["step"] == [1, 2, 3, 4]
    assert history.policies[""].columns["reward"][-1] == 0.9
    assert history.money()["usd"] == pytest.approx(6 * 0.011)
    assert all(row.state == 0 for row in history.timeline.rows.values() if row.name != "trainer")


def test_points_are_merged_when_there_are_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(policy_series, "MAX_POINTS", 8)
    history = built([step(10 * n, n, reward=n % 2) for n in range(1, 101)])
    series = history.policies[""].columns
    assert len(series["step"]) <= 16
    assert history.policies[""].stride == 8
    assert series["step"][-1] == 100
    assert sum(x or 0 for x in series["trained"]) == 100_000
    assert all(x == pytest.approx(0.5) for x in series["reward"][:-1])


@pytest.mark.parametrize("policies", [("",), ("solver", "verifier")])
def test_changes_give_a_viewer_the_same_as_everything(policies: tuple[str, ...]) -> None:
    """A viewer that applies changes sees what a viewer who has just come sees."""
    before, later = small_log(30), [step(400 + n, n) for n in range(26, 40)]
    events = [*before, event(400, "instant", "resumed", step=25), *later]
    if policies[0]:  # every event of a policy, first of one, then of the other; one falls back
        names = ("step", "resumed", "train", "trainer_ready")
        of = [[{**e, "policy": p} for p in policies] if e["name"] in names else [e] for e in before + later]
        events = [e for found in of for e in found]
        events.insert(len(before) + 20, event(400, "instant", "resumed", step=25, policy=policies[1]))
    history = built(events[:20])
    history.forget_changes()
    view = history.full()
    series = {p: {k: list(v) for k, v in of.items() if k != "from"} for p, of in view["series"].items()}
    rows = {r["name"]: array("I", b64decode(r["data"])) for r in view["rows"]}
    for e in events[20:]:
        history.add(e)
        changes = history.changes()
        for policy, changed in changes.get("series", {}).items():
            shown = series.setdefault(policy, {})
            for name in policy_series.SERIES:
                shown[name] = shown.get(name, [])[: changed["from"]] + changed[name]
        for r in changes.get("rows", ()):
            rows[r["name"]] = rows.get(r["name"], array("I"))[: r["from"]] + array("I", b64decode(r["data"]))
    assert series == {p: history.policies[p].columns for p in policies}
    assert rows == {name: row.changes for name, row in history.timeline.rows.items()}


def test_a_row_stays_small_and_keeps_every_loss() -> None:
    row = TimelineRow("w")
    for n in range(40_000):
        row.put(20 * n, CODE["lost"] if n % 4000 == 0 else CODE["generating"] if n % 2 else CODE["waiting"])
    assert len(row.changes) <= timeline.MAX_CHANGES
    assert sum(c & 15 == CODE["lost"] for c in row.changes) == 10
    assert list(row.changes) == sorted(row.changes)


def test_there_are_at_most_so_many_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timeline, "MAX_ROWS", 10)
    rows = Timeline()
    for n in range(50):
        rows.row(f"w-{n}").put(n, CODE["generating"])
        rows.row(f"w-{n}").put(n + 1, 0)
    assert len(rows.rows) == 10
    assert "w-49" in rows.rows
    assert rows.dropped == 40


def test_memory_does_not_grow_with_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(policy_series, "MAX_POINTS", 64)
    monkeypatch.setattr(timeline, "MAX_CHANGES", 256)
    monkeypatch.setattr(timeline, "MAX_ROWS", 8)
    history, sizes = RunHistory(), []
    for n in range(1, 4001):
        rows = {f"w-{n % 7 + n // 500}": [[9, "generating"], [4, "waiting"]]}
        history.add(event(10 * n, "instant", "activity", rows=rows, moves=[]))
        history.add(step(10 * n, n))
        if n % 1000 == 0:
            sizes.append(len(json.dumps(history.full())))
    assert max(sizes) < 2 * min(sizes)


@pytest.mark.parametrize("text", ["\ud800 half", "</script><script>alert(1)</script>", "\u202e\u0000", "x" * 10**6])
def test_hostile_text_is_clipped_and_encodable(text: str) -> None:
    import msgspec

    history = built(small_log(why=text))
    encoded = msgspec.json.encode(history.full())
    assert len(encoded) < 100_000
    assert json.loads(encoded)["problems"][-1]["name"] == "worker_lost"


def test_a_log_that_is_still_written_is_followed(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", small_log(2))
    reader = RunReader(run)
    assert reader.history.step == 2
    assert reader.status == "killed"
    with (run / "events.jsonl").open("a") as file:
        line = json.dumps(step(50, 3))
        file.write(line[:40])
        file.flush()
        assert not reader.read_new()
        file.write(line[40:] + "\n" + json.dumps(event(51, "instant", "end", step=3, finished=True)) + "\n")
    assert reader.read_new()
    assert (reader.history.step, reader.status) == (3, "finished")


def test_accounts_tell_what_workers_do() -> None:
    accounts = Accounts()
    activity = accounts.activity
    accounts.join(10, "w", kind="spot", usd_per_h=1.0, name="w", started_s=8)
    accounts.ready(12, "w")
    accounts.busy(13, "w")
    for t in range(14, 20):
        accounts.frame(t, "w", tokens=1)
    accounts.gone(22, "w", heard_s=19)
    rows = activity.drain(22)["rows"]
    assert rows == {"w": [[14, "booting"], [10, "waiting"], [9, "generating"], [3, "lost"], [0, ""]]}


def test_a_day_of_many_workers_is_small(tmp_path: Path) -> None:
    history = RunReader(write_long_run(tmp_path / "run", workers=10, hours=2)).history
    encoded = json.dumps(history.full())
    assert len(history.timeline.rows) == 11
    assert len(encoded) < 11 * 4 * 4 * 2 * 60 + 300_000
    assert history.full()["start_t"] == START_T


def of_policies(*names: str) -> list[dict[str, Any]]:
    """The small log with steps of several policies that share a trainer."""
    events = [{**e, "bases": {names[0]: names}} if e["name"] == "start" else e for e in small_log(3)]
    mine = ("step", "train", "trainer_ready")
    return [new for e in events for new in ([{**e, "policy": p} for p in names] if e["name"] in mine else [e])]


def test_every_policy_has_its_series_its_row_and_its_dollars() -> None:
    events = of_policies("solver", "verifier")
    events.append(event(40, "scalar", "eval", policy="verifier", step=3, reward=0.5))
    history = built(events)
    assert list(history.policies) == ["solver", "verifier"]
    assert [p.columns["step"] for p in history.policies.values()] == [[1, 2, 3]] * 2
    assert [len(p.evals) for p in history.policies.values()] == [0, 1]
    assert {"trainer solver", "trainer verifier"} < set(history.timeline.rows)
    money = history.money()
    assert sum(money["policies"].values()) == pytest.approx(money["usd"])
    columns = [p.columns["usd"] for p in history.policies.values()]
    assert sum(x or 0.0 for column in columns for x in column) < money["usd"], "the last bill is shared by both"


@pytest.mark.parametrize("lost", [False, True], ids=["controller", "trainer"])
def test_policies_continue_after_a_new_controller_and_a_new_trainer(lost: bool) -> None:
    events = of_policies("solver", "verifier")
    if lost:
        events.append(event(50, "instant", "trainer_lost", policy="verifier", step=3, why="killed"))
    resumed = ("verifier",) if lost else ("solver", "verifier")
    for n, policy in enumerate(resumed):
        events.append(event(60 + n, "instant", "resumed", policy=policy, step=2))
        events.append(event(60 + n, "instant", "trainer_ready", policy=policy, step=2, pid=2))
    history = built(events)
    assert [p.columns["step"][-1] for p in history.policies.values()] == [3 if lost else 2, 2]
    rows = history.timeline.rows
    assert (STATES[rows["w1"].state] == "absent") is not lost, (
        "workers go on without a trainer, and not without a controller"
    )
    assert all(STATES[rows[f"trainer {p}"].state] == "waiting" for p in ("solver", "verifier"))
