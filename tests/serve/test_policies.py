"""The pure policies of co-serving: memory states, step times, admission by slack."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from windfall.link.messages import Capacity, encode
from windfall.serve.capacity import CapacityMeter
from windfall.serve.memory_policy import MemoryPolicy, MemoryState
from windfall.serve.slo import (
    CHUNK,
    FIRST_ROWS,
    Objectives,
    RolloutLoad,
    ServingLoad,
    credit_s,
    objective_slack_s,
    rows_allowed,
    slack_s,
    steps_allowed,
)  # fmt: skip
from windfall.step_time import LearnedStepTime

decode = msgspec.msgpack.Decoder(Capacity).decode
SLO = Objectives(ttft_s=0.5, tpot_s=0.15, reserve=0.0)
LOAD = RolloutLoad(running=4, waiting=1, context=400, prefill=1000)


def learned(fixed: float = 0.004, each: float = 0.0002, attended: float = 0.0, steps: int = 60) -> LearnedStepTime:
    rng, estimate = random.Random(1), LearnedStepTime()
    for _ in range(steps):
        rows, context = rng.randrange(1, 300), rng.randrange(300, 9000)
        estimate.observe(fixed + each * rows + attended * context, rows, context)
    return estimate


# Memory states.


def test_one_halving_then_frozen_until_the_next_step() -> None:
    policy = MemoryPolicy(100)
    policy.begin_step(10)
    assert (policy.state, policy.budget) == (MemoryState.NORMAL, 70)
    assert policy.observe(20, 70) == 0
    assert policy.observe(21, 70) == 35, "half of the headroom of 20 is used"
    assert (policy.state, policy.budget) == (MemoryState.PRESSURE, 35)
    assert policy.observe(21, 35) == 0
    assert policy.state is MemoryState.FROZEN
    assert policy.observe(60, 35) == 0, "there is no second halving"
    assert policy.observe(5, 35) == 0
    assert (policy.state, policy.budget, policy.halvings) == (MemoryState.FROZEN, 35, 1), "nor does the budget grow"
    policy.begin_step(5)
    assert (policy.state, policy.budget) == (MemoryState.NORMAL, 75)


@given(
    blocks=st.integers(1, 300), headroom=st.floats(0, 1), watermark=st.floats(0.01, 1),
    use=st.lists(st.tuples(st.integers(0, 300), st.integers(0, 300), st.booleans()), max_size=30),
)  # fmt: skip
def test_within_a_step_the_budget_only_falls(
    blocks: int, headroom: float, watermark: float, use: list[tuple[int, int, bool]]
) -> None:
    policy = MemoryPolicy(blocks, headroom=headroom, watermark=watermark)
    policy.begin_step(0)
    before = policy.budget
    assert 0 <= before <= blocks - math.floor(blocks * headroom)
    halved = 0
    for serving, rollout, taken in use:
        excess = policy.observe(min(serving, blocks), rollout)
        assert excess == max(0, rollout - policy.budget)
        halved += policy.budget < before and not taken
        assert policy.budget in (before, before // 2)
        if taken:
            policy.taken(min(rollout, policy.budget))
        assert 0 <= policy.budget <= before
        before = policy.budget
    assert policy.halvings <= 1


# Step times.


def test_nothing_is_known_at_the_start() -> None:
    estimate = LearnedStepTime()
    assert (estimate.predict_s(10, 100), estimate.upper_s(10, 100), estimate.most_rows(1.0)) == (0.0, 0.0, 0)
    for seconds, rows, context in ((1.0, 0, 0), (0.0, 4, 9), (math.inf, 4, 9), (-1, 4, 9)):
        estimate.observe(seconds, rows, context)
    assert not estimate.known
    estimate.observe(0.008, 4, 40)
    assert estimate.predict_s(4, 40) == pytest.approx(0.008)
    assert estimate.most_rows(0.02) == 10


@settings(max_examples=30)
@given(
    fixed=st.floats(1e-5, 0.05), each=st.floats(1e-7, 1e-3), attended=st.floats(0, 1e-6), seed=st.integers(0, 1 << 16)
)
def test_the_estimate_converges(fixed: float, each: float, attended: float, seed: int) -> None:
    rng, estimate = random.Random(seed), LearnedStepTime()

    def actual(rows: int, context: int) -> float:
        return fixed + each * rows + attended * context

    shapes = [(rng.randrange(1, 600), rng.randrange(10, 20_000)) for _ in range(80)]
    for shape in shapes:
        estimate.observe(actual(*shape) * rng.uniform(0.95, 1.05), *shape)
    wrong = [abs(estimate.predict_s(*shape) / actual(*shape) - 1) for shape in shapes]
    assert sum(wrong) / len(wrong) < 0.06
    assert estimate.error < 0.35
    before = estimate.predicted_s, estimate.actual_s
    for shape in shapes[40:]:
        estimate.observe(actual(*shape), *shape)
    assert estimate.predicted_s - before[0] == pytest.approx(estimate.actual_s - before[1], rel=0.1)


@given(
    st.lists(st.tuples(st.integers(1, 4000), st.integers(0, 10**6), st.floats(1e-6, 10)), min_size=1, max_size=30),
    st.floats(-1, 10), st.floats(0, 1e5),
)  # fmt: skip
def test_any_history_gives_a_number_of_rows(
    steps: list[tuple[int, int, float]], slack: float, context_per_row: float
) -> None:
    estimate = LearnedStepTime()
    for rows, context, s in steps:
        estimate.observe(s, rows, context)
    rows = estimate.most_rows(slack, context_per_row=context_per_row)
    assert rows >= 0
    if rows:
        assert estimate.upper_s(rows, rows * context_per_row) <= slack * (1 + 1e-6)


def test_a_machine_that_becomes_slower_is_learned_again() -> None:
    estimate = learned()
    for _ in range(150):
        estimate.observe(0.06, 100, 2000)
    assert estimate.predict_s(100, 2000) == pytest.approx(0.06, rel=0.1)
    assert estimate.error < 0.25


# Admission.


@pytest.mark.parametrize("noise", [0.0, 0.05])
def test_prefills_are_not_forgotten_in_a_long_time_of_decoding(noise: float) -> None:
    rng, estimate = random.Random(1), LearnedStepTime()

    def step_s(rows: int, context: int) -> float:
        return (0.008 + 8e-5 * rows + 2e-7 * context) * (1 + rng.uniform(-noise, noise))

    for n in range(2100):
        rows, context = (528, 140_000) if n < 100 and n % 4 == 0 else (16, 6400 + 16 * (n % 500))
        estimate.observe(step_s(rows, context), rows, context)
    assert estimate.predict_s(528, 140_000) == pytest.approx(0.0782, rel=0.2)
    assert 60 < estimate.most_rows(0.03, context_per_row=400.0) < 200  # 137 if all is known exactly


def test_slack_is_that_of_the_tightest_request() -> None:
    serving = learned(0.01, 0.0001)
    assert slack_s(ServingLoad(), SLO, serving, 5.0) == math.inf
    running = ServingLoad(last_tokens_s=(4.99, 4.95), context=200)
    assert slack_s(running, SLO, serving, 5.0) == pytest.approx(0.10 - 0.0102, rel=0.02)
    waiting = ServingLoad(waiting=((4.9, 400),))
    assert slack_s(waiting, SLO, serving, 5.0) == pytest.approx(0.4 - 0.05, rel=0.02)
    behind = ServingLoad(waiting=((4.9, 400), (4.9, 3000)), max_rows=1000)
    assert slack_s(behind, SLO, serving, 5.0) == pytest.approx(0.4 - 4 * 0.01 - 0.34, abs=0.01), (
        "prompts before it count"
    )


def test_rows_fit_into_the_slack() -> None:
    rollout = learned(0.004, 0.0002)
    assert rows_allowed(0.0, SLO, rollout, LOAD) == 0
    assert rows_allowed(-1.0, SLO, rollout, LOAD) == 0
    assert rows_allowed(0.003, SLO, rollout, LOAD) == 0, "not even an empty step fits"
    assert rows_allowed(0.024, SLO, rollout, LOAD) == pytest.approx(100, abs=3)
    assert rows_allowed(0.024, SLO, rollout, replace(LOAD, prefill=0)) == 4, "there is nothing to prefill"
    assert rows_allowed(math.inf, SLO, rollout, LOAD) == LOAD.running + CHUNK
    assert rows_allowed(math.inf, SLO, rollout, RolloutLoad(running=0, waiting=0, context=0)) == 0


def test_first_step_without_any_estimate() -> None:
    assert rows_allowed(math.inf, SLO, LearnedStepTime(), LOAD) == FIRST_ROWS
    assert rows_allowed(0.14, SLO, LearnedStepTime(), LOAD) == 1
    assert rows_allowed(0.05, SLO, LearnedStepTime(), LOAD) == 0
    assert slack_s(ServingLoad(waiting=((5.0, 100),)), SLO, LearnedStepTime(), 5.0) == pytest.approx(0.5)


def test_an_idle_server_lends_steps_of_a_limited_length() -> None:
    slow = learned(0.05, 0.001)
    assert slow.upper_s(rows_allowed(math.inf, SLO, slow, LOAD), 0) <= SLO.idle_s
    glacial = learned(1.0, 0.1)
    assert rows_allowed(math.inf, SLO, glacial, LOAD) == 1, "without requests it still makes progress"
    assert rows_allowed(0.4, SLO, glacial, LOAD) == 0


def test_capacity_is_the_lower_of_memory_and_compute() -> None:
    meter = CapacityMeter(0.0, slots=16, response_tokens=100)
    assert meter.slots(10_000) == 16
    assert meter.slots(100) == 4, "with a quarter of the longest response each"
    assert meter.slots(450, running=4, held_tokens=200) == 4 + 2, "each of them may have twice as much as those"
    assert meter.slots(450, running=4, held_tokens=400) == 4, "there is no room for another"
    assert meter.slots(450, running=9, held_tokens=900) == 4, "some must go"
    for n in range(1, 41):
        meter.stepped(0.1)
        meter.observe(n * 0.25, rows=3, use=0.5)
    assert meter.slots(10_000) == 3
    learned_s = np.float64(0.25)
    assert decode(encode(meter.report(slots=1, state=MemoryState.NORMAL, slack_s=learned_s))).slack_s == 0.25
    report = meter.report(slots=1, state=MemoryState.FROZEN, slack_s=math.inf)
    assert (report.slots, report.state, report.slack_s) == (1, "frozen", None)
    assert report.use == pytest.approx(0.5)
    assert report.lent == pytest.approx(0.4)


@given(st.lists(st.tuples(st.floats(0.0, 5.0), st.integers(0, 2000), st.floats(0.0, 1.0), st.floats(0.0, 9.0))))
def test_any_history_gives_a_capacity(history: list[tuple[float, int, float, float]]) -> None:
    meter, now_s = CapacityMeter(0.0, slots=8, response_tokens=10), 0.0
    for passed_s, rows, use, step_s in history:
        now_s += passed_s
        meter.stepped(step_s)
        meter.observe(now_s, rows=rows, use=use)
        assert 0 <= meter.slots(10**9) <= 8
        assert meter.slots(0) == 0
        assert 0.0 <= meter.use <= 1.0
        assert 0.0 <= meter.lent <= 1.0


def test_a_budget_of_zero_is_computed_again_when_there_is_room_for_a_while() -> None:
    policy = MemoryPolicy(10)
    policy.begin_step(serving=9)
    assert policy.budget == 0
    assert [policy.thaw(9, float(t)) for t in range(0, 40, 5)] == [False] * 8, "there is no room"
    assert [policy.thaw(2, 40.0 + t) for t in (0, 4)] == [False] * 2
    assert not policy.thaw(9, 49.0), "there is none for a moment"
    assert [policy.thaw(2, 50.0 + t) for t in (0, 8, 12)] == [False, False, True]
    assert (policy.budget, policy.state) == (6, MemoryState.NORMAL)
    assert [policy.thaw(2, 70.0 + t) for t in (0, 12)] == [False, False], "it is not zero"


# Slowdown.


def test_credit_is_a_share_of_what_serving_took() -> None:
    slo = Objectives(ttft_s=0.5, tpot_s=0.15, reserve=0.0, max_slowdown=0.15)
    load = ServingLoad(last_tokens_s=(10.0, 10.0), lent_s=((1.0, 0.0), (0.2, 0.02)), context=100)
    assert credit_s(load, slo) == pytest.approx(0.15 * 0.18 - 0.02), "the tighter of the two"
    assert slack_s(load, slo, learned(), 10.0) == pytest.approx(0.007)
    assert credit_s(ServingLoad(waiting=((0.0, 100),)), slo) == math.inf, "a waiting request has its own slack"
    assert slack_s(load, SLO, learned(), 10.0) > 0.1, "without a limit only the objectives count"


def test_launches_in_flight_count() -> None:
    slo, serving = Objectives(ttft_s=0.5, tpot_s=0.1, reserve=0.0, max_slowdown=0.1), learned(0.01, 0.0001)
    load = ServingLoad(last_tokens_s=(9.9,), lent_s=((1.0, 0.0),), context=100)
    ahead = replace(load, serving_ahead_s=0.02, rollout_ahead_s=0.03)
    assert credit_s(ahead, slo) == pytest.approx(credit_s(load, slo) - 0.03), "time of serving is not lent"
    before, after = (objective_slack_s(each, slo, serving, 9.9) for each in (load, ahead))
    assert after == pytest.approx(before - 0.05), "a request waits for both"


def test_credit_is_not_spent_on_few_rows() -> None:
    time = learned(fixed=0.004, each=0.0002)
    load = RolloutLoad(running=100, waiting=0, context=0)
    assert 0 < rows_allowed(0.006, SLO, time, load) < 50
    assert rows_allowed(0.006, SLO, time, load, growing=True) == 0
    assert rows_allowed(0.025, SLO, time, load, growing=True) >= 100


def test_credit_is_not_spent_on_a_prefill_of_few_rows() -> None:
    time = learned(fixed=0.004, each=0.0001)
    load = RolloutLoad(running=1, waiting=3, context=0, prefill=1000)
    assert 0 < rows_allowed(0.0045, SLO, time, load) < 10
    assert rows_allowed(0.0045, SLO, time, load, growing=True) == 0, "almost all of the step would be fixed"
    assert rows_allowed(0.012, SLO, time, load, growing=True) >= 40
    short = RolloutLoad(running=0, waiting=1, context=0, prefill=6)
    assert rows_allowed(0.0045, SLO, time, short, growing=True) >= 3, "there is no more to compute"


def test_without_time_for_a_prefill_the_rollout_decodes() -> None:
    """As on a GPU: a prefill takes 11 ms more."""
    time = on_a_gpu()
    assert time.predict_s(100, 0) == pytest.approx(0.003, rel=0.05)
    assert time.predict_s(400, 0, True) == pytest.approx(0.0155, rel=0.05)
    load = RolloutLoad(running=110, waiting=0, prefilling=10, context=0, prefill=600)
    for growing in (False, True):
        assert rows_allowed(0.008, SLO, time, load, growing=growing) == 100, "those that decode, and no row of a prompt"
        assert rows_allowed(0.03, SLO, time, load, growing=growing) > 400
    few = RolloutLoad(running=110, waiting=0, prefilling=80, context=0, prefill=6000)
    assert rows_allowed(0.008, SLO, time, few) == 30
    assert rows_allowed(0.008, SLO, time, few, growing=True) == 0, "with more credit, the others can be prefilled"


def on_a_gpu(prefill_s: float = 0.014) -> LearnedStepTime:
    """A decode step of 100 rows takes 3 ms."""
    time = LearnedStepTime()
    for n in range(40):
        time.observe(0.001 + 0.00002 * (90 + n % 20), 90 + n % 20, 0)
        if n % 4 == 0:
            time.observe(prefill_s + 0.000005 * (20 * n), 100 + 20 * n, 0, True)
    return time


def test_credit_is_left_to_a_prefill_that_is_due() -> None:
    """Otherwise decode steps spend all credit, and a prompt waits until half of the other responses have ended."""
    time = on_a_gpu()
    load = RolloutLoad(running=100, waiting=10, context=0, prefill=600)
    assert rows_allowed(0.008, SLO, time, load, growing=True) == 100
    due = replace(load, prefill_due=True)
    assert rows_allowed(0.008, SLO, time, due, growing=True) == 0
    assert rows_allowed(0.03, SLO, time, due, growing=True) > 400
    assert rows_allowed(0.008, SLO, time, due) == 100, "slack of an objective does not grow"


def test_an_idle_server_prefills_although_it_takes_long() -> None:
    slo, time = Objectives(ttft_s=0.5, tpot_s=0.01, reserve=0.0), on_a_gpu()
    load = RolloutLoad(running=0, waiting=10, context=0, prefill=3000)
    assert rows_allowed(math.inf, slo, time, load) == CHUNK, "not row by row: almost all of the time is fixed"
    busy = replace(load, running=100)
    assert rows_allowed(math.inf, slo, time, busy) == 100
    due = replace(busy, prefill_due=True)
    assert rows_allowed(math.inf, slo, time, due, ahead_s=0.003) == 0, "it comes when nothing is in flight"
    assert rows_allowed(math.inf, slo, time, due) == 100 + CHUNK
    assert rows_allowed(0.008, slo, time, due) == 100


def test_launches_of_an_idle_server_together_leave_a_new_request_its_time() -> None:
    time = learned(fixed=0.004, each=0.0002)
    load = RolloutLoad(running=400, waiting=0, context=0)
    for ahead_s in (0.0, 0.05, 0.1, 0.14):
        rows = rows_allowed(math.inf, SLO, time, load, ahead_s=ahead_s)
        assert ahead_s + time.upper_s(rows, 0) <= SLO.idle_s
    assert rows_allowed(math.inf, SLO, time, load, ahead_s=SLO.idle_s) == 0


def test_steps_of_a_launch_fit_into_the_slack() -> None:
    time = learned(fixed=0.002, each=0.0)
    assert steps_allowed(1.0, 0.02, time, 10, 100, 8) == 8
    assert steps_allowed(0.0065, 0.02, time, 10, 100, 8) == 3
    assert steps_allowed(0.0001, 0.02, time, 10, 100, 8) == 1
    assert steps_allowed(1.0, 0.02, LearnedStepTime(), 10, 100, 8) == 1, "nothing is known yet"


@settings(max_examples=40)
@given(
    seed=st.integers(0, 1 << 32), limit=st.floats(0.02, 0.5), fixed=st.floats(0.001, 0.02),
    serving_s=st.floats(0.001, 0.03), gap_s=st.floats(0.01, 1.0),
)  # fmt: skip
def test_lending_slows_no_request_down_by_more_than_the_limit(
    seed: int, limit: float, fixed: float, serving_s: float, gap_s: float
) -> None:
    """Serving steps and rollout steps in turn, with requests that come and go. Estimates are exact."""
    rng, now_s, next_s = random.Random(seed), 0.0, 0.0
    slo = Objectives(ttft_s=10.0, tpot_s=5.0, reserve=0.0, max_slowdown=limit)
    serving, rollout = learned(serving_s, 0.0), learned(fixed, fixed / 100)
    running: dict[int, list[float]] = {}  # first token, time lent, tokens left
    lent_s = idle_s = 0.0
    for turn in range(400):
        if now_s >= next_s:
            running[turn] = [now_s, 0.0, rng.randrange(2, 60)]
            next_s = now_s + rng.expovariate(1 / gap_s)
        if running:
            now_s += serving_s
            for id, state in list(running.items()):
                state[2] -= 1
                if state[2] <= 0:
                    whole_s, lent = now_s - state[0], state[1]
                    assert lent <= limit * (whole_s - lent) * 1.01 + 1e-9
                    del running[id]
        load = ServingLoad(
            last_tokens_s=(now_s,) * len(running), lent_s=tuple((now_s - s[0], s[1]) for s in running.values())
        )
        slack = slack_s(load, slo, serving, now_s)
        growing = slack == credit_s(load, slo) < math.inf
        rows = rows_allowed(slack, slo, rollout, RolloutLoad(running=32, waiting=0, context=0), growing=growing)
        took_s = rollout.predict_s(min(rows, 32), 0) if rows else 0.0
        if not running and not took_s:
            took_s = 0.001
        now_s += took_s
        lent_s += took_s if running else 0.0
        idle_s += took_s if not running else 0.0
        for state in running.values():
            state[1] += took_s
    assert lent_s <= limit * now_s


@pytest.mark.parametrize(("rate", "tokens"), [(100, 5), (20, 20), (5, 100)])
def test_a_stream_of_requests_leaves_the_idle_share_to_the_rollout(rate: float, tokens: int) -> None:
    """Requests without end, with the limit of the slowdown: the rollout's rows are at least 70 % of what it could
    compute in the time that serving alone leaves idle."""
    slo = Objectives(ttft_s=0.5, tpot_s=0.15, max_slowdown=0.15)
    serving, rollout, rows_each = learned(0.002, 0.0), learned(0.012, 0.0001), 32

    def lent_or_idle_s(lend: bool) -> tuple[float, int]:
        rng, now_s, next_s, idle_s, rows_done = random.Random(3), 0.0, 0.0, 0.0, 0
        running: list[list[float]] = []  # first token, time lent, tokens left
        while now_s < 6.0:
            while next_s <= now_s:
                running.append([math.inf, 0.0, rng.expovariate(1 / tokens) + 1])
                next_s += rng.expovariate(rate)
            if running:
                now_s += 0.002
                running = [[min(r[0], now_s), r[1], r[2] - 1] for r in running if r[2] > 1]
            load = ServingLoad(
                last_tokens_s=(now_s,) * len(running), lent_s=tuple((now_s - r[0], r[1]) for r in running)
            )
            slack = slack_s(load, slo, serving, now_s)
            offered = RolloutLoad(running=rows_each if lend else 0, waiting=0, context=0)
            growing = slack == credit_s(load, slo) < math.inf
            if rows := min(rows_each, rows_allowed(slack, slo, rollout, offered, growing=growing)):
                now_s += rollout.predict_s(rows, 0)
                rows_done += rows
                for r in running:
                    r[1] += rollout.predict_s(rows, 0)
            elif not running:
                idle_s += next_s - now_s
                now_s = next_s
        return idle_s, rows_done

    idle_s, _ = lent_or_idle_s(lend=False)
    _, rows_done = lent_or_idle_s(lend=True)
    assert idle_s > 1.0
    assert rows_done >= 0.7 * rows_each * idle_s / rollout.predict_s(rows_each, 0)
