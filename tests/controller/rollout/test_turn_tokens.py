"""rollout.turn_tokens: a turn that reaches its limit ends there, and the environment answers as to any other turn."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Sequence
from pathlib import Path

from tests.support.engines.scripted_engine import Asks, Scripted, rolling, run
from windfall.controller.ledger.journal_format import TokenRun, TurnGraded
from windfall.types import Feedback, Sampling, Task, Turn


async def three_turns(task: Task, turns: Sequence[Turn]) -> Feedback:
    return Feedback(reward=1.0) if len(turns) == 3 else Feedback(observation="..", reward=0.25)


def sampled(response: object) -> str:
    return "".join(chr(t) for t, own in zip(response.tokens, response.sampled, strict=True) if own)  # type: ignore[attr-defined]


def test_turns_end_at_their_limit(tmp_path: Path) -> None:
    engine, env = Scripted(lambda request: "abcdef"), Asks(three_turns)
    groups, rollout = run(engine, env, tmp_path, tasks=[0], turn_tokens=2)
    (response,) = groups[0].responses
    assert sampled(response) == "ababab"
    assert (response.reward, response.turns) == (1.0, 3)
    assert [request.max_tokens for request in engine.requests] == [2, 2, 2]
    assert [turn.text for turn in env.heard[-1][1]] == ["ab", "ab", "ab"]
    assert rollout.dispatch.ledger.counts.discarded == 0


def test_a_turn_may_end_before_its_limit(tmp_path: Path) -> None:
    groups, _ = run(Scripted(lambda request: "a"), Asks(three_turns), tmp_path, tasks=[0], turn_tokens=9)
    assert groups[0].responses[0].finish == "stop"
    assert groups[0].rewards == (1.0,)


def test_the_limit_of_the_response_holds_too(tmp_path: Path) -> None:
    engine = Scripted(lambda request: "abcdef")
    groups, _ = run(engine, Asks(three_turns), tmp_path, tasks=[0], turn_tokens=4, max_tokens=8)
    (response,) = groups[0].responses
    assert len(response.tokens) == 8
    assert response.finish == "length"
    assert response.reward == 0.25, "what the environment said a response without tokens is worth"


def test_a_restored_response_continues_after_a_turn_that_reached_its_limit(tmp_path: Path) -> None:
    async def main() -> None:
        engine = Scripted(lambda request: "abcdef")
        async with rolling(engine, Asks(three_turns), tmp_path, turn_tokens=2) as rollout:
            first = TokenRun(
                position=0, tokens=array("I", map(ord, "xy")), logprobs=array("f", [0.0, 0.0]), version=0,
                finish="length",
            )  # fmt: skip
            rollout.history = {"0/0": [first, TurnGraded(id="0/0", reward=0.25, observation="..", error="")]}
            (group,) = [g async for g in rollout.groups([0], size=1, sampling=lambda policy: Sampling())]
            assert sampled(group.responses[0]) == "xyabab"
            assert len(engine.requests) == 2

    asyncio.run(main())
