"""What moves at the end of a step are expected to bring: by how much sooner it ends, and which workers are released."""

from __future__ import annotations

from typing import Any

import pytest

from tests.controller.scheduling.test_room import episode
from windfall.controller.cost.bill import Gathering
from windfall.controller.ledger.ledger import Ledger
from windfall.controller.scheduling.balance import WorkerLoad
from windfall.controller.scheduling.placement import Placement
from windfall.step_time import StepTime

SLOW, FAST = StepTime(fixed_s=0.4, each_s=0.001), StepTime(fixed_s=0.01, each_s=0.001)


def at_the_end_of_a_step(*, lengths: bool = True, step_groups: int = 0, slots: int = 9) -> Placement:
    """The placement after it was asked for moves: a slow and a fast worker have one response each, with 10 tokens of
    prompt and one of its own. Responses are expected to have 100 tokens."""
    ledger = Ledger()
    placement = Placement(ledger, step_groups=step_groups)
    if lengths:
        for n in range(50):
            placement.lengths.finished(str(n), n, 100)
            placement.lengths.complete(str(n))
    for n, worker in enumerate(("slow", "fast")):
        ledger.open(episode(f"{100 + n}/0", 10, max_tokens=1000))
        placement.assign([WorkerLoad(worker=worker, running=0, slots=9)], {worker: 1}, coming=0)
        ledger.entries[f"{100 + n}/0"].episode.tokens.append(7)  # it runs
    placement._finished, placement._finished_tokens = 50, 5000
    profiles = {"slow": SLOW, "fast": FAST}
    loads = [WorkerLoad(worker=w, running=1, slots=slots, profile=p, kv_tokens=4000) for w, p in profiles.items()]
    assert len(placement.reclaim(loads)) == (slots > 1)
    return placement


def test_worker_whose_last_response_moves_is_released() -> None:
    placement = at_the_end_of_a_step()
    gathering = placement.take_gathering()
    left = placement.lengths.expected("100", 100, generated=1) - 1
    assert (gathering.moves, gathering.released) == (1, 1)
    assert gathering.freed_s == pytest.approx(left * 0.401)
    # Both go on at the fast worker, with steps of 12 ms, after a round trip and a prefill of 11 tokens at 1 ms each.
    assert gathering.sooner_s == pytest.approx(left * (0.401 - 0.012) - 0.05 - 0.011)
    assert left == pytest.approx(99, rel=0.05)
    assert placement.take_gathering() == Gathering(), "it was taken"


@pytest.mark.parametrize("changed", [{"lengths": False}, {"step_groups": 2}, {"slots": 1}])
def test_nothing_is_gathered_if_that_cannot_be_valued(changed: dict[str, Any]) -> None:
    """No length is known; several steps are open at once; there is no room for a move."""
    assert at_the_end_of_a_step(**changed).take_gathering() == Gathering()
