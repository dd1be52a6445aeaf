"""An agent that adds up three numbers in two turns. It knows nothing of windfall: it talks to an OpenAI endpoint.

Try it with any endpoint: OPENAI_BASE_URL=... OPENAI_API_KEY=... python examples/sums_agent.py 7
Train it:                 windfall train recipes/agent.toml
"""

from __future__ import annotations

import os
import random
import sys
from typing import Any

from openai import DefaultHttpxClient, OpenAI

HTTP = DefaultHttpxClient()  # made once: every run of the agent is a fork of the process that imported this module


def run(task: dict[str, Any]) -> float:
    """Called once for every response. Returns the reward: the share of right answers."""
    numbers = random.Random(f"{task['held_out']}/{task['index']}")
    a, b, c = (numbers.randint(0, 33) for _ in range(3))
    api, model = OpenAI(http_client=HTTP), os.environ.get("OPENAI_MODEL", "any")
    messages: list[Any] = []
    right = 0
    for question, expected in ((f"{a}+{b}=", a + b), (f"{a + b}+{c}=", a + b + c)):
        messages.append({"role": "user", "content": question})
        answer = api.chat.completions.create(model=model, messages=messages, max_tokens=24).choices[0].message
        messages.append({"role": "assistant", "content": answer.content})
        right += (answer.content or "").rpartition("#")[2].strip() == str(expected)
    return right / 2


if __name__ == "__main__":
    print(run({"index": int(sys.argv[1]), "held_out": False}))
