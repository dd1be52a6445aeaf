"""Groups that are trained on again: the newest ones, never above their age, and as many as the share says."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from windfall.controller.step_batch import StepBatch
from windfall.controller.tasks.selection import Replay
from windfall.recipe.sections import RolloutSection
from windfall.types import Group, Response, Task


def group(index: int, *versions: int) -> Group:
    """A group with one response for each version, of four tokens each."""
    responses = tuple(
        Response(
            id=f"{index}/{n}", prompt=(1,), tokens=(7,) * 4, logprobs=(-1.0,) * 4, sampled=(True,) * 4,
            versions=(version,) * 4, finish="stop", reward=float(n),
        )
        for n, version in enumerate(versions)
    )  # fmt: skip
    return Group(index=index, task=Task(id=str(index), prompt=str(index)), responses=responses)


def test_newest_groups_are_replayed_in_the_order_in_which_they_were_trained_on() -> None:
    replay = Replay(groups=3, age=9)
    replay.groups.extend(group(n, 0, 0) for n in (4, 2, 7, 5))
    assert [g.index for g in replay.take(version=1)] == [2, 7, 5]
    assert [g.index for g in replay.take(version=2)] == [2, 7, 5], "they may be replayed again"


def test_group_with_a_response_above_the_age_is_forgotten() -> None:
    replay = Replay(groups=3, age=2)
    replay.groups.extend([group(0, 1, 3), group(1, 2, 3)])
    assert [g.index for g in replay.take(version=4)] == [1]
    assert [g.index for g in replay.groups] == [1], "the journal does not need to keep the other one"


def test_share_of_zero_keeps_nothing() -> None:
    options = RolloutSection()
    replay = Replay(groups=options.groups - options.fresh_groups, age=8)
    replay.groups.append(group(0, 0))
    assert replay.take(0) == []


@given(groups=st.integers(1, 64), replay=st.floats(0, 1, exclude_max=True))
def test_some_group_is_always_fresh(groups: int, replay: float) -> None:
    section = RolloutSection(groups=groups, replay=replay)
    assert 1 <= section.fresh_groups <= groups
    assert abs(groups - section.fresh_groups - groups * replay) <= 1


@given(
    steps=st.lists(st.lists(st.integers(0, 3), max_size=4), max_size=12), most=st.integers(0, 6), age=st.integers(1, 5)
)
def test_what_is_replayed_was_trained_on_and_is_not_too_old(steps: list[list[int]], most: int, age: int) -> None:
    """`steps`: the lags of the fresh groups of each step."""
    replay, trained, index = Replay(groups=most, age=age), dict[int, Group](), 0
    for version, lags in enumerate(steps):
        taken = replay.take(version)
        assert len(taken) <= most
        assert all(trained[g.index] is g and version - min(g.responses[0].versions) <= age for g in taken)
        fresh = [group(index + n, max(0, version - lag)) for n, lag in enumerate(lags)]
        index += len(fresh)
        replay.groups.extend(fresh)
        trained |= {g.index: g for g in fresh}


def test_batch_trains_on_replayed_groups_first_and_counts_them_apart() -> None:
    batch = StepBatch()
    batch.replay(group(0, 1, 1), micro_tokens=10)
    batch.add(group(9, 4, 4), 2, micro_tokens=10)
    assert [[g.index for g in pack] for pack in batch.micro_batches] == [[0], [9]]
    assert batch.hand_over(ready=0)[0].index == 0
    assert batch.spare > 100, "the trainer did not need a finished group"
    assert (batch.tokens, batch.rewards, [*batch.lengths], [*batch.outcomes]) == (8, [0.0, 1.0], [9], [9])
    assert batch.describe()["groups"] == 2
    assert batch.describe_staleness(4, 0)["staleness_max"] == 0
    assert batch.describe_replay(4) == {"replayed": 1, "replayed_tokens": 8, "replayed_age": 3}
