"""AstraFlow's rule: bounds, direction, and that it settles on a fleet that keeps the trainer busy."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.papers import astraflow_table
from benchmarks.papers.astraflow import FEWER_BELOW, MORE_ABOVE, SPARE, WaitShareAdvisor, wanted_workers
from windfall.controller.rollout.dispatch import Dispatch
from windfall.controller.workers.worker_value import NOT_YET, RunMeasurements, WorkerKind
from windfall.events.log import EventLog

shares = st.floats(0, 1)


@given(workers=st.integers(0, 1000), wait=shares, held=shares)
def test_it_adds_only_if_the_trainer_waits_and_removes_only_if_it_does_not(
    workers: int, wait: float, held: float
) -> None:
    wanted = wanted_workers(workers, wait_share=wait, held_share=held)
    assert wanted >= 1, "the last worker stays: without any, nothing could be measured"
    if wait > MORE_ABOVE:
        assert wanted > workers
    elif wait < FEWER_BELOW:
        assert wanted <= max(1, workers)
    else:
        assert wanted == max(1, workers)


@given(workers=st.integers(1, 1000), waits=st.tuples(shares, shares), held=st.tuples(shares, shares))
def test_it_is_monotonic(workers: int, waits: tuple[float, float], held: tuple[float, float]) -> None:
    low, high = (wanted_workers(workers, wait_share=w, held_share=held[0]) for w in sorted(waits))
    assert low <= high
    more, fewer = (wanted_workers(workers, wait_share=0.0, held_share=h) for h in sorted(held))
    assert fewer <= more


@given(train=st.floats(100, 1e5), each=st.floats(100, 1e4), start=st.integers(1, 200))
def test_it_settles_on_a_fleet_that_keeps_the_trainer_busy(train: float, each: float, start: int) -> None:
    """Throughput is the lower of the two rates, and each side waits for the other."""
    workers = start
    for _ in range(12):
        fleet = workers * each
        wait, held = max(0.0, 1 - fleet / train), max(0.0, 1 - train / fleet)
        before, workers = workers, wanted_workers(workers, wait_share=wait, held_share=held)
    assert workers == before
    enough = train / each
    assert (1 - MORE_ABOVE) * enough - 1e-6 <= workers <= max(1, math.ceil(SPARE * enough)) + 1


def test_the_workers_of_all_kinds_count(tmp_path: Path) -> None:
    kinds = {
        name: WorkerKind(name=name, now=1, tok_per_s=0.0, usd_per_h=None, max_count=8) for name in ("spot a", "spot b")
    }
    run = RunMeasurements(steps=1, tokens_per_step=1.0, train_tok_per_s=1.0, trainer_usd_per_h=None)
    dispatch = Dispatch(events=EventLog(tmp_path / "events.jsonl"))
    advisor = WaitShareAdvisor(dispatch, responses=64, trainer_usd_per_h=0.0, max_count=8, asynchronous=True)
    first = advisor.advise(run, kinds, wait_s=0.0, held_s=0.0, step_s=0.0)
    assert {a.why for a in first.values()} == {NOT_YET}
    waited = advisor.advise(run, kinds, wait_s=5.0, held_s=0.0, step_s=10.0)["spot a"]
    assert (waited.now, waited.count) == (1, 3)
    assert waited.why == "the trainer waited for 50% of the step, and the gate was closed for 0%"
    held = advisor.advise(run, kinds, wait_s=0.0, held_s=9.0, step_s=10.0)
    assert [a.count for a in held.values()] == [0, 0]


@pytest.mark.slow
def test_barrier_of_the_table_costs_what_fluctuates() -> None:
    """A step takes the mean of the longer time instead of the longer mean."""
    lock, free = (
        astraflow_table.simulate(
            astraflow_table.Variant(name="", barrier=barrier, balanced=True, fluctuation=0.5), 3e-4, steps=14, seeds=1
        )
        for barrier in (True, False)
    )
    assert lock.step_s > 1.05 * free.step_s
    assert lock.barrier["solver"] + lock.barrier["verifier"] > 0.1
    assert set(free.barrier.values()) == {0.0}
