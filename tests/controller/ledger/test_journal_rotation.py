"""With a staleness bound above 0, responses are generated across checkpoints: every file can be read on its own, files
are kept as long as a step may need their tokens, and a step that is trained again gets the same tasks."""

from __future__ import annotations

from array import array
from pathlib import Path

import msgspec

from windfall.controller.ledger.journal import Journal
from windfall.controller.ledger.journal_format import TokenRun, encode_record, file_path, oldest_versions
from windfall.link.messages import Tokens


def frame(handle: int, position: int, tokens: list[int], version: int) -> Tokens:
    return Tokens(
        version=version, handles=(handle,), positions=(position,), counts=(len(tokens),),
        tokens=array("I", tokens).tobytes(), logprobs=array("f", [-1.0] * len(tokens)).tobytes(), finished={},
    )  # fmt: skip


def runs(journal: Journal, step: int) -> dict[str, list[tuple[int, list[int], int]]]:
    history = journal.read(step).history
    return {
        id: [(e.position, e.tokens.tolist(), e.version) for e in past if isinstance(e, TokenRun)]
        for id, past in history.items()
    }


def files(journal: Journal) -> list[str]:
    return sorted(path.stem.lstrip("0") or "0" for path in journal.folder.glob("*.wal"))


def test_response_that_runs_during_a_checkpoint_keeps_its_tokens(tmp_path: Path) -> None:
    journal = Journal(tmp_path, "s")
    journal.open(0)
    journal.write_assigned({1: "1/0", 2: "1/1"})
    journal.write_tokens(frame(1, 0, [4, 5], 0))
    journal.rotate(1, {1: "1/0", 2: "1/1"}, {}, next_task=2, lowest=1)
    journal.write_tokens(frame(1, 2, [6], 1))
    journal.write_tokens(frame(2, 0, [7], 1))
    journal.close()
    assert runs(journal, 1) == {"1/0": [(0, [4, 5], 0), (2, [6], 1)], "1/1": [(0, [7], 1)]}


def test_files_are_kept_as_long_as_a_checkpoint_needs_their_tasks(tmp_path: Path) -> None:
    journal = Journal(tmp_path, "s")
    journal.open(0)
    for step in range(1, 6):
        journal.write_assigned({step: f"{step}/0"})
        journal.write_tokens(frame(step, 0, [step + 4], step))
        journal.rotate(step, {step: f"{step}/0"}, {}, next_task=step + 1, lowest=max(0, step - 2))
        journal.write_tokens(frame(step, 1, [step + 5], step))
    journal.close()
    assert files(journal) == ["2", "3", "4", "5"], "the file of step 2 begins with the task 3"
    kept = runs(journal, 5)
    for step in range(3, 6):
        assert kept[f"{step}/0"] == [(0, [step + 4, step + 5], step)]
    journal.rotate(5, {}, {}, next_task=6, lowest=6)
    assert files(journal) == ["5"], "the same checkpoint, once nothing earlier is needed"


def test_a_policy_that_fell_behind_keeps_the_files_that_it_needs(tmp_path: Path) -> None:
    """Numbers are sums of steps: one policy goes on, the other still needs task 2."""
    journal = Journal(tmp_path, "s")
    journal.open(0)
    for number in range(1, 5):
        journal.rotate(number, {}, {}, next_task=10 * number, lowest=2)
    assert files(journal) == ["0", "1", "2", "3", "4"]
    journal.rotate(6, {}, {}, next_task=60, lowest=25)
    assert files(journal) == ["2", "3", "4", "6"]
    journal.close()


def test_trainer_that_is_ahead_of_its_checkpoint_may_still_fall_back(tmp_path: Path) -> None:
    """The controller is restarted while the trainer has step 11. Then the trainer is lost: it is back at step 8."""
    journal = Journal(tmp_path, "s")
    journal.open(0)
    journal.rotate(4, {}, {}, next_task=10, lowest=10)
    journal.write_assigned({1: "18/0"})
    journal.write_tokens(frame(1, 0, [4, 5], 6))
    journal.rotate(8, {1: "18/0"}, {}, next_task=20, lowest=18)
    journal.write_tokens(frame(1, 2, [6], 6))
    journal.close()
    again = Journal(tmp_path, "s")
    again.open(11, again.read(11, 30))
    again.close()
    assert files(again) == ["4", "8"]
    assert runs(again, 8) == {"18/0": [(0, [4, 5, 6], 6)]}


def test_staleness_0_keeps_one_file(tmp_path: Path) -> None:
    journal = Journal(tmp_path, "s")
    journal.open(0)
    for step in (1, 2, 3):
        journal.rotate(step, {}, {}, next_task=4 * step, lowest=4 * step)
    assert files(journal) == ["3"]


def test_files_of_earlier_versions_are_kept_until_a_newer_file_covers_them(tmp_path: Path) -> None:
    """They do not say with which task they begin."""
    for number in (4, 8):
        payload = msgspec.msgpack.encode([1, "s"])  # Started, before it had next_task
        file_path(tmp_path, number).write_bytes(encode_record(payload))
    journal = Journal(tmp_path, "s")
    assert journal.open(8) == {}
    assert files(journal) == ["4", "8"]
    journal.rotate(9, {}, {}, next_task=40, lowest=36)
    assert files(journal) == ["4", "8", "9"]
    journal.rotate(10, {}, {}, next_task=44, lowest=40)
    assert files(journal) == ["10", "9"]
    journal.close()


def test_rows_of_one_frame_belong_to_the_versions_of_their_policies(tmp_path: Path) -> None:
    journal = Journal(tmp_path, "s")
    journal.open(0)
    journal.write_assigned({1: "7/0", 2: "7/0+1"}, {1: "solver", 2: "verifier"})
    both = Tokens(
        version=0, versions={"solver": 3, "verifier": 5}, handles=(1, 2), positions=(0, 0), counts=(2, 1),
        tokens=array("I", [4, 5, 6]).tobytes(), logprobs=array("f", [-1.0] * 3).tobytes(), finished={},
    )  # fmt: skip
    journal.write_tokens(both)
    journal.write_tokens(both, [1])
    journal.write_trained(4, (7,), "solver")
    journal.close()
    found = journal.read(0)
    assert runs(journal, 0) == {"7/0": [(0, [4, 5], 3)], "7/0+1": [(0, [6], 5)]}
    assert oldest_versions(found.history) == {("solver", 7): 3, ("verifier", 7): 5}
    assert found.trained == {("solver", 4): (7,)}


def test_tasks_of_trained_steps_are_read_back(tmp_path: Path) -> None:
    journal = Journal(tmp_path, "s")
    journal.open(0)
    journal.write_trained(1, (3, 1))
    journal.write_trained(2, (0, 2))
    journal.rotate(1, {}, {}, next_task=6, lowest=4)
    journal.write_trained(3, (5,))
    journal.close()
    assert journal.read(1).trained == {("", 1): (3, 1), ("", 2): (0, 2), ("", 3): (5,)}
    again = Journal(tmp_path, "s")
    again.open(1)
    again.write_trained(2, (0, 4))  # trained again, without a task that cannot be had any more
    again.close()
    assert again.read(1).trained == {("", 1): (3, 1), ("", 2): (0, 4), ("", 3): (5,)}


def test_tasks_of_another_recipe_are_not_used(tmp_path: Path) -> None:
    journal = Journal(tmp_path, "s")
    journal.open(0)
    journal.write_trained(1, (3, 1))
    journal.close()
    assert Journal(tmp_path, "other").read(0).trained == {}


def test_tasks_after_a_damaged_record_are_not_used(tmp_path: Path) -> None:
    journal = Journal(tmp_path, "s")
    journal.open(0)
    journal.write_trained(1, (3, 1))
    journal.flush()
    at = (tmp_path / "000000.wal").stat().st_size
    journal.write_trained(2, (4, 5))
    journal.write_trained(3, (6, 7))
    journal.close()
    data = bytearray((tmp_path / "000000.wal").read_bytes())
    data[at + 9] ^= 0x41
    (tmp_path / "000000.wal").write_bytes(data)
    contents = journal.read(0)
    assert contents.trained == {("", 1): (3, 1)}
    assert contents.damage is not None
