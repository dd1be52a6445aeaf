"""Prompts are skipped by how often their last groups had equal rewards, and the same ones after a restart."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from windfall.controller.tasks.selection import LEAST, MAX_PROMPTS, PromptSelection, outcome
from windfall.types import Group, Response, Task


def group(index: int, prompt: str, *rewards: float | None, roles: tuple[str, ...] = ()) -> Group:
    responses = tuple(
        Response(id=f"{index}/{n}", prompt=(1,), tokens=(7,), logprobs=(-1.0,), sampled=(True,), versions=(0,),
                 finish="stop", reward=reward, role=roles[n] if roles else "")
        for n, reward in enumerate(rewards)
    )  # fmt: skip
    return Group(index=index, task=Task(id=str(index), prompt=prompt), responses=responses)


def end_step(selection: PromptSelection, *groups: Group) -> None:
    selection.end_step({g.index: (g.task.prompt, outcome(g)) for g in groups})


def after(*outcomes: tuple[float, ...], prompt: str = "p") -> PromptSelection:
    """The state after one step for each of these groups of the same prompt."""
    selection = PromptSelection(seed=0)
    for index, rewards in enumerate(outcomes):
        end_step(selection, group(index, prompt, *rewards))
    return selection


def share_wanted(selection: PromptSelection, prompt: str = "p", count: int = 4000) -> float:
    return sum(selection.wants(index, prompt) for index in range(count)) / count


def test_outcome_is_judged_within_roles() -> None:
    assert outcome(group(0, "p", 1.0, 1.0, None)) == "easy"
    assert outcome(group(0, "p", 0.0, 0.0)) == "hard"
    assert outcome(group(0, "p", 0.0, 1.0)) == "informative"
    assert outcome(group(0, "p", None, None)) is None
    assert outcome(group(0, "p", 0.0, 1.0, roles=("a", "b"))) == "hard", "one of the roles was not solved"
    assert outcome(group(0, "p", 1.0, 1.0, roles=("a", "b"))) == "easy"


def test_probability_falls_with_the_streak_to_its_floor() -> None:
    easy, hard = (1.0, 1.0), (0.0, 0.0)
    assert share_wanted(after()) == 1.0
    assert share_wanted(after(easy)) == pytest.approx(0.5, abs=0.03)
    twice = after(easy, easy)
    assert share_wanted(twice) == pytest.approx(twice.probability("easy", 2), abs=0.03)
    assert 0.2 < twice.probability("easy", 2) < 0.3
    assert share_wanted(after(*[easy] * 40)) == pytest.approx(LEAST["easy"], abs=0.02)
    assert share_wanted(after(*[hard] * 40)) == pytest.approx(LEAST["hard"], abs=0.03)
    assert share_wanted(after(*[easy] * 3), "another prompt") == 1.0


def test_informative_group_ends_the_streak_and_another_kind_restarts_it() -> None:
    easy, hard, both = (1.0, 1.0), (0.0, 0.0), (0.0, 1.0)
    assert share_wanted(after(easy, easy, both)) == 1.0
    assert share_wanted(after(easy, easy, easy, hard)) == pytest.approx(0.5, abs=0.05)


def test_probabilities_move_toward_the_target_shares_once_prompts_repeat() -> None:
    selection = PromptSelection(seed=0)
    # The first epoch: all of them solved, none seen before.
    end_step(selection, *(group(index, str(index), 1.0, 1.0) for index in range(8)))
    assert selection.describe()["prompt_probability"] == {"easy": 0.5, "hard": 0.5}
    for step in range(1, 4):  # too many easy groups, no hard ones
        end_step(selection, group(step, "0", 1.0, 1.0))
    assert selection.describe()["prompt_probability"] == {"easy": 0.47, "hard": 0.53}


def test_order_in_which_groups_end_does_not_matter() -> None:
    """It depends on the workers, and must not decide what is drawn."""
    found = [group(0, "p", 1.0, 1.0), group(1, "p", 0.0, 1.0), group(2, "q", 0.0, 0.0), group(3, "q", None)]
    first, second = PromptSelection(seed=0), PromptSelection(seed=0)
    end_step(first, *found)
    end_step(second, *(found[n] for n in (2, 0, 3, 1)))
    assert first.state == second.state
    assert share_wanted(first) == 1.0, "the informative one came last"
    assert share_wanted(first, "q") == pytest.approx(0.5, abs=0.03)


def test_skipped_prompts_are_counted_by_kind() -> None:
    selection = after((1.0, 1.0))
    selection.skip("p")
    assert selection.describe()["skipped_prompts"] == {"easy": 1, "hard": 0}


Step = list[tuple[int, list[float]]]
steps = st.lists(st.lists(st.tuples(st.integers(0, 5), st.sampled_from([[0.0], [1.0], [0.0, 1.0]])), max_size=6))


@given(first=steps, second=steps)
def test_restored_selection_decides_as_before(first: list[Step], second: list[Step]) -> None:
    calm, interrupted = PromptSelection(seed=3), PromptSelection(seed=3)

    def train(selection: PromptSelection, parts: list[Step]) -> None:
        for step in parts:
            groups = []
            for index, (prompt, rewards) in enumerate(step):
                if selection.wants(index, str(prompt)):
                    groups.append(group(index, str(prompt), *rewards))
                else:
                    selection.skip(str(prompt))
            end_step(selection, *groups)
            selection.skipped.clear()

    train(calm, [*first, *second])
    train(interrupted, first)
    resumed = PromptSelection(seed=3)
    resumed.restore(interrupted.state)
    assert resumed.state == interrupted.state
    end_step(interrupted, group(0, "0", 1.0))  # a step that is lost
    interrupted.restore(resumed.state)
    train(interrupted, second)
    train(resumed, second)
    assert resumed.state == calm.state == interrupted.state
    assert all(0 <= number < 1 << 56 for number in calm.state), "a checkpoint accepts it"


def test_memory_is_bounded() -> None:
    selection = PromptSelection(seed=0)
    end_step(selection, *(group(index, str(index), 0.0, 0.0) for index in range(MAX_PROMPTS + 100)))
    assert len(selection.state) == MAX_PROMPTS + 2
    assert share_wanted(selection, "0") == 1.0, "the least recent are forgotten"
    assert share_wanted(selection, str(MAX_PROMPTS)) < 0.6
