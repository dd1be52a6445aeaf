"""From tasks to groups: every episode comes out once, grading does not block generation, turns and limits."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from examples.guess import Guess
from tests.support.engines.scripted_engine import STOP, Asks, Scripted, run
from windfall.controller.rollout.stream import seed_of
from windfall.events.log import read
from windfall.types import Feedback, Request, Task, Turn


async def by_length(task: Task, turns: Sequence[Turn]) -> Feedback:
    return Feedback(reward=float(len(turns[-1].text)))


@settings(deadline=None, max_examples=25)
@given(
    lengths=st.lists(st.lists(st.integers(0, 6), min_size=2, max_size=2), min_size=1, max_size=5),
    waits=st.lists(st.integers(0, 4), min_size=10, max_size=10),
    first=st.integers(0, 50),
)
def test_every_episode_comes_out_once(
    tmp_path_factory: pytest.TempPathFactory, lengths: list[list[int]], waits: list[int], first: int
) -> None:
    def script(request: Request) -> str:
        index, sibling = map(int, request.id.split("/"))
        return "x" * lengths[index - first][sibling]

    async def slowly(task: Task, turns: Sequence[Turn]) -> Feedback:
        for _ in range(waits[(task.answer - first) * 2 % 10]):
            await asyncio.sleep(0)
        return await by_length(task, turns)

    engine, env = Scripted(script), Asks(slowly)
    tasks = range(first, first + len(lengths))
    groups, rollout = run(engine, env, tmp_path_factory.getbasetemp(), tasks=tasks, size=2)
    assert sorted(g.index for g in groups) == list(tasks)
    for g in groups:
        assert [r.id for r in g.responses] == [f"{g.index}/0", f"{g.index}/1"]
        assert [r.tokens for r in g.responses] == [(ord("x"),) * n + (STOP,) for n in lengths[g.index - first]]
        assert g.rewards == tuple(map(float, lengths[g.index - first]))
        assert g.task == env.task(g.index)
    assert rollout.sampled_tokens == sum(n + 1 for row in lengths for n in row)
    assert len({r.seed for r in engine.requests}) == len(env.heard) == 2 * len(lengths)
    assert (rollout.failures.missing, len(engine), engine.cancelled) == (0, 0, [])


def test_seed_of_a_response_never_changes() -> None:
    assert seed_of(3, 14, 1) == 5120496982974341400
    assert len({seed_of(s, t, i) for s in range(3) for t in (1, 11, 111) for i in range(12)}) == 108


def test_groups_come_out_as_they_complete(tmp_path: Path) -> None:
    def script(request: Request) -> str:
        return "x" * (30 - 10 * int(request.id[0]))

    assert [g.index for g in run(Scripted(script), Asks(by_length), tmp_path, tasks=[0, 1, 2])[0]] == [2, 1, 0]


def test_slow_reward_does_not_delay_tokens(tmp_path: Path) -> None:
    """The reward of the short response arrives only after the last token of the long one."""
    last_token = threading.Event()
    engine = Scripted(lambda request: "x" * (1 if request.id == "0/0" else 50))
    engine.stepped = lambda: len(engine) or last_token.set()

    async def judge(task: Task, turns: Sequence[Turn]) -> Feedback:
        while not last_token.is_set():
            await asyncio.sleep(0.001)
        return await by_length(task, turns)

    groups, rollout = run(engine, Asks(judge), tmp_path, tasks=[0, 1], reward_timeout_s=60.0)
    assert {g.index: g.rewards for g in groups} == {0: (1.0,), 1: (50.0,)}
    assert rollout.failures.missing == 0


def test_failed_reward_is_missing_and_counted(tmp_path: Path) -> None:
    async def judge(task: Task, turns: Sequence[Turn]) -> Feedback:
        if turns[-1].text == "bad":
            raise ConnectionError("the grader is away")
        return await by_length(task, turns)

    env = Asks(judge)
    engine = Scripted(lambda request: "bad" if request.id == "4/1" else "good!")
    groups, rollout = run(engine, env, tmp_path, tasks=[4], size=3, reward_tries=2)
    assert [r.reward for r in groups[0].responses] == [5.0, None, 5.0]
    assert groups[0].rewards == (5.0, 5.0)
    assert rollout.failures.missing == 1
    assert len(env.heard) == 4
    (event,) = [e for e in read(tmp_path / "events.jsonl") if e["name"] == "reward_missing"]
    assert event["response"] == "4/1"
    assert "the grader is away" in event["error"]


async def twice(task: Task, turns: Sequence[Turn]) -> Feedback:
    return Feedback(observation="no") if len(turns) == 1 else Feedback(reward=0.75)


def test_second_turn_continues_after_the_observation(tmp_path: Path) -> None:
    engine, env = Scripted(lambda request: "ab" if request.position == 0 else "c"), Asks(twice)
    groups, rollout = run(engine, env, tmp_path, tasks=[7], max_tokens=9)
    first, second = engine.requests
    assert second.prompt == (*first.prompt, ord("a"), ord("b"), STOP, ord("n"), ord("o"))
    assert (second.id, second.seed, second.position, second.max_tokens) == (first.id, first.seed, 5, 4)
    (r,) = groups[0].responses
    assert r.tokens == (ord("a"), ord("b"), STOP, ord("n"), ord("o"), ord("c"), STOP)
    assert r.sampled == (True, True, True, False, False, True, True)
    assert r.logprobs == (-ord("a") / 256, -ord("b") / 256, 0.0, 0.0, 0.0, -ord("c") / 256, 0.0)
    assert r.versions == (0, 0, 0, -1, -1, 0, 0)
    assert (r.reward, r.turns, r.finish, r.sampled_count, rollout.sampled_tokens) == (0.75, 2, "stop", 5, 5)
    assert env.heard[-1][1] == (Turn(text="ab", observation="no"), Turn(text="c"))


@pytest.mark.parametrize(
    ("max_tokens", "tokens", "reward"),
    [
        (2, "ab", None),  # cut off within the first turn, so the environment gives no reward
        (5, "ab\0", None),  # no room for an answer to the observation
        (6, "ab\0noc", 0.75),  # room for one token of the answer, and that is graded
        (7, "ab\0noc\0", 0.75),
    ],
)
@pytest.mark.parametrize("out_of_tokens", ["missing", 0.0, -1.0])
def test_token_limit_covers_all_turns(
    tmp_path: Path, max_tokens: int, tokens: str, reward: float | None, out_of_tokens: Any
) -> None:
    engine = Scripted(lambda request: "ab" if request.position == 0 else "c")
    options = {"max_tokens": max_tokens, "out_of_tokens": out_of_tokens}
    groups, rollout = run(engine, Asks(twice), tmp_path, tasks=[7], **options)
    if reward is None and out_of_tokens != "missing":
        reward = out_of_tokens
    (r,) = groups[0].responses
    assert r.tokens == tuple(map(ord, tokens))
    assert (r.reward, r.finish) == (reward, "stop" if max_tokens == 7 else "length")
    assert rollout.failures.missing == (reward is None)
    if reward is None:
        (event,) = [e for e in read(tmp_path / "events.jsonl") if e["name"] == "reward_missing"]
        assert "rollout.max_tokens" in event["error"]


@pytest.mark.parametrize(("max_tokens", "tokens"), [(2, "ab"), (5, "ab\0")])
def test_response_that_runs_out_of_tokens_gets_the_reward_of_its_last_turn(
    tmp_path: Path, max_tokens: int, tokens: str
) -> None:
    async def judge(task: Task, turns: Sequence[Turn]) -> Feedback:
        return Feedback(observation="no", reward=-0.5) if len(turns) == 1 else Feedback(reward=0.75)

    engine = Scripted(lambda request: "ab" if request.position == 0 else "c")
    groups, rollout = run(engine, Asks(judge), tmp_path, tasks=[7], max_tokens=max_tokens)
    (r,) = groups[0].responses
    assert (r.tokens, r.reward, r.finish) == (tuple(map(ord, tokens)), -0.5, "length")
    assert rollout.failures.missing == 0


def test_guess_gives_no_reward_for_running_out_of_tokens(tmp_path: Path) -> None:
    """The guess is never right, in turns of 3 tokens."""
    guess: Any = Guess(low=1, high=9, max_turns=50)
    groups, rollout = run(Scripted(lambda request: "0"), guess, tmp_path, tasks=[0], max_tokens=40)
    assert groups[0].responses[0].turns > 2
    assert (groups[0].rewards, rollout.failures.missing) == ((0.0,), 0)


def test_tasks_that_arrive_late_and_close_together_are_all_opened(tmp_path: Path) -> None:
    """The environment is slow, and then produces several tasks at once."""

    class Slow(Asks):
        async def task(self, index: int) -> Task:  # pyright: ignore[reportIncompatibleMethodOverride]
            await asyncio.sleep(0.4 if index < 3 else 0.41)
            return super().task(index)

    groups, _ = run(Scripted(lambda request: "x"), Slow(by_length), tmp_path, tasks=range(6))
    assert sorted(g.index for g in groups) == list(range(6))
