"""The event log: what was written is read back, whatever happened in between, and no reader can end a run."""

from __future__ import annotations

import errno
import io
import json
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.hostile.files import FOREIGN_LINES
from windfall.errors import WindfallError
from windfall.events.log import Event, EventLog, last, read, scan
from windfall.events.sinks import make_sinks


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "deeper" / "events.jsonl"


def written(path: Path, **fields: Any) -> Event:
    log = EventLog(path)
    log.instant("x", **fields)
    log.close()
    return read(path)[-1]


def names(path: Path) -> list[tuple[str, int | None]]:
    return [(e["name"], e.get("step")) for e in read(path)]


def test_events_are_readable_at_once(path: Path) -> None:
    log = EventLog(path)
    log.scalar("step", step=3, reward=0.5)
    with log.span("rollout", step=4) as span:
        span["tokens"] = 7
    log.instant("checkpoint", path="a/ü\n")
    first, second, third = read(path)  # before it is closed: a concurrent reader sees every event
    assert (first["kind"], first["name"], first["step"], first["reward"]) == ("scalar", "step", 3, 0.5)
    assert (second["kind"], second["tokens"]) == ("span", 7)
    assert third["path"] == "a/ü\n"
    assert first["t"] <= second["t"] <= third["t"]
    assert first["m"] <= second["m"] - second["s"] <= second["m"] <= third["m"]
    log.close()


def test_span_is_written_and_its_error_is_raised(path: Path) -> None:
    log = EventLog(path)
    with pytest.raises(KeyboardInterrupt), log.span("train", step=1):
        raise KeyboardInterrupt
    log.close()
    (event,) = read(path)
    assert event["error"] == "KeyboardInterrupt"
    assert event["s"] >= 0


@pytest.mark.parametrize("torn", ['{"t":1.0,"m":2.0,"ki', "{", '{"t":1.0,"name":"\xc3', "\0\0\0"])
def test_truncated_line_loses_only_itself(path: Path, torn: str) -> None:
    written(path, step=1)
    with path.open("ab") as file:
        file.write(torn.encode("latin-1"))
    assert names(path) == [("x", 1)]
    written(path, step=2)
    written(path, step=3)
    assert names(path) == [("x", 1), ("x", 2), ("x", 3)]
    assert path.read_bytes().count(b"\n") == 4


@pytest.mark.parametrize("kind", FOREIGN_LINES)
def test_line_that_windfall_did_not_write_is_skipped(path: Path, kind: str) -> None:
    written(path, step=1)
    with path.open("ab") as file:
        file.write(b"\n" + FOREIGN_LINES[kind] + b"\n")
    written(path, step=2)
    assert [e["step"] for e in read(path)] == [1, 2]


def test_overlong_line_is_not_held_in_memory(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("windfall.events.log.MAX_LINE_BYTES", 1 << 16)
    written(path, step=1)
    with path.open("ab") as file:
        file.write(b"x" * (1 << 20) + b'{"a": 1}\n')
    written(path, step=2)
    assert [e["step"] for e in scan(path)] == [1, 2]


def test_last_event_is_found_before_lines_that_are_not_events(path: Path) -> None:
    assert last(path) is None
    written(path, step=1)
    written(path, step=2, text="x" * 5000)
    with path.open("ab") as file:
        file.write(b"[1]\n\xff\xff\n" + b'{"t":1.0,')
    event = last(path)
    assert event is not None
    assert event["step"] == 2


def test_long_log_is_scanned_one_line_at_a_time(path: Path) -> None:
    written(path, step=1, lengths=[list(range(1000, 3000))])
    path.write_bytes(60 * path.read_bytes())
    assert path.stat().st_size > 600_000
    tracemalloc.start()
    try:
        assert sum(1 for _ in scan(path)) == 60
        scanned = tracemalloc.get_traced_memory()[1]
        tracemalloc.reset_peak()
        assert len(read(path, without=("lengths",))) == 60
        small = tracemalloc.get_traced_memory()[1]
        tracemalloc.reset_peak()
        read(path)
        whole = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert max(scanned, small) < 400_000
    assert whole > 3_000_000


def test_complete_log_gets_no_empty_line(path: Path) -> None:
    written(path)
    written(path)
    assert len(path.read_text().splitlines()) == 2


def test_resume_makes_later_steps_void(path: Path) -> None:
    log = EventLog(path)
    log.instant("start", step=0)
    log.instant("load")
    for step in (1, 2, 3):
        log.scalar("step", step=step)
    log.instant("resumed", step=1)
    for step in (2, 3):
        log.scalar("step", step=step)
    log.instant("resumed", step=2)
    log.scalar("step", step=3)
    log.close()
    assert names(path) == [("start", 0), ("load", None), ("step", 1), ("resumed", 1), ("step", 2), ("resumed", 2),
                           ("step", 3)]  # fmt: skip


def test_resume_of_a_policy_leaves_the_steps_of_others(path: Path) -> None:
    log = EventLog(path)
    solver, verifier = log.bind(policy="solver"), log.bind(policy="verifier")
    for step in (1, 2):
        solver.scalar("step", step=step)
        verifier.scalar("step", step=step)
    solver.instant("resumed", step=1)
    with log.bind().span("checkpoint", step=2):
        pass
    steps = [(e["name"], e["step"], e.get("policy")) for e in read(path)]
    assert steps == [("step", 1, "solver"), ("step", 1, "verifier"), ("step", 2, "verifier"),
                     ("resumed", 1, "solver"), ("checkpoint", 2, None)]  # fmt: skip


def test_bill_of_a_void_step_is_kept(path: Path) -> None:
    log = EventLog(path)
    log.scalar("step", step=1, bill={"holders": {}}, trained=5)
    log.scalar("step", step=2, bill={"holders": {"spot": {"tokens": 7}}}, trained=5)
    log.instant("resumed", step=1)
    assert names(path) == [("step", 1), ("void", None), ("resumed", 1)]
    assert read(path)[1]["bill"] == {"holders": {"spot": {"tokens": 7}}}
    assert "trained" not in read(path)[1]


def test_failing_sink_is_removed_and_the_others_continue(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tried: list[str] = []
    seen: list[Event] = []

    def broken(event: Event) -> None:
        tried.append(event["name"])
        raise ZeroDivisionError("no such view")

    log = EventLog(path, [broken])
    log.attach(seen.append)
    log.instant("a")
    log.instant("b")
    log.close()
    assert tried == ["a"]
    assert seen == read(path)
    assert [e["name"] for e in seen] == ["a", "sink_dropped", "b"]
    err = capsys.readouterr().err
    assert "broken" in err
    assert "ZeroDivisionError: no such view" in err


@pytest.mark.parametrize(
    ("value", "kept"),
    [
        (float("nan"), None),
        (float("-inf"), None),
        ([1.0, float("nan")], [1.0, None]),
        ({"a": (float("inf"), 2)}, {"a": [None, 2]}),
        (np.float32(0.5), 0.5),
        (np.float64("nan"), None),
        (np.float32("nan"), None),
        (np.int64(3), 3),
        (np.bool_(True), True),
        (True, True),
        (Path("a/b"), "a/b"),
        ({1: 2, (3, 4): 5}, {"1": 2, "(3, 4)": 5}),
        (ValueError("why"), "why"),
        ("\ud800 half a character", "\ud800 half a character"),
    ],
)
def test_every_value_becomes_json(path: Path, value: Any, kept: Any) -> None:
    event = written(path, v=value)
    assert event["v"] == kept
    assert type(event["v"]) is type(kept)
    assert "NaN" not in path.read_text()  # Python would read it, other JSON parsers would not
    assert "Infinity" not in path.read_text()


def test_sinks_get_the_same_events_as_the_file(path: Path) -> None:
    seen: list[Event] = []
    log = EventLog(path, [seen.append])
    log.scalar("step", reward=float("nan"), path=Path("x"))
    log.close()
    assert json.loads(path.read_text()) == seen[0]


def test_tensorboard_gets_every_number(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    (sink,) = make_sinks(folder=tmp_path, run="demo", tensorboard=True)
    log = EventLog(tmp_path / "events.jsonl", [sink])
    for step, reward in ((1, 0.25), (2, float("nan")), (3, 0.75)):
        log.scalar("step", step=step, reward=reward, text="word")
    stale = {"staleness_mean": 0.5, "staleness_max": 1, "too_old": 2, "capped": 0.1, "drift": 0.2}
    log.scalar("step", step=4, staleness_counts=[1, 1], **stale)
    with log.span("rollout", step=3, tokens=9):
        log.instant("checkpoint", step=3)
    log.close()
    sink.close()
    board = EventAccumulator(str(tmp_path / "tensorboard"))
    board.Reload()
    assert board.Tags()["scalars"] == ["step/reward", *(f"step/{name}" for name in stale)]
    assert [board.Scalars(f"step/{name}")[0].value for name in stale] == pytest.approx(list(stale.values()))
    assert [(s.step, s.value) for s in board.Scalars("step/reward")] == [(1, 0.25), (3, 0.75)]


class FullDisk(io.StringIO):
    """Accepts writes, but fails to flush them."""

    def flush(self) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")


def test_error_on_a_full_disk_names_the_file(path: Path) -> None:
    log = EventLog(path)
    reported: list[WindfallError] = []
    log.failed = reported.append
    log.instant("a")
    log._file.close()
    log._file = FullDisk()  # pyright: ignore
    with pytest.raises(WindfallError, match="No space left on device") as caught:
        log.instant("b")
    assert caught.value.where == str(path)
    assert reported == [caught.value]
    log.instant("c")  # the run is ending: a second failure is not raised
    log._file.close = FullDisk().flush
    log.close()
    assert [e["name"] for e in read(path)] == ["a"]


def test_error_on_creating_the_log_names_the_file(path: Path) -> None:
    path.parent.write_text("not a folder")
    with pytest.raises(WindfallError, match="cannot write the event log") as caught:
        EventLog(path)
    assert caught.value.where == str(path)
