"""With a staleness bound above 0, responses are generated across checkpoints: every file can be read on its own, files
are kept as long as a step may need their tokens, and a step that is trained again gets the same tasks."""

from __future__ import annotations

from array import array
from pathlib import Path

import pytest

from windfall.controller.ledger.journal import Journal
from windfall.controller.ledger.journal_format import TokenRun
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
    journal = Journal(tmp_path, "s", staleness=1)
    journal.open(0)
    journal.write_assigned({1: "1/0", 2: "1/1"})
    journal.write_tokens(frame(1, 0, [4, 5], 0))
    journal.rotate(1, {1: "1/0", 2: "1/1"})
    journal.write_tokens(frame(1, 2, [6], 1))
    journal.write_tokens(frame(2, 0, [7], 1))
    journal.close()
    assert runs(journal, 1) == {"1/0": [(0, [4, 5], 0), (2, [6], 1)], "1/1": [(0, [7], 1)]}


@pytest.mark.parametrize("eta", [1, 2, 4])
def test_tokens_are_kept_as_long_as_a_step_may_need_them(eta: int, tmp_path: Path) -> None:
    """The first tokens of a version arrive before its checkpoint is on disk, the last ones when the window ends."""
    journal, last = Journal(tmp_path, "s", staleness=eta), 9
    journal.open(0)
    for version in range(last + 1):
        journal.write_assigned({version + 1: f"{version}/0"})
        journal.write_tokens(frame(version + 1, 0, [version + 4], version))
        if version:
            journal.rotate(version, {version + 1: f"{version}/0"})
        journal.write_tokens(frame(version + 1, 1, [version + 5], version))
    journal.close()
    kept = runs(journal, last)
    for version in range(last - eta, last + 1):
        assert kept[f"{version}/0"] == [(0, [version + 4, version + 5], version)]
    assert files(journal) == [str(n) for n in range(last - eta - 1, last + 1)], "and no longer"


def test_trainer_that_is_ahead_of_its_checkpoint_may_still_fall_back(tmp_path: Path) -> None:
    """The controller is restarted while the trainer has step 11. Then the trainer is lost: it is back at step 8."""
    journal = Journal(tmp_path, "s", staleness=2)
    journal.open(0)
    journal.rotate(4, {})
    journal.write_assigned({1: "18/0"})
    journal.write_tokens(frame(1, 0, [4, 5], 6))
    journal.rotate(8, {1: "18/0"})
    journal.write_tokens(frame(1, 2, [6], 6))
    journal.close()
    again = Journal(tmp_path, "s", staleness=2)
    again.open(11)
    again.close()
    assert files(again) == ["4", "8"]
    assert runs(again, 8) == {"18/0": [(0, [4, 5, 6], 6)]}


def test_staleness_0_keeps_one_file(tmp_path: Path) -> None:
    journal = Journal(tmp_path, "s")
    journal.open(0)
    for step in (1, 2, 3):
        journal.rotate(step, {})
    assert files(journal) == ["3"]


def test_tasks_of_trained_steps_are_read_back(tmp_path: Path) -> None:
    journal = Journal(tmp_path, "s", staleness=1)
    journal.open(0)
    journal.write_trained(1, (3, 1))
    journal.write_trained(2, (0, 2))
    journal.rotate(1, {})
    journal.write_trained(3, (5,))
    journal.close()
    assert journal.read(1).trained == {1: (3, 1), 2: (0, 2), 3: (5,)}
    again = Journal(tmp_path, "s", staleness=1)
    again.open(1)
    again.write_trained(2, (0, 4))  # trained again, without a task that cannot be had any more
    again.close()
    assert again.read(1).trained == {1: (3, 1), 2: (0, 4), 3: (5,)}


def test_tasks_of_another_recipe_are_not_used(tmp_path: Path) -> None:
    journal = Journal(tmp_path, "s", staleness=1)
    journal.open(0)
    journal.write_trained(1, (3, 1))
    journal.close()
    assert Journal(tmp_path, "other", staleness=1).read(0).trained == {}


def test_tasks_after_a_damaged_record_are_not_used(tmp_path: Path) -> None:
    journal = Journal(tmp_path, "s", staleness=1)
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
    assert contents.trained == {1: (3, 1)}
    assert contents.damage is not None
