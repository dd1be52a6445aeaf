"""The model of JigsawRL's pairs: no work is lost, policies differ in the direction that their actions say."""

from __future__ import annotations

import pytest

from benchmarks.papers import jigsaw_table as table
from benchmarks.papers.jigsaw_table import BOTH, GPUS, Gpus, Pipeline, Policy, Work, ends, relative_speeds, together


def only_rollout(gpus: Gpus, n: int) -> float:
    return sum(work.left_s for parts in gpus.pipelines[n].phases[0] for work in parts)


def test_one_pipeline_takes_the_time_of_its_stages() -> None:
    steps = [table.step_of("0.6B GSM8K", 17 * n) for n in range(3)]
    expected = [sum(max(sum(w.left_s for w in parts) for parts in phase) for phase in step) for step in steps]
    [ended_s] = ends(["0.6B GSM8K"], table.turns, 3, 0)
    assert ended_s == pytest.approx([sum(expected[: n + 1]) for n in range(3)])
    assert sum(expected) / 3 == pytest.approx(100.0, rel=0.15), "shares are percents of a step"


def test_stages_at_once_have_the_measured_speeds() -> None:
    train, few, many = Work("train", 1.0), Work("rollout", 1.0, 16.0), Work("rollout", 1.0, 64.0)
    assert [together(train, few), together(train, many), together(few, few)] == [1.10, 1.07, 1.17]
    assert together(many, many) == 0.97
    assert together(train, Work("reference", 1.0)) == 1.0
    assert together(few, few, gains=2.0) == pytest.approx(1.34)
    gpus = Gpus([Pipeline("4B AIME", 0), Pipeline("4B AIME", 5)], 1.0)
    before = [only_rollout(gpus, n) for n in range(2)]
    gpus.run([BOTH] * GPUS)
    done = sum(before) - only_rollout(gpus, 0) - only_rollout(gpus, 1)
    assert done == pytest.approx(0.97 * GPUS * gpus.now_s)


def test_merged_tails_are_on_one_gpu_and_the_other_pipeline_on_the_others() -> None:
    gpus = Gpus([Pipeline("4B GSM8K", 0), Pipeline("4B GSM8K", 5)], 1.0)
    assert gpus.merged(0) is None, "it has more than tails"
    gpus.pipelines[0].phases[0] = [[Work("tail", 5.0 + n, 10.0, 0.5)] for n in range(GPUS)]
    gpus.pipelines[1].phases = [[[Work("train", 12.0)] for _ in range(GPUS)]]
    new = gpus.merged(0)
    assert new is not None
    last = GPUS - 1  # it has the longest one
    assert [len(parts) for parts in new.pipelines[0].phases[0]] == [0] * last + [1]
    tail = new.pipelines[0].on(last)
    assert tail is not None
    assert tail.rows == 10.0 * GPUS
    assert tail.left_s == pytest.approx((5.0 + last) * (1 + table.EACH * 40) / (1 + table.EACH * 10) + 0.5 * last)
    assert new.pipelines[1].on(last) is None
    assert only_rollout(new, 1) == pytest.approx(12.0 * GPUS), "training is moved, not dropped"
    assert [work.left_s for [work] in gpus.pipelines[0].phases[0]] == [5.0 + n for n in range(GPUS)], "a copy"


@pytest.mark.parametrize("policy", table.POLICIES.values(), ids=table.POLICIES)
def test_no_pipeline_is_faster_beside_another_one(policy: Policy) -> None:
    speeds = relative_speeds(("0.6B GSM8K", "4B GSM8K"), policy, 4, 1)
    assert all(0.3 < speed <= 1.01 for speed in speeds)
    assert sum(speeds) > 0.95


def test_stages_at_once_gain_only_what_was_measured() -> None:
    pair = ("0.6B GSM8K", "0.6B GSM8K")
    sums = [sum(relative_speeds(pair, policy, 8, 1)) for policy in (table.turns, table.greedy)]
    assert sum(relative_speeds(pair, table.greedy, 8, 1, gains=0.0)) == pytest.approx(sums[0])
    assert sums[0] < sums[1] < 1.17 * sums[0] + 0.02
