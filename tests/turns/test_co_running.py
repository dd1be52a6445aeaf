"""Two jobs have a device together only while that was measured to pay."""

from __future__ import annotations

import pytest

from windfall.turns.co_running import ALONE_TURNS, RETRY_S, TRIAL_TURNS, CoRunning, Side

TRAIN, ROLLOUT = Side.of("a", "train", 0), Side.of("b", "rollout", 64)


def alone(table: CoRunning, *sides: Side, rate: float = 100.0) -> None:
    for side in sides:
        for _ in range(ALONE_TURNS):
            table.observe(side, 2.0, 2.0 * rate)


def together(table: CoRunning, train: float, rollout: float, turns: int = TRIAL_TURNS) -> None:
    for _ in range(turns):
        table.observe(TRAIN, 1.0, 100.0 * train, ROLLOUT)
        table.observe(ROLLOUT, 1.0, 100.0 * rollout, TRAIN)


def test_never_without_measurements_of_both_alone() -> None:
    table = CoRunning()
    assert not table.may_co_run(TRAIN, ROLLOUT, 0.5, 0.0)
    alone(table, TRAIN)
    assert not table.may_co_run(TRAIN, ROLLOUT, 0.5, 0.0)
    alone(table, ROLLOUT)
    assert table.may_co_run(TRAIN, ROLLOUT, 0.5, 0.0)
    assert table.may_co_run(ROLLOUT, TRAIN, 0.5, 0.0)


def test_a_pair_goes_on_while_it_pays() -> None:
    table = CoRunning()
    alone(table, TRAIN, ROLLOUT)
    together(table, 0.6, 0.7)
    assert table.may_co_run(TRAIN, ROLLOUT, 0.5, 0.0)
    assert table.relative_speed(ROLLOUT, TRAIN) == pytest.approx(0.7)
    together(table, 0.4, 0.4, turns=50)
    assert not table.may_co_run(TRAIN, ROLLOUT, 0.5, 0.0)


@pytest.mark.parametrize(("train", "rollout", "fair"), [(0.5, 0.54, 0.5), (0.3, 1.0, 0.5), (0.75, 0.3, 0.2)])
def test_no_co_running_without_a_gain_or_if_one_side_pays_for_it(train: float, rollout: float, fair: float) -> None:
    table = CoRunning()
    alone(table, TRAIN, ROLLOUT)
    together(table, train, rollout)
    assert not table.may_co_run(TRAIN, ROLLOUT, fair, 10.0)
    assert not table.may_co_run(ROLLOUT, TRAIN, 1 - fair, 10.0 + RETRY_S - 1)
    assert table.may_co_run(TRAIN, ROLLOUT, fair, 10.0 + RETRY_S), "it is tried again, but rarely"
    assert table.relative_speed(TRAIN, ROLLOUT) is None


def test_a_side_that_reports_nothing_is_not_tried_forever() -> None:
    table = CoRunning()
    alone(table, TRAIN, ROLLOUT)
    for _ in range(1000):
        if not table.may_co_run(TRAIN, ROLLOUT, 0.5, 0.0):
            return
        table.observe(ROLLOUT, 1.0, 100.0, TRAIN)
    pytest.fail("the pair still co-runs, though training was never measured beside rollout")


def test_a_job_does_not_run_beside_itself_and_forgotten_jobs_leave_nothing() -> None:
    table, own = CoRunning(), Side.of("a", "rollout", 64)
    alone(table, TRAIN, own, ROLLOUT)
    assert not table.may_co_run(TRAIN, own, 0.5, 0.0)
    together(table, 1.0, 1.0)
    assert len(table.table()) == 2
    table.forget("b")
    assert table.table() == []
    assert not table.may_co_run(TRAIN, ROLLOUT, 0.5, 0.0)
