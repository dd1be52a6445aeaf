"""How far generation is ahead of the trainer: the rule alone, and with the admission in a small model of a run."""

from __future__ import annotations

import heapq
import random
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.fleets.admitting import admit
from windfall.controller.step_batch import StepBatch
from windfall.controller.tasks.admission import FORGET, WAITED_SHARE, Admission, Lead
from windfall.types import Group, Response, Task

BUSY: dict[str, Any] = {"missing": 0, "wait_s": 0.0, "train_s": 1.0}
MEASURED = st.fixed_dictionaries(
    {
        "spare": st.integers(0, 60),
        "missing": st.integers(0, 10),
        "wait_s": st.sampled_from([0.0, 0.0, 0.001, 0.1, 3.0]),
        "train_s": st.sampled_from([0.0, 1.0, 2.5]),
    }
)


@given(batch=st.integers(1, 20), staleness=st.integers(0, 4), steps=st.lists(MEASURED, max_size=60))
def test_the_lead_stays_within_the_bound_grows_at_once_and_shrinks_slowly(
    batch: int, staleness: int, steps: list[dict[str, Any]]
) -> None:
    lead, limit = Lead(batch=batch, staleness=staleness), batch * staleness
    assert lead.groups == limit
    for step in steps:
        before = lead.groups
        lead.end_step(**step)
        assert 0 <= lead.groups <= limit
        assert lead.groups >= before - max(1, batch // 4)
        if step["wait_s"] > WAITED_SHARE * step["train_s"]:
            assert lead.groups >= min(limit, before + step["missing"])


@given(spare=st.integers(0, 40), batch=st.integers(1, 20), staleness=st.integers(1, 4))
def test_the_lead_shrinks_by_what_is_always_spare(spare: int, batch: int, staleness: int) -> None:
    lead, limit = Lead(batch=batch, staleness=staleness), batch * staleness
    spare = min(spare, limit)
    for _ in range(8 * limit):
        lead.end_step(spare=max(0, lead.groups - limit + spare), **BUSY)
    assert lead.groups == limit - spare


def test_a_wait_is_remembered_long_enough_that_such_waits_cost_one_percent_at_most() -> None:
    """Every step would be fine without its last 4 groups, unless a worker is lost; that happens as soon as the lead is
    down at 6 again."""
    lead, waits, steps = Lead(batch=8, staleness=2), 0, 3000
    for _ in range(steps):
        if lost := lead.groups <= 6:
            waits += 1
        lead.end_step(spare=max(0, lead.groups - 4), missing=8, wait_s=0.25 * lost, train_s=1.0)
    assert waits > 10, "nothing was forgotten"
    assert waits * 0.25 / steps <= 1 / FORGET


def test_a_long_wait_is_remembered_no_longer_than_a_lead_at_the_bound_is_worth() -> None:
    """No worker is there for the time of 1,000 steps: no lead within the bound covers that."""
    lead, batch, staleness = Lead(batch=8, staleness=2), 8, 2
    for _ in range(20):
        lead.end_step(spare=batch * staleness, **BUSY)
    assert lead.groups == 0
    lead.end_step(spare=0, missing=8, wait_s=1000.0, train_s=1.0)
    assert lead.groups == batch * staleness
    for _ in range(FORGET * staleness + 8):
        lead.end_step(spare=batch * staleness, **BUSY)
    assert lead.groups == 0


def test_generation_as_the_bottleneck_keeps_the_lead_at_the_bound() -> None:
    lead = Lead(batch=8, staleness=2)
    for n in range(100):
        waited = n % 3 == 0  # fewer steps than are needed to decide otherwise
        lead.end_step(spare=8, missing=4, wait_s=0.5 * waited, train_s=1.0)
        assert lead.groups == 16


def group(index: int, version: int) -> Group:
    response = Response(
        id=f"{index}/0", prompt=(1,), tokens=(7,), logprobs=(-1.0,), sampled=(True,), versions=(version,),
        finish="stop", reward=1.0,
    )  # fmt: skip
    return Group(index=index, task=Task(id=str(index), prompt=""), responses=(response,))


@dataclass
class Measured:
    wait: float
    """Share of the time in which the trainer waited."""
    age: float
    """Mean staleness of the groups that were trained on."""


def run(*, latency_s: float, spread: float, staleness: int, fixed: bool = False, steps: int = 200) -> Measured:
    """A run whose trainer takes one second per step and needs its whole batch at the start. A group is finished after
    `latency_s`, times a log-normal number with standard deviation `spread`. `fixed`: the lead is the bound's."""
    now_s, waited_s, ages = 0.0, 0.0, list[int]()
    a = Admission(batch=16, steps=steps, staleness=staleness)
    running: list[tuple[float, int, int]] = []

    def open_tasks() -> None:
        for index in admit(a):
            took_s = latency_s * random.Random(index).lognormvariate(0.0, spread)
            heapq.heappush(running, (now_s + took_s, index, a.version))

    for step in range(steps):
        open_tasks()
        batch = StepBatch()
        while True:
            while running and running[0][0] <= now_s:
                _, index, version = heapq.heappop(running)
                a.finish(group(index, version))
            while (taken := a.take()) is not None:
                if step >= steps // 2:
                    ages.append(a.version - taken.responses[0].versions[0])
            if a.complete:
                break
            wait_s = running[0][0] - now_s
            batch.waited(wait_s, missing=a.batch - len(a.taken), ready=a.ready, pipelined=False)
            now_s += wait_s
        batch.completed(a.ready, pipelined=False)
        waited_s += batch.wait_s if step >= steps // 2 else 0.0
        if not fixed:
            a.lead.end_step(spare=batch.spare, missing=batch.missing, wait_s=batch.starved_s, train_s=1.0)
        now_s += 1.0
        a.publish()
    return Measured(wait=waited_s / (steps / 2 + waited_s), age=sum(ages) / len(ages))


@settings(max_examples=10, deadline=None)
@given(latency_s=st.floats(0.05, 0.9), staleness=st.integers(1, 4))
def test_equal_latencies_need_one_batch_ahead_and_no_wait(latency_s: float, staleness: int) -> None:
    measured = run(latency_s=latency_s, spread=0.0, staleness=staleness, steps=100)
    assert (measured.wait, measured.age) == (0.0, 1.0)


@pytest.mark.parametrize("latency_s", [0.2, 0.7, 1.5])
@pytest.mark.parametrize("spread", [0.2, 0.6])
def test_data_is_fresher_and_the_trainer_waits_no_more(latency_s: float, spread: float) -> None:
    as_bound = run(latency_s=latency_s, spread=spread, staleness=4, fixed=True)
    measured = run(latency_s=latency_s, spread=spread, staleness=4)
    assert as_bound.age == pytest.approx(4.0, abs=0.01)
    assert measured.wait <= as_bound.wait + 0.01
    assert measured.age <= max(1.5, 2.2 * latency_s + 0.6)


def test_synchronous_training_opens_nothing_ahead() -> None:
    assert run(latency_s=0.5, spread=0.6, staleness=0, steps=20).age == 0.0
