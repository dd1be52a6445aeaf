"""Every role is asked the same sum, one after another, and rewarded for what it says: an environment, an agent with the
OpenAI client, and an agent with a session. Options of all of them: `roles`, and `notes`, a file that gets a line for
everything that is said."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from windfall.envs.agents.role_session import RoleSession
from windfall.types import Feedback, Task, Turn

LIMIT = 16
"""Tokens of an answer."""


def question(index: int) -> str:
    return f"{index % 10}+{index % 7}-{index % 3}="


def judge(notes: str, prompt: str, said: Sequence[tuple[str, str]]) -> dict[str, float]:
    """Rewards by role, which differ between answers. `said`: roles and their texts."""
    lines = [json.dumps({"role": role, "prompt": prompt, "text": text}) for role, text in said]
    if notes:
        with open(notes, "a") as file:
            file.write("".join(f"{line}\n" for line in lines))
    return {role: sum(text.encode()) % 11 / 10 for role, text in said}


class AskRoles:
    def __init__(self, seed: int = 0, roles: Sequence[str] = (), notes: str = "") -> None:
        self._roles = roles
        self._notes = notes

    def task(self, index: int) -> Task:
        return Task(id=str(index), prompt=question(index), role=self._roles[0])

    def feedback(self, task: Task, turns: Sequence[Turn]) -> Feedback:
        if len(turns) < len(self._roles):
            return Feedback(observation=str(task.prompt), role=self._roles[len(turns)])
        return Feedback(rewards=judge(self._notes, str(task.prompt), [(turn.role, turn.text) for turn in turns]))


def with_openai(task: Mapping[str, Any], roles: Sequence[str], notes: str = "") -> dict[str, Any]:
    from openai import OpenAI

    api, prompt, said = OpenAI(), question(task["index"]), list[tuple[str, str]]()
    for role in roles:
        reply = api.chat.completions.create(
            model=role, messages=[{"role": "user", "content": prompt}], max_tokens=LIMIT
        )
        said.append((role, reply.choices[0].message.content or ""))
    return {"rewards": judge(notes, prompt, said)}


async def with_session(
    task: Mapping[str, Any], session: RoleSession, roles: Sequence[str], notes: str = ""
) -> dict[str, Any]:
    prompt = question(task["index"])
    said = [(role, await session.sample(role, prompt, max_tokens=LIMIT)) for role in roles]
    return {"rewards": judge(notes, prompt, said)}
