"""Logs that windfall did not write as they are: damaged, edited, of other versions, or with clocks that were set."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.support.hostile.events import HOSTILE_VALUES, damaged
from tests.support.runs.page_run import START_T, event, small_log, step, write_run
from windfall.errors import WindfallError
from windfall.events.log import parse
from windfall.page import command as page
from windfall.page.history import RunHistory
from windfall.page.runs import RunReader, read_all
from windfall.page.timeline import STATES

ODD: list[Any] = [*HOSTILE_VALUES, {"holders": 3}, {"holders": {"a": None}}]


def every_kind() -> list[dict[str, Any]]:
    """One event of every kind that the page reads."""
    found = {(e["name"], e["kind"]): e for e in small_log(2)}
    more = [
        event(30, "instant", "worker_suspect", worker="w1", s=4.0),
        event(31, "instant", "worker_well", worker="w1"),
        event(32, "instant", "worker_warned", worker="w1", s=30.0),
        event(33, "instant", "worker_left", worker="w1"),
        event(34, "scalar", "eval", step=2, reward=0.5),
        event(34, "span", "eval", step=2, s=1.0),
        event(35, "span", "checkpoint", step=2, s=1.0),
        event(36, "instant", "advice", lease="spot", now=2, count=1, why="they wait"),
        event(37, "instant", "trainer_lost", step=2, why="killed"),
        event(38, "instant", "resumed", step=1),
        event(39, "instant", "end", step=2, finished=True),
        event(39, "instant", "activity", rows={"w2": [[1, "waiting"]]}, moves=[]),
    ]
    return [*found.values(), *more]


@pytest.mark.parametrize("kind", every_kind(), ids=lambda e: f"{e['kind']}-{e['name']}")
def test_the_page_opens_whatever_the_fields_of_an_event_are(kind: dict[str, Any]) -> None:
    for key in kind:
        history = RunHistory()
        for e in small_log(1):
            history.add(e)
        for value in (*ODD, ...):
            changed = {k: v for k, v in kind.items() if k != key} if value is ... else {**kind, key: value}
            if (read := parse(json.dumps(changed).encode())) is not None:
                history.add(read)
                msgspec.json.encode(history.changes())
        history.add(step(60, 7))
        assert json.loads(msgspec.json.encode(history.full()))["step"] == 7, key


def test_the_page_opens_whatever_is_inside_the_fields_of_an_event() -> None:
    """With values of other types also deep inside a bill or a list."""
    for whole in every_kind():
        for changed in damaged(whole):
            if (read := parse(json.dumps(changed).encode())) is not None:
                history = RunHistory()
                history.add(whole)
                history.add(read)
                history.add(step(60, 7))
                described = json.loads(msgspec.json.encode(history.full()))
                assert described["step"] == 7, changed


@pytest.mark.parametrize("seconds", ["NaN", "inf", "2.0", [], 10**30])
def test_event_with_a_damaged_number_is_left_out_and_counted(tmp_path: Path, seconds: Any) -> None:
    log = small_log(3)
    log.insert(8, event(13, "span", "train", step=1, s=seconds, early_s=0.0))
    expected = RunReader(write_run(tmp_path / "expected", small_log(3))).describe()["history"]
    run = write_run(tmp_path / "run", log)
    found = RunReader(run).describe()["history"]
    assert found.pop("unreadable") == 1
    assert found == {key: value for key, value in expected.items() if key != "unreadable"}
    page.write([run], tmp_path / "page.html")
    assert "NaN" not in (tmp_path / "page.html").read_text().partition('"history"')[2]


def test_unreadable_events_are_counted(tmp_path: Path) -> None:
    log = small_log(3)
    log.insert(5, event(3, "instant", "worker_joined", lease="spot"))
    reader = RunReader(write_run(tmp_path / "run", log))
    assert reader.history.step == 3
    assert reader.describe()["history"]["unreadable"] == 1


@pytest.mark.parametrize("jump_s", [-7200.0, 3600.0 * 24 * 365])
def test_a_wall_clock_that_is_set_changes_nothing(jump_s: float) -> None:
    """The machine's clock is set in the middle of the run. The monotonic clock goes on."""
    log = small_log(8)
    expected, history = RunHistory(), RunHistory()
    for e in log:
        expected.add(e)
        history.add({**e, "t": e["t"] + jump_s} if e["m"] >= 43 else e)
    assert history.policies[""].columns["t"] == pytest.approx(expected.policies[""].columns["t"], abs=0.02)
    for name, row in expected.timeline.rows.items():
        assert list(history.timeline.rows[name].changes) == list(row.changes), name
    assert history.full()["end_s"] == pytest.approx(expected.full()["end_s"], abs=0.02)
    assert history.shift_s == pytest.approx(-jump_s)


def test_a_run_that_was_resumed_on_another_machine_goes_on_after_its_end() -> None:
    """Its monotonic clock begins anew, and its wall clock may be behind."""
    log = small_log(5)
    later = [event(t, "scalar", "step", step=n) for n, t in ((6, 0.0), (7, 10.0))]
    for e, wall in zip(later, (-30.0, -20.0), strict=True):
        e["t"], e["m"] = START_T + wall, e["m"] + 1e6
    history = RunHistory()
    for e in [*log, *later]:
        history.add(e)
    assert history.policies[""].columns["t"][-2:] == pytest.approx([54.0, 64.0])
    rows = history.timeline.rows["w1"]
    assert STATES[rows.changes[-1] & 15] == "waiting"  # nothing of it was removed


def test_nothing_works_between_a_kill_and_a_resume() -> None:
    """The controller was killed at 53 s. The run was resumed an hour later, and one worker came before the trainer."""
    history = RunHistory()
    for e in [
        *small_log(5)[:-1],
        event(3600, "instant", "recipe", changed={}),
        event(3610, "instant", "worker_joined", worker="w1#2", lease="spot", device="cpu", age_s=2.0),
        event(3620, "instant", "resumed", step=3),
        event(3620, "instant", "trainer_ready", step=3, pid=2),
    ]:
        history.add(e)
    rows = {n: [((c >> 4) / 10, STATES[c & 15]) for c in row.changes] for n, row in history.timeline.rows.items()}
    assert rows["w0"][-2:] == [(7.0, "waiting"), (53.0, "absent")]
    assert rows["w1"][-2:] == [(53.0, "absent"), (3608.0, "booting")]
    assert rows["trainer"][-2:] == [(53.0, "absent"), (3620.0, "waiting")]


def test_workers_go_on_while_only_the_trainer_is_away() -> None:
    history = RunHistory()
    for e in [
        *small_log(5)[:-1],
        event(54, "instant", "trainer_lost", step=5, why="killed"),
        event(60, "instant", "resumed", step=5),
        event(60, "instant", "trainer_ready", step=5, pid=2),
    ]:
        history.add(e)
    assert [STATES[history.timeline.rows[f"w{n}"].state] for n in range(3)] == ["waiting"] * 3
    assert STATES[history.timeline.rows["trainer"].state] == "waiting"


@pytest.mark.parametrize("fleet", ["[]", "{", '{"workers": 5}', '{"workers": [5]}'])
def test_a_damaged_snapshot_is_left_out(tmp_path: Path, fleet: str) -> None:
    run = write_run(tmp_path / "run", small_log(2))
    (run / "fleet.json").write_text(fleet)
    assert RunReader(run).describe()["snapshot"] is None


def test_a_log_without_events_is_an_empty_page(tmp_path: Path) -> None:
    described = RunReader(write_run(tmp_path / "run", [])).describe()
    assert (described["history"]["number"], described["history"]["start_t"]) == (0, None)


def test_a_folder_without_a_log_is_refused(tmp_path: Path) -> None:
    with pytest.raises(WindfallError, match="no such run"):
        read_all([tmp_path / "nothing"])
    with pytest.raises(WindfallError, match="no event log"):
        read_all([tmp_path])
