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


def test_responses_leave_gpus_that_the_other_pipeline_wants() -> None:
    gpus = Gpus([Pipeline("4B GSM8K", 0), Pipeline("4B GSM8K", 5)], 1.0)
    rows = [[table.Row(300.0, 100.0 * (gpu + n + 1)) for n in range(3)] for gpu in range(GPUS)]
    gpus.pipelines[0].phases[0] = [table._parts(there, 0.01) for there in rows]
    gpus.pipelines[1].phases = [[[Work("train", 12.0)] for _ in range(GPUS)]]
    new = gpus.merged(0)
    assert new is not None
    [[tail]] = [parts for parts in new.pipelines[0].phases[0] if parts]
    assert sorted(tail.rows_left()) == sorted(row for there in rows for row in there), "none is lost"
    tokens, moved = sum(row.left for there in rows for row in there), 3 * (GPUS - 1)
    steps = 600.0 + table.EACH * tokens + table.PREFILL * 300.0 * moved
    assert tail.left_s == pytest.approx(steps * table._unit_s("4B GSM8K"))
    assert [len(parts) for parts in gpus.pipelines[0].phases[0]] == [1] * GPUS, "a copy"
    assert new.merged(0) is None, "they stay there"
    gpus.pipelines[1].phases = [[[] for _ in range(GPUS)]]
    assert gpus.merged(0) is None, "no other pipeline wants the GPUs"


def test_responses_of_a_part_that_has_begun() -> None:
    [first, *_] = table._parts([table.Row(256.0, 10.0 * (n + 1)) for n in range(20)])
    assert first.tokens == 40.0
    first.left_s /= 2
    assert first.rows_left()[0] == table.Row(276.0, 10.0), "the first two have ended"
    assert len(first.rows_left()) == 18


@pytest.mark.parametrize("policy", table.POLICIES.values(), ids=table.POLICIES)
@pytest.mark.slow
def test_no_pipeline_is_faster_beside_another_one(policy: Policy) -> None:
    speeds = relative_speeds(("0.6B GSM8K", "4B GSM8K"), policy, 4, 1)
    assert all(0.3 < speed <= 1.01 for speed in speeds)
    assert sum(speeds) > 0.95


def test_stages_at_once_gain_only_what_was_measured() -> None:
    pair = ("0.6B GSM8K", "0.6B GSM8K")
    sums = [sum(relative_speeds(pair, policy, 8, 1)) for policy in (table.turns, table.greedy)]
    assert sum(relative_speeds(pair, table.greedy, 8, 1, gains=0.0)) == pytest.approx(sums[0])
    assert sums[0] < sums[1] < 1.17 * sums[0] + 0.02
