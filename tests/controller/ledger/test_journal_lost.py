"""The loss in a damaged journal is counted, and nothing after the damage is used."""

from __future__ import annotations

from array import array
from pathlib import Path
from typing import Any

import pytest

from tests.support.hostile.checkpoints import JOURNALS, add_strays, flip
from windfall.controller.ledger import journal_reader
from windfall.controller.ledger.journal import Journal
from windfall.controller.ledger.journal_format import read_records
from windfall.controller.ledger.journal_reader import JournalContents, count_tokens
from windfall.controller.ledger.recovery import Recovery
from windfall.events.log import EventLog, read
from windfall.link.messages import Tokens

RESPONSES, ROUNDS = 6, 40


def frame(*rows: tuple[int, int]) -> Tokens:
    """One token for each (handle, position)."""
    flat = array("I", [7] * len(rows)).tobytes()
    logprobs = array("f", [-0.5] * len(rows)).tobytes()
    handles, positions = tuple(h for h, _ in rows), tuple(p for _, p in rows)
    return Tokens(
        version=1, handles=handles, positions=positions, counts=(), tokens=flat, logprobs=logprobs, finished={}
    )


def write(folder: Path, step: int = 10, first_task: int = 50) -> Path:
    """Write two tasks, starting at `first_task`, with RESPONSES responses each, of ROUNDS tokens each."""
    journal = Journal(folder, "s")
    journal.open(step)
    for task in range(2):
        handles = {RESPONSES * task + n + 1: f"{first_task + task}/{n}" for n in range(RESPONSES)}
        journal.write_assigned(handles)
        for position in range(ROUNDS):
            journal.write_tokens(frame(*((h, position) for h in handles)))
        for id in handles.values():
            journal.write_grade(id, 1.0, None, "")
    journal.close()
    return folder / f"{step:06d}.wal"


def expected(file: Path, *steps: int) -> Recovery:
    """A Recovery that has seen these steps in the event log. Each step drew one task."""
    out = Recovery(EventLog(file.parent.with_suffix(".jsonl")))
    out.observe({"kind": "instant", "name": "journal", "file": file.name})
    for step in steps:
        out.observe({"kind": "scalar", "name": "step", "step": step, "lengths": [[ROUNDS] * RESPONSES]})
    return out


def tokens(found: JournalContents) -> int:
    return sum(count_tokens(found.history).values())


def lost(folder: Path, log: Recovery, step: int = 10, next_task: int = 50) -> dict[str, Any] | None:
    return log.lost(Journal(folder, "s").read(step), step=step, next_task=next_task)


def test_intact_journal_has_no_loss(tmp_path: Path) -> None:
    path = write(tmp_path)
    assert lost(tmp_path, expected(path, 11, 12)) is None
    assert lost(tmp_path, expected(path, 11)) is None, "the journal has more than the log"


@pytest.mark.parametrize("kind", list(JOURNALS))
def test_loss_of_completed_steps_is_known_exactly(tmp_path: Path, kind: str) -> None:
    path = write(tmp_path)
    JOURNALS[kind](path)
    found = Journal(tmp_path, "s").read(10)
    event = expected(path, 11, 12).lost(found, step=10, next_task=50)
    assert event is not None
    assert event["file"] == path.name
    assert event["tokens"] + tokens(found) == 2 * RESPONSES * ROUNDS
    have = count_tokens(found.history)
    assert event["responses"] == sum(have.get(f"{t}/{n}", 0) < ROUNDS for t in (50, 51) for n in range(RESPONSES))
    if path.is_dir():
        path.rmdir()
    journal = Journal(tmp_path, "s")
    assert journal.open(10) == journal.read(10).history, "the run can continue with it"
    journal.close()


def test_damage_in_the_step_under_way_is_reported_in_bytes(tmp_path: Path) -> None:
    """The log has nothing to compare the step under way with."""
    path = write(tmp_path)
    ends = [end for end, _ in read_records(path)]
    at = ends[len(ends) // 2]
    flip(path, (at + 20) / path.stat().st_size)
    event = lost(tmp_path, expected(path))
    assert event is not None
    assert event["why"] == f"it is damaged at byte {at:,} of {path.stat().st_size:,}"
    assert event["bytes"] == path.stat().st_size - at
    assert (event["responses"], event["tokens"]) == (0, 0)


def test_damaged_length_of_a_record_is_not_taken_for_a_torn_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The length leads beyond the end of the file, but more follows than one write can leave."""
    monkeypatch.setattr(journal_reader, "MAX_TORN_BYTES", 1000)
    path = write(tmp_path)
    flip(path, 2 / path.stat().st_size)
    event = lost(tmp_path, expected(path))
    assert event is not None
    assert event["bytes"] == path.stat().st_size


def test_record_torn_by_a_kill_is_no_loss(tmp_path: Path) -> None:
    path = write(tmp_path)
    whole = path.read_bytes()
    last = [end for end, _ in read_records(path)][-2]
    for end in range(last, len(whole)):
        path.write_bytes(whole[:end])
        assert lost(tmp_path, expected(path)) is None


def test_files_after_a_damaged_one_are_not_used(tmp_path: Path) -> None:
    """They were generated by weights that depend on the lost part."""
    first, second = write(tmp_path), tmp_path / "000020.wal"
    journal = Journal(tmp_path / "other", "s")
    journal.open(20)
    journal.write_assigned({1: "90/0"})
    journal.write_tokens(frame((1, 0)))
    journal.close()
    (tmp_path / "other" / "000020.wal").rename(second)
    (tmp_path / "other").rmdir()
    flip(first, 0.5)
    found = Journal(tmp_path, "s").read(10)
    assert "90/0" not in found.history
    assert found.damage is not None
    assert found.damage.bytes > second.stat().st_size
    journal = Journal(tmp_path, "s")
    journal.open(10, found)
    journal.close()
    assert [p.name for p in tmp_path.iterdir()] == [first.name]


def test_run_that_falls_back_to_before_its_journal_generates_again(tmp_path: Path) -> None:
    """The checkpoint of step 10 is damaged, that of step 0 is intact; the journal began at step 10."""
    path = write(tmp_path)
    event = lost(tmp_path, expected(path, 11, 12), step=0, next_task=0)
    assert event is not None
    assert (event["file"], event["bytes"]) == ("000000.wal", path.stat().st_size)
    journal = Journal(tmp_path, "s")
    assert journal.open(0) == {}
    journal.close()
    assert [p.name for p in tmp_path.iterdir()] == ["000000.wal"], "nothing of it can be read later"


def test_journal_of_another_recipe_is_reported_once(tmp_path: Path) -> None:
    path = write(tmp_path)
    event = expected(path).lost(Journal(tmp_path, "other").read(10), step=10, next_task=50)
    assert event is not None
    assert (event["why"], event["bytes"]) == ("it was written with another recipe", path.stat().st_size)
    journal = Journal(tmp_path, "other")
    journal.open(10)
    journal.close()
    assert expected(path).lost(Journal(tmp_path, "other").read(10), step=10, next_task=50) is None


def test_strays_are_left_alone(tmp_path: Path) -> None:
    path = write(tmp_path)
    strays = add_strays(tmp_path)
    found = Journal(tmp_path, "s").read(10)
    assert tokens(found) == 2 * RESPONSES * ROUNDS
    journal = Journal(tmp_path, "s")
    journal.open(10)
    journal.rotate(20, {})
    journal.close()
    assert {p.name for p in tmp_path.iterdir()} == strays | {"000020.wal"}
    assert not path.exists()


def test_journal_is_kept_until_its_steps_are_trained_again(tmp_path: Path) -> None:
    """After a fall back from step 12 to 10, a checkpoint of step 11 must not drop the responses of step 12."""
    log = expected(write(tmp_path), 11, 12)
    assert not log.saved(11)
    assert log.saved(12)


def test_each_damaged_checkpoint_is_reported_once(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "events.jsonl")
    recovery = Recovery(log)
    log.attach(recovery.observe)
    for pid, what in ((1, "step 4 is cut"), (2, "step 4 is cut"), (1, "step 2 is cut"), (1, "step 2 is cut")):
        recovery.report_checkpoints(2, {"pid": pid, "checkpoint_damaged": what})
    log.close()
    assert [e["what"] for e in read(log.path)] == ["step 4 is cut", "step 2 is cut"]
