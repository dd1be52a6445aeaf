"""A response is sent to a worker from its beginning or from its last token, in frames of limited size."""

from __future__ import annotations

from array import array

import pytest

from windfall.controller.ledger.episode import Episode
from windfall.controller.ledger.ledger import LedgerEntry
from windfall.controller.rollout import assignment
from windfall.link.messages import Work
from windfall.types import Sampling


def entry(handle: int = 1, prompt: tuple[int, ...] = (7, 8)) -> LedgerEntry:
    sampling = Sampling(top_k=4)
    episode = Episode(id="3/1", prompt=prompt, seed=5, max_tokens=10, sampling=sampling, stop=frozenset({0}))
    return LedgerEntry(episode, handle=handle)


def only_work(e: LedgerEntry) -> Work:
    [[work]] = assignment.work_frames([e])
    return work


def test_response_continues_from_its_last_token() -> None:
    e = entry()
    first = only_work(e)
    assert (first.prompt, first.position, first.max_tokens) == (array("I", [7, 8]).tobytes(), 0, 10)
    e.episode.take(0, (4, 5), (-1.0, -1.0), 2, None)
    e.episode.take(2, (6,), (-1.0,), 2, None)
    then = only_work(e)
    assert (then.prompt, then.position, then.max_tokens) == (array("I", [7, 8, 4, 5, 6]).tobytes(), 3, 7)
    assert (then.handle, then.seed, then.sampling, then.stop) == (first.handle, 5, first.sampling, first.stop)


def test_long_prompts_are_split_over_frames(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(assignment, "FRAME_BYTES", 32)
    entries = [entry(handle, prompt=(1,) * length) for handle, length in enumerate((3, 4, 20, 1, 7, 1))]
    frames = [[work.handle for work in frame] for frame in assignment.work_frames(entries)]
    assert frames == [[0, 1], [2], [3, 4], [5]]
