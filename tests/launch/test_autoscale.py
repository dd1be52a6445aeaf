"""Advice is followed when it lasts, for our own workers only, within what the recipe allows."""

from __future__ import annotations

from typing import Any

from windfall.launch.autoscale import Following

KIND = "spot cpu at $1.00/h"


def said(step: int, count: int, workers: list[str], lease: str = KIND) -> dict[str, Any]:
    rows = [{"worker": w, "state": "ready", "lease": KIND} for w in workers]
    now = len(rows) - ("local" in workers)
    return {"step": step, "workers": rows, "advice": [{"lease": lease, "now": now, "count": count, "why": ""}]}


def test_two_steps_in_a_row_must_say_the_same() -> None:
    f = Following(1, 8)
    assert f.look(said(3, 2, ["w1.1"]), {"w1.1"}) is None
    assert f.look(said(3, 2, ["w1.1"]), {"w1.1"}) is None  # the same step, looked at again
    assert f.look(said(4, 3, ["w1.1"]), {"w1.1"}) is None  # another word
    assert f.look(said(5, 3, ["w1.1"]), {"w1.1"}) == 3
    assert f.look(said(6, 3, ["w1.1"]), {"w1.1"}) is None  # done already, though they are still starting


def test_nothing_to_change_forgets_what_was_said_before() -> None:
    f = Following(1, 8)
    f.look(said(3, 2, ["w1.1"]), {"w1.1"})
    f.look(said(4, 1, ["w1.1"]), {"w1.1"})
    assert f.look(said(5, 2, ["w1.1"]), {"w1.1"}) is None


def test_bounds_and_workers_of_others() -> None:
    f = Following(1, 4)
    for step in (1, 2):
        wanted = f.look(said(step, 40, ["w1.1"]), {"w1.1"})
    assert wanted == 4
    f = Following(2, 4)
    for step in (1, 2):  # two of the four that are too many are not ours
        wanted = f.look(said(step, 1, ["w1.1", "w2.1", "x", "y"]), {"w1.1", "w2.1"})
    assert wanted == 0
    for step in (3, 4):  # ours are gone; what they were is remembered
        wanted = f.look(said(step, 3, ["x"]), set())
    assert wanted == 2


def test_one_of_ours_that_has_come_back_is_ours_and_the_trainer_is_nobodys() -> None:
    f = Following(2, 8)
    for step in (1, 2):
        wanted = f.look(said(step, 3, ["w1.1#2", "w2.1", "local"]), {"w1.1", "w2.1"})
    assert wanted == 3


def test_advice_on_other_kinds_is_not_ours_to_follow() -> None:
    f = Following(1, 4)
    for step in (1, 2, 3):
        assert f.look(said(step, 9, ["w1.1"], lease="spot H200"), {"w1.1"}) is None
    assert f.look(None, {"w1.1"}) is None
