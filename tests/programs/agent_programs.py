"""Agents for tests. They use only the standard library, and run in processes of their own."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any


def post(path: str, **body: Any) -> Any:
    headers = {"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}", "Content-Type": "application/json"}
    url = os.environ["OPENAI_BASE_URL"] + path
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)


def ask(messages: list[Any], max_tokens: int = 8, **more: Any) -> str:
    answer = post("/chat/completions", model="any", messages=messages, max_tokens=max_tokens, **more)
    return answer["choices"][0]["message"]["content"]


def talk(task: dict[str, Any], folder: str = "", pause_s: float = 0.0) -> float:
    """Three turns, then an edited history: two segments. The reward is the share of even characters. Says in a file
    that it has begun, and which turns it has had."""
    messages: list[Any] = [{"role": "user", "content": f"{task['index']}+{task['sibling']}="}]
    said = []
    for turn in range(3):
        note(folder, task, turn)
        said.append(ask(messages))
        messages += [{"role": "assistant", "content": said[-1]}, {"role": "user", "content": "more"}]
        time.sleep(pause_s)
    said.append(ask(messages[-1:], 12))
    text = "".join(said)
    return sum(ord(c) % 2 == 0 for c in text) / max(1, len(text))


async def argues(task: dict[str, Any], session: Any, folder: str = "") -> dict[str, Any]:
    """Two roles speak twice each, in conversations of their own, and get rewards of their own. With a folder, the
    agent ends in the middle when it is first started."""
    said = []
    for turn in range(2):
        for role in (":pro", ":con"):
            said.append(await session.sample(role, f"{task['index']}{role}{turn}", max_tokens=6))
            begun = Path(folder or "/", f"begun-{task['index']}-{task['sibling']}")
            if folder and len(said) == 3 and not begun.exists():
                begun.touch()
                os._exit(3)
    return {"rewards": {":pro": float(len(said[0])), ":con": float(len(said[1]))}}


def uses_tools(task: dict[str, Any], folder: str = "", pause_s: float = 0.0) -> float:
    """Three calls of a tool, which the policy must make. The reward is the mean of their arguments."""
    tool = {"name": "f", "description": "Doubles a number.", "parameters": {"type": "object", "properties": {}}}
    messages: list[Any] = [{"role": "user", "content": f"{task['index']}+{task['sibling']}="}]
    arguments = []
    for turn in range(3):
        note(folder, task, turn)
        tools = [{"type": "function", "function": tool}]
        answer = post("/chat/completions", messages=messages, tools=tools, max_tokens=16)["choices"][0]
        (call,) = answer["message"]["tool_calls"]
        arguments.append(json.loads(call["function"]["arguments"])["a"])
        result = {"role": "tool", "tool_call_id": call["id"], "content": str(2 * arguments[-1])}
        messages += [answer["message"], result]
        time.sleep(pause_s)
    return sum(arguments) / 27


def note(folder: str, task: dict[str, Any], turn: int) -> None:
    if folder:
        with (Path(folder) / f"{task['index']}-{task['sibling']}").open("a") as file:
            file.write(f"{os.getpid()} {turn}\n")


def dies_once(task: dict[str, Any], folder: str) -> float:
    """As `talk`, but its process is killed in the middle, the first time."""
    mark = Path(folder) / f"died-{task['index']}-{task['sibling']}"
    if not mark.exists():
        messages: list[Any] = [{"role": "user", "content": f"{task['index']}+{task['sibling']}="}]
        messages += [{"role": "assistant", "content": ask(messages)}, {"role": "user", "content": "more"}]
        ask(messages)
        mark.touch()
        os.kill(os.getpid(), 9)
    return talk(task)


def sums(task: dict[str, Any]) -> float:
    """As examples/sums_agent.py, without OpenAI's client, which takes longer than the rest."""
    rng = random.Random(f"{task['held_out']}/{task['index']}")
    first = total = rng.randint(0, 99)
    changes = list[int]()
    for _ in range(rng.randint(2, 6)):
        changes.append(rng.randint(-total, 99 - total))
        total += changes[-1]
    total, messages = first, list[Any]()
    question = f"{first}{''.join(f'{change:+d}' for change in changes)}="
    for solved, change in enumerate(changes):
        messages.append({"role": "user", "content": f"{question}{total}{change:+d}="})
        messages.append({"role": "assistant", "content": ask(messages, 4, stop=[";"])})
        total, question = total + change, ""
        if messages[-1]["content"] != str(total):
            return solved / len(changes)
    return 1.0


def wrong_ids(task: dict[str, Any]) -> float:
    """Sends ids that the model does not have, then goes on. The reward is 1 if only that call was refused."""
    try:
        post("/completions", prompt=[5, 6, 1_000_000], max_tokens=4)
    except urllib.error.HTTPError as e:
        ask([{"role": "user", "content": "1+2="}])
        return float(e.code == 400)
    return 0.0


def parallel(task: dict[str, Any]) -> float:
    """Three calls at the same time, none with a limit. The reward is the share of those that were answered."""
    with ThreadPoolExecutor(3) as pool:
        calls = [
            pool.submit(post, "/chat/completions", messages=[{"role": "user", "content": f"{n}+1="}]) for n in range(3)
        ]
    return sum(call.exception() is None for call in calls) / 3


def stops_reading(task: dict[str, Any], characters: int = 4) -> float:
    """Closes a stream after a few characters."""
    headers = {"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}"}
    body = {"messages": [{"role": "user", "content": "1+2+3+4+5="}], "stream": True, "max_tokens": 100}
    request = urllib.request.Request(
        os.environ["OPENAI_BASE_URL"] + "/chat/completions", json.dumps(body).encode(), headers
    )
    text = ""
    with urllib.request.urlopen(request, timeout=60) as answer:
        for line in answer:
            if line.startswith(b"data: {"):
                text += json.loads(line[6:])["choices"][0]["delta"].get("content") or ""
            if len(text) >= characters:
                break
    return 0.5


async def posts(task: dict[str, Any]) -> None:
    ask([{"role": "user", "content": "1+1="}])
    post("/reward", reward=0.25)


def posts_and_returns(task: dict[str, Any]) -> float:
    """Its role `:pro` has the reward that it posts, and others the one that it returns."""
    for role in (":pro", ":con"):
        post("/chat/completions", model=role, messages=[{"role": "user", "content": "1+2="}], max_tokens=4)
    post("/reward", rewards={":pro": 0.75})
    return 0.5


def calls_nothing(task: dict[str, Any]) -> float:
    return 1.0


def answers(task: dict[str, Any]) -> str:
    return ask([{"role": "user", "content": task["prompt"]}], 60)


def fails(task: dict[str, Any], how: str) -> Any:
    print(f"about to fail: {how}")
    ask([{"role": "user", "content": "1+1="}])
    if how == "raise":
        raise RuntimeError("no such tool")
    if how == "sleep":
        subprocess.Popen(["sleep", "987"])
        time.sleep(60)
    if how == "memory":
        return len(bytearray(4 << 30))
    if how == "nothing":
        return None
    if how == "secrets":
        held = [f"{k}={v}" for k, v in os.environ.items() if "WINDFALL" in k or "hush" in v]
        return 0.0 if held else 1.0
    if how == "ramble":
        while True:
            ask([{"role": "user", "content": "1+1="}])
    return how


if __name__ == "__main__":
    print("a line before")
    print(json.dumps({"reward": talk(json.load(sys.stdin))}))
