"""An agent that asks for a chain of sums, one per turn, and checks every answer. It knows nothing of windfall: it talks
to an OpenAI endpoint.

    agent       37+58-12=37+58=
    policy      95                  up to the stop string ";"
    agent       95-12=
    policy      83

Train it: windfall train recipes/agent.toml
"""

from __future__ import annotations

import os
import random
from typing import Any

from openai import DefaultHttpxClient, OpenAI

HTTP = DefaultHttpxClient()  # made once: every run of the agent is a fork of the process that imported this module


def run(task: dict[str, Any]) -> float:
    """Called once for every response. Returns the reward: the share of sums that were right up to the first mistake."""
    first, changes = make_task(random.Random(f"{task['held_out']}/{task['index']}"))
    api, model = OpenAI(http_client=HTTP), os.environ["OPENAI_MODEL"]
    total, messages = first, list[Any]()
    question = f"{first}{''.join(f'{change:+d}' for change in changes)}="
    for solved, change in enumerate(changes):
        messages.append({"role": "user", "content": f"{question}{total}{change:+d}="})
        reply = api.chat.completions.create(model=model, messages=messages, max_tokens=4, stop=[";"])
        answer = reply.choices[0].message.content or ""
        total, question = total + change, ""
        if answer != str(total):
            return solved / len(changes)
        messages.append({"role": "assistant", "content": answer})
    return 1.0


def make_task(rng: random.Random) -> tuple[int, list[int]]:
    """A number, and what is added to it step by step. All results are between 0 and 99."""
    first = total = rng.randint(0, 99)
    changes: list[int] = []
    for _ in range(rng.randint(2, 6)):
        changes.append(rng.randint(-total, 99 - total))
        total += changes[-1]
    return first, changes
