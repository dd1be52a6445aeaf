"""Advice is followed if two steps agree, for our own workers only, within the limits of the recipe."""

from __future__ import annotations

from typing import Any

from windfall.launch.autoscale import Autoscaler

KIND = "spot cpu at $1.00/h"


def snapshot(step: int, count: int, workers: list[str], lease: str = KIND) -> dict[str, Any]:
    rows = [{"worker": w, "state": "ready", "lease": KIND} for w in workers]
    now = len(rows) - ("local" in workers)
    return {"step": step, "workers": rows, "advice": [{"lease": lease, "now": now, "count": count, "why": ""}]}


def test_two_steps_in_a_row_must_agree() -> None:
    a = Autoscaler(1, 8)
    assert a.update(snapshot(3, 2, ["w1.1"]), {"w1.1"}) is None
    assert a.update(snapshot(3, 2, ["w1.1"]), {"w1.1"}) is None  # the same step again
    assert a.update(snapshot(4, 3, ["w1.1"]), {"w1.1"}) is None  # different advice
    assert a.update(snapshot(5, 3, ["w1.1"]), {"w1.1"}) == 3
    assert a.update(snapshot(6, 3, ["w1.1"]), {"w1.1"}) is None  # already applied; the workers are still starting


def test_step_without_a_change_resets_the_advice() -> None:
    a = Autoscaler(1, 8)
    a.update(snapshot(3, 2, ["w1.1"]), {"w1.1"})
    a.update(snapshot(4, 1, ["w1.1"]), {"w1.1"})
    assert a.update(snapshot(5, 2, ["w1.1"]), {"w1.1"}) is None


def test_limit_and_workers_of_others() -> None:
    a = Autoscaler(1, 4)
    for step in (1, 2):
        wanted = a.update(snapshot(step, 40, ["w1.1"]), {"w1.1"})
    assert wanted == 4
    a = Autoscaler(2, 4)
    for step in (1, 2):  # two of the four surplus workers are not ours
        wanted = a.update(snapshot(step, 1, ["w1.1", "w2.1", "x", "y"]), {"w1.1", "w2.1"})
    assert wanted == 0
    for step in (3, 4):  # ours are gone, but their kind is remembered
        wanted = a.update(snapshot(step, 3, ["x"]), set())
    assert wanted == 2


def test_reconnected_worker_counts_as_ours_and_the_trainer_does_not_count() -> None:
    a = Autoscaler(2, 8)
    for step in (1, 2):
        wanted = a.update(snapshot(step, 3, ["w1.1#2", "w2.1", "local"]), {"w1.1", "w2.1"})
    assert wanted == 3


def test_advice_on_other_kinds_is_ignored() -> None:
    a = Autoscaler(1, 4)
    for step in (1, 2, 3):
        assert a.update(snapshot(step, 9, ["w1.1"], lease="spot H200"), {"w1.1"}) is None
    assert a.update(None, {"w1.1"}) is None
