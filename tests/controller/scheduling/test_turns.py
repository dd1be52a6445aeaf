"""Where the next turn of a response goes, and what is predicted of its return."""

from __future__ import annotations

from typing import Any

from windfall.controller.scheduling.balance import WorkerLoad
from windfall.controller.scheduling.turns import NextTurn, Turns, route
from windfall.step_time import StepTime

PROFILE = StepTime(fixed_s=0.01, each_s=0.0002)


def load(worker: str, running: int = 0, **more: Any) -> WorkerLoad:
    return WorkerLoad(
        worker=worker, running=running, **{"slots": 8, "profile": PROFILE, "prefill_tok_per_s": 1e4} | more
    )


def turn(id: str = "1/0", context: int = 4000, **more: Any) -> NextTurn:
    return NextTurn(id=id, context=context, **{"holder": "a", "kept": context - 50} | more)


def test_turn_waits_for_its_worker_only_while_that_is_cheaper_than_prefill() -> None:
    full = [load("a", 8), load("b", 0)]
    long = route([turn(context=40_000)], full, typical=100)
    assert (long.placed, long.waiting) == ([], {"1/0"})
    short = route([turn(context=400)], full, typical=100)
    assert (short.placed, short.waiting) == ([("1/0", "b")], set())
    # each turn that waits already makes the wait longer
    many = route([turn(f"{n}/0", context=8000) for n in range(40)], full, typical=100)
    assert 0 < len(many.waiting) < 40
    assert 2 <= len(many.placed) <= 8
    assert {worker for _, worker in many.placed} == {"b"}


def test_turn_leaves_a_stalled_worker_and_one_that_is_gone() -> None:
    assert route([turn()], [load("a", stalled=True), load("b", 3)]).placed == [("1/0", "b")]
    assert route([turn()], [load("b", 3), load("c", 1)], typical=100).placed == [("1/0", "c")]
    assert route([turn()], [load("a", stalled=True)]).placed == []


def test_reserved_worker_is_preferred_only_among_equals() -> None:
    lost = turn(holder="", kept=0)
    assert route([lost], [load("spot", 1), load("own", 1, turn_preference=-1.0)], typical=100).placed == [
        ("1/0", "own")
    ]
    assert route([lost], [load("spot", 1), load("own", 7, turn_preference=-1.0)], typical=100).placed == [
        ("1/0", "spot")
    ]


def test_borrowed_worker_that_risks_its_slo_gets_no_turn() -> None:
    assert route([turn()], [load("a", slots=0), load("b", 5)]).placed == [("1/0", "b")]


def test_turn_goes_only_where_it_fits_and_stays_queued_without_a_slot() -> None:
    assert route([turn(room=5000)], [load("a"), load("b")], longest={"a": 4500.0}).placed == [("1/0", "b")]
    nothing = route([turn(holder="", kept=0)], [load("a", 8), load("b", 8)])
    assert (nothing.placed, nothing.waiting) == ([], set())


def test_unmeasured_workers_keep_their_turns() -> None:
    loads = [load(w, n, profile=None, prefill_tok_per_s=0.0) for w, n in (("a", 5), ("b", 0))]
    assert route([turn()], loads).placed == [("1/0", "a")]


def test_holder_is_forgotten_with_its_pages() -> None:
    t = Turns()
    for id in ("1/0", "1/1", "2/0"):
        t.ended(id, "a", context=100, sampled=10)
        t.returned(id)
    assert t.holder("1/0") == ("a", 100)
    t.assigned("1/1", "b")
    assert t.holder("1/1") == ("", 0)
    t.cleared("b")
    assert t.holder("1/0") == ("a", 100)
    t.cleared("a")
    assert t.holder("1/0") == t.holder("2/0") == ("", 0)
    t.over("2/0")
    t.over("never heard of")
    assert not t._held
    assert (t.counts.routed, t.counts.to_holder, t.counts.sessions, t.counts.turns) == (1, 0, 1, 1)


def test_borrowed_worker_within_its_slo_comes_before_spot_and_the_least_used_first() -> None:
    spot, busy, idle = load("spot", 2), load("busy", 2, turn_preference=0.5), load("idle", 2, turn_preference=0.1)
    lost = turn(holder="", kept=0)
    assert route([lost], [spot, busy, idle], typical=100).placed == [("1/0", "idle")]
    assert route([lost], [spot, busy], typical=100).placed == [("1/0", "busy")]
    frozen = load("idle", 2, turn_preference=0.1, slots=0)
    assert route([lost], [spot, frozen], typical=100).placed == [("1/0", "spot")]
    assert route([lost], [idle, load("own", 2, turn_preference=-1.0)], typical=100).placed == [("1/0", "own")]
    assert route([turn(holder="spot")], [spot, idle], typical=100).placed == [("1/0", "spot")], "it has the tokens"


def test_turn_does_not_wait_for_a_lender_that_the_run_has_given_back() -> None:
    """It has the tokens and its SLO holds, but no slot will become free there."""
    given_back, own = load("a", slots=0, turn_preference=0.1), load("own", 2, turn_preference=-1.0)
    routes = route([turn(context=40_000)], [given_back, own], typical=100)
    assert (routes.placed, routes.waiting) == ([("1/0", "own")], set())
    assert route([turn(context=40_000)], [given_back, load("own", 8)], typical=100).waiting == set()
