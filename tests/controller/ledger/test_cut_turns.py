"""Turns of agents that are cut short by a stop string or a closed stream."""

from __future__ import annotations

from array import array

import pytest

from windfall.controller.ledger.episode import Episode
from windfall.controller.ledger.ledger import Ledger
from windfall.link.messages import Tokens
from windfall.types import Sampling


@pytest.mark.parametrize("state", ["queued", "running", "turn"])
@pytest.mark.parametrize("kept", [0, 1, 3])
def test_a_turn_is_cut_short(state: str, kept: int) -> None:
    """The tokens up to the cut stay, later ones are discarded and counted, and the next turn continues from there."""
    ledger = Ledger(100)
    sampling = Sampling()
    episode = Episode(id="1/0", prompt=(1, 2), seed=1, max_tokens=20, sampling=sampling, stop=frozenset([9]))
    ledger.open(episode)
    ledger.queues[""].popleft()
    handle = ledger.assign("1/0", "a", 0).handle
    last = 9 if state == "turn" else 6
    finished = {0: "stop"} if state == "turn" else {}
    logprobs = array("f", [-1.0] * 3).tobytes()
    frame = Tokens(
        version=0, handles=(handle,), positions=(0,), counts=(3,), tokens=array("I", [4, 5, last]).tobytes(),
        logprobs=logprobs, finished=finished,
    )  # fmt: skip
    assert ledger.accept("a", frame).tokens == 3
    if state == "queued":
        ledger.release("a")
    assert ledger.entries["1/0"].state == state
    assert ledger.cut("1/0", kept) == ({"a": [handle]} if state == "running" else {})
    ledger.check()
    assert episode.tokens.tolist() == [4, 5, last][:kept]
    assert (episode.finish, ledger.counts.discarded, ledger.lost_tokens()) == ("stop", 3 - kept, 0)
    episode.max_tokens = 30
    assert episode.observe([7])
    ledger.next_turn("1/0")
    ledger.check()
    assert ledger.longest == 32
    assert ledger.accept("a", frame).tokens == 0, "late tokens of the ended assignment change nothing"
    ledger.check()
