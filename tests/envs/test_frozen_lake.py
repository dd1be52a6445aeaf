"""FrozenLake as text: the best walk wins, any text is accepted, and sessions can be replayed, also on slippery ice."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Any

import pytest

from windfall import envs
from windfall.envs.base import HELD_OUT
from windfall.envs.sessions import Stateful
from windfall.errors import WindfallError
from windfall.types import Feedback, Task, Turn

pytest.importorskip("gymnasium", reason="FrozenLake is tested with gymnasium; the extra gymnasium installs it")
STEPS = {"left": (0, -1), "down": (1, 0), "right": (0, 1), "up": (-1, 0)}


def lake(**options: Any) -> Any:
    return envs.build({"name": "custom", "factory": "examples.frozen_lake:FrozenLake", "options": options}, seed=3)


def best_walk(rows: list[str]) -> list[str]:
    queue, seen = deque([((0, 0), list[str]())]), {(0, 0)}
    while queue:
        (y, x), walk = queue.popleft()
        if rows[y][x] == "G":
            return walk
        for word, (dy, dx) in STEPS.items():
            to = (y + dy, x + dx)
            if min(to) >= 0 and max(to) < len(rows) and to not in seen and rows[to[0]][to[1]] != "H":
                seen.add(to)
                queue.append((to, [*walk, word]))
    raise AssertionError("no walk")


async def play(env: Any, task: Task, texts: list[str]) -> tuple[list[Turn], Feedback]:
    turns, feedback = list[Turn](), Feedback()
    for text in texts:
        feedback = await env.feedback(task, [*turns, Turn(text=text)])
        turns.append(Turn(text=text, observation=feedback.observation))
        if feedback.observation is None:
            break
    return turns, feedback


def test_the_best_walk_wins_and_a_hole_loses() -> None:
    env = lake(max_turns=30)
    assert isinstance(env, Stateful)
    seen = set[str]()
    for index in (0, 1, 2, HELD_OUT):
        task = env.task(index)
        assert task == lake(max_turns=30).task(index)
        seen.add("".join(task.answer["map"]))
        walk = best_walk(task.answer["map"])
        turns, feedback = asyncio.run(play(env, task, [f"I go {word.upper()}." for word in walk]))
        assert (feedback, len(turns)) == (Feedback(reward=1.0), len(walk))
    assert len(seen) == 4


def test_any_text_uses_up_a_turn() -> None:
    env = lake(max_turns=3)
    turns, feedback = asyncio.run(play(env, env.task(0), ["", "\0 upp \ud7ff", "left or up: I say left"]))
    assert "Say left, down, right or up." in str(turns[0].observation)
    assert turns[1].observation is not None
    assert "Say left" not in turns[1].observation
    assert feedback == Feedback(reward=0.0)


def test_slippery_ice_is_replayed() -> None:
    first, texts = lake(slippery=True, max_turns=50, size=8, frozen=0.95), ["right", "down"] * 4
    task = first.task(5)
    turns, _ = asyncio.run(play(first, task, texts))
    assert len(turns) > 3
    fresh = lake(slippery=True, max_turns=50, size=8, frozen=0.95)
    again = asyncio.run(fresh.feedback(task, [*turns[:-1], Turn(text=turns[-1].text)]))
    assert again.observation == turns[-1].observation
    assert fresh.replayed_turns == len(turns) - 1


def test_moves_and_view_for_a_model_without_language() -> None:
    env = lake(moves=["1", "2", "3", "4"], view="neighbors", rules=False, max_turns=30)
    task = env.task(0)
    rows, prompt = task.answer["map"], str(task.prompt)
    assert prompt == f"1:- 2:{rows[1][0]} 3:{rows[0][1]} 4:-\n"
    digits = dict(zip(STEPS, "1234", strict=True))
    turns, feedback = asyncio.run(play(env, task, ["0", *(digits[word] for word in best_walk(rows))]))
    assert feedback == Feedback(reward=1.0)
    assert str(turns[0].observation).strip() == prompt.strip(), "no move was named"
    letters = str(lake(moves=["1", "2", "3", "4"], fields="00=9+", view="neighbors", rules=False).task(0).prompt)
    assert letters == prompt.translate(str.maketrans("SFHG-", "00=9+"))
    explained = str(lake(moves=["1", "2", "3", "4"]).task(0).prompt)
    assert "1, 2, 3 or 4 (for left, down, right or up)" in explained
    assert "over the ice (i)" in str(lake(fields="siogx").task(0).prompt)
    assert "H" not in str(lake(fields="siogx").task(0).prompt).splitlines()[-1]


def test_moves_must_differ() -> None:
    with pytest.raises(WindfallError, match="the moves are a, a, b, c"):
        lake(moves=["a", "a", "b", "c"])
