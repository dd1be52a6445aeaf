"""Every role is asked the same sum, one after another, and rewarded for what it says: an environment, an agent with the
OpenAI client, and an agent with a session. `roles` is an option of all of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from windfall.envs.agents.role_session import RoleSession
from windfall.types import Feedback, Task, Turn

LIMIT = 16
"""Tokens of an answer."""


def question(index: int) -> str:
    return f"{index % 10}+{index % 7}-{index % 3}="


def reward(text: str) -> float:
    """Differs between answers, and between roles that say the same only by what follows in a conversation."""
    return sum(text.encode()) % 11 / 10


class AskRoles:
    def __init__(self, seed: int = 0, roles: Sequence[str] = ()) -> None:
        self._roles = roles

    def task(self, index: int) -> Task:
        return Task(id=str(index), prompt=question(index), role=self._roles[0])

    def feedback(self, task: Task, turns: Sequence[Turn]) -> Feedback:
        if len(turns) < len(self._roles):
            return Feedback(observation=str(task.prompt), role=self._roles[len(turns)])
        return Feedback(rewards={turn.role: reward(turn.text) for turn in turns})


def with_openai(task: Mapping[str, Any], roles: Sequence[str]) -> dict[str, Any]:
    from openai import OpenAI

    api, found = OpenAI(), dict[str, float]()
    for role in roles:
        messages: Any = [{"role": "user", "content": question(task["index"])}]
        reply = api.chat.completions.create(model=role, messages=messages, max_tokens=LIMIT)
        found[role] = reward(reply.choices[0].message.content or "")
    return {"rewards": found}


async def with_session(task: Mapping[str, Any], session: RoleSession, roles: Sequence[str]) -> dict[str, Any]:
    prompt = question(task["index"])
    return {"rewards": {role: reward(await session.sample(role, prompt, max_tokens=LIMIT)) for role in roles}}
