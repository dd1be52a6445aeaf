"""What a damaged journal has lost is counted, and nothing behind the damage is believed."""

from __future__ import annotations

from array import array
from pathlib import Path
from typing import Any

import pytest
from hostile.checkpoints import JOURNALS, add_strays, flip

from windfall.events.log import EventLog, read
from windfall.ledger.journal import Journal
from windfall.ledger.journal_format import read_records
from windfall.ledger.journal_reader import JournalContents, count_tokens
from windfall.ledger.recovery import Recovery
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
    """Tasks from `first_task` on with RESPONSES responses each, of ROUNDS tokens each."""
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
    """As the event log has it: each step drew one task."""
    out = Recovery(EventLog(file.parent.with_suffix(".jsonl")))
    out.observe({"kind": "instant", "name": "journal", "file": file.name})
    for step in steps:
        out.observe({"kind": "scalar", "name": "step", "step": step, "lengths": [[ROUNDS] * RESPONSES]})
    return out


def tokens(found: JournalContents) -> int:
    return sum(count_tokens(found.history).values())


def lost(folder: Path, log: Recovery, step: int = 10, next_task: int = 50) -> dict[str, Any] | None:
    return log.lost(Journal(folder, "s").read(step), step=step, next_task=next_task)


def test_nothing_is_lost_of_a_whole_journal(tmp_path: Path) -> None:
    path = write(tmp_path)
    assert lost(tmp_path, expected(path, 11, 12)) is None
    assert lost(tmp_path, expected(path, 11)) is None, "and more is there than the log knows of"


@pytest.mark.parametrize("kind", list(JOURNALS))
def test_what_is_lost_of_completed_steps_is_known_exactly(tmp_path: Path, kind: str) -> None:
    path = write(tmp_path)
    JOURNALS[kind](path)
    found = Journal(tmp_path, "s").read(10)
    said = expected(path, 11, 12).lost(found, step=10, next_task=50)
    assert said is not None
    assert said["file"] == path.name
    assert said["tokens"] + tokens(found) == 2 * RESPONSES * ROUNDS
    have = count_tokens(found.history)
    assert said["responses"] == sum(have.get(f"{t}/{n}", 0) < ROUNDS for t in (50, 51) for n in range(RESPONSES))
    if path.is_dir():
        path.rmdir()
    journal = Journal(tmp_path, "s")
    assert journal.open(10) == journal.read(10).history, "and it can be gone on with"
    journal.close()


def test_without_the_log_what_can_still_be_read_is_counted(tmp_path: Path) -> None:
    """A damaged record in the middle of a step under way: the records behind it say what they were."""
    path = write(tmp_path)
    ends = [end for end, _ in read_records(path)]
    at = ends[len(ends) // 2]
    flip(path, (at + 20) / path.stat().st_size)
    said = lost(tmp_path, expected(path))
    assert said is not None
    assert said["why"] == f"it is damaged at byte {at:,} of {path.stat().st_size:,}"
    assert said["bytes"] == path.stat().st_size - at
    have = tokens(Journal(tmp_path, "s").read(10))
    # The damaged record itself had one token of each response at most.
    assert 0 <= 2 * RESPONSES * ROUNDS - have - said["tokens"] <= RESPONSES


def test_a_record_that_a_kill_tore_is_no_loss(tmp_path: Path) -> None:
    path = write(tmp_path)
    whole = path.read_bytes()
    last = [end for end, _ in read_records(path)][-2]
    for end in range(last, len(whole)):
        path.write_bytes(whole[:end])
        assert lost(tmp_path, expected(path)) is None


def test_files_behind_a_damaged_one_are_not_believed(tmp_path: Path) -> None:
    """They were made by weights that grew out of what is lost."""
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
    assert found.damage.tokens["90/0"] == 1
    journal = Journal(tmp_path, "s")
    journal.open(10, found)
    journal.close()
    assert [p.name for p in tmp_path.iterdir()] == [first.name]


def test_a_run_that_goes_back_behind_its_journal_generates_again(tmp_path: Path) -> None:
    """The checkpoint of step 10 is damaged, that of step 0 is whole: the journal began at step 10."""
    path = write(tmp_path)
    said = lost(tmp_path, expected(path, 11, 12), step=0, next_task=0)
    assert said is not None
    assert (said["file"], said["responses"], said["tokens"]) == ("000000.wal", 2 * RESPONSES, 2 * RESPONSES * ROUNDS)
    journal = Journal(tmp_path, "s")
    assert journal.open(0) == {}
    journal.close()
    assert [p.name for p in tmp_path.iterdir()] == ["000000.wal"], "nothing of it can come back later"


def test_a_journal_of_another_recipe_is_named(tmp_path: Path) -> None:
    path = write(tmp_path)
    said = expected(path).lost(Journal(tmp_path, "other").read(10), step=10, next_task=50)
    assert said is not None
    assert (said["why"], said["bytes"]) == ("it was written with another recipe", path.stat().st_size)
    journal = Journal(tmp_path, "other")
    journal.open(10)
    journal.close()
    assert expected(path).lost(Journal(tmp_path, "other").read(10), step=10, next_task=50) is None, "once"


def test_strays_are_skipped_and_named(tmp_path: Path) -> None:
    path = write(tmp_path)
    strays = add_strays(tmp_path)
    found = Journal(tmp_path, "s").read(10)
    assert set(found.strays) == strays
    assert tokens(found) == 2 * RESPONSES * ROUNDS
    journal = Journal(tmp_path, "s")
    journal.open(10)
    journal.rotate(20)
    journal.close()
    assert {p.name for p in tmp_path.iterdir()} == strays | {"000020.wal"}
    assert not path.exists()


def test_the_journal_stays_until_steps_are_done_again(tmp_path: Path) -> None:
    """After a fall back from step 12 to 10, a checkpoint of step 11 must not drop what is known of step 12."""
    log = expected(write(tmp_path), 11, 12)
    assert not log.saved(11)
    assert log.saved(12)


@pytest.mark.parametrize("lengths", [7, "long", {"1": 2}, [3], [["3"]], [[None]], [[[1]]]])
def test_lengths_of_another_shape_are_not_believed(tmp_path: Path, lengths: Any) -> None:
    path = write(tmp_path)
    log = expected(path)
    log.observe({"kind": "scalar", "name": "step", "step": 11, "lengths": lengths})
    assert lost(tmp_path, log) is None


@pytest.mark.parametrize("file", [7, None, "", "notes.wal", "x", ["000012.wal"]])
def test_journal_of_another_name_is_not_believed(tmp_path: Path, file: Any) -> None:
    path = write(tmp_path)
    log = expected(path)
    log.observe({"kind": "instant", "name": "journal", "file": file})
    assert lost(tmp_path, log) is None


def test_damaged_checkpoint_is_told_once_and_another_with_the_same_pid_too(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "events.jsonl")
    recovery = Recovery(log)
    for pid, what in ((1, "step 4 is cut"), (2, "step 4 is cut"), (1, "step 2 is cut"), (1, "step 2 is cut")):
        recovery.report_checkpoints(2, {"pid": pid, "checkpoint_damaged": what})
    log.close()
    assert [e["what"] for e in read(log.path)] == ["step 4 is cut", "step 2 is cut"]
