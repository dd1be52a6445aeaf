"""The journal of an asynchronous run: responses run while a file ends and the next one begins."""

from __future__ import annotations

from array import array
from pathlib import Path

import pytest

from windfall.ledger.journal import Journal
from windfall.ledger.journal_reader import TokenRun
from windfall.link.messages import Tokens


def frame(handle: int, position: int, tokens: list[int], version: int) -> Tokens:
    return Tokens(
        version=version, handles=(handle,), positions=(position,), counts=(len(tokens),),
        tokens=array("I", tokens).tobytes(), logprobs=array("f", [-1.0] * len(tokens)).tobytes(),
        finished={},
    )  # fmt: skip


def test_running_response_goes_on_in_the_next_file(tmp_path: Path) -> None:
    journal = Journal(tmp_path, "s", staleness=1)
    journal.open(0)
    journal.write_assigned({1: "0/0", 2: "0/1"})
    journal.write_tokens(frame(1, 0, [5, 6], version=0))
    journal.rotate(1, {1: "0/0"})
    journal.write_tokens(frame(1, 2, [7], version=1))
    journal.close()
    (run, later) = Journal(tmp_path, "s", staleness=1).open(1)["0/0"]
    assert isinstance(run, TokenRun)
    assert isinstance(later, TokenRun)
    assert (list(run.tokens), run.version) == ([5, 6], 0)
    assert (later.position, list(later.tokens), later.version) == (2, [7], 1)


@pytest.mark.parametrize("staleness", [1, 2])
def test_tokens_generated_while_a_checkpoint_was_written_are_kept(tmp_path: Path, staleness: int) -> None:
    """Version 1 exists before its checkpoint is on disk, so its first tokens are in the file before."""
    journal = Journal(tmp_path, "s", staleness=staleness)
    journal.open(0)
    journal.write_assigned({1: "0/0"})
    journal.write_tokens(frame(1, 0, [5], version=1))
    for step in range(1, 2 + staleness):
        journal.rotate(step, {1: "0/0"})
    journal.close()
    assert set(Journal(tmp_path, "s", staleness=staleness).open(1 + staleness)) == {"0/0"}, "the step may train on it"
    journal.open(1 + staleness)
    journal.rotate(2 + staleness)
    journal.close()
    assert not (tmp_path / "000000.wal").exists(), "too old for any later step"
