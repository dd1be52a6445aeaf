"""An environment with sessions, for tests: walk to the light. Only a session knows its position."""

from __future__ import annotations

import asyncio
import os
import random
from typing import Any

from windfall.types import Feedback, Task


class Walk:
    def __init__(self, env: Lighthouse, task: Task) -> None:
        self._env, self._goal, self._at = env, task.answer, 0

    async def step(self, text: str) -> Feedback:
        await asyncio.sleep(0)
        if text == "crash":
            raise RuntimeError("the walker fell")
        if text == "wait":
            await asyncio.sleep(0.3)
        if text == "hoard":
            bytes(3 << 30)  # not written to, so it only takes address space
        if text == "die":
            os._exit(3)
        self._at += {"east": 1, "west": -1}.get(text, 0)
        if self._at == self._goal:
            return Feedback(reward=1.0)
        noise = f" {random.random()}" if self._env.noisy else ""
        return Feedback(
            observation=f"at {self._at}{noise} in {os.getpid()}" if self._env.pid else f"at {self._at}{noise}"
        )

    def close(self) -> None:
        self._env.closed += 1
        if self._env.log:
            with open(self._env.log, "a") as file:
                file.write("closed\n")


class Lighthouse:
    def __init__(
        self, seed: int = 0, *, noisy: bool = False, replayable: bool = True, pid: bool = False, log: str = ""
    ) -> None:
        self.seed, self.noisy, self.replayable, self.pid, self.log = seed, noisy, replayable, pid, log
        self.opened, self.closed = 0, 0

    def task(self, index: int) -> Task:
        return Task(id=f"light/{index}", prompt="Find the light.", answer=index % 5 + 2)

    async def open(self, task: Task) -> Walk:
        self.opened += 1
        return Walk(self, task)


def build(seed: int, **options: Any) -> Lighthouse:
    return Lighthouse(seed, **options)


class Crowd:
    """Without state. The reward is the number of calls in progress, and a call takes `s` seconds."""

    def __init__(self, seed: int, s: float = 0.2) -> None:
        self.s, self.calls = s, 0

    def task(self, index: int) -> Task:
        return Task(id=f"crowd/{index}", prompt="Wait.")

    async def feedback(self, task: Task, turns: Any) -> Feedback:
        self.calls += 1
        try:
            await asyncio.sleep(self.s)
            return Feedback(reward=float(self.calls))
        finally:
            self.calls -= 1


class Relay:
    """With state: three turns of 0.1 s. The reward depends on all texts. Every step adds a byte to a file."""

    def __init__(self, seed: int, notes: str) -> None:
        self.notes = notes

    def task(self, index: int) -> Task:
        return Task(id=f"relay/{index}", prompt=f"{index % 10}+1=")

    def open(self, task: Task) -> Any:
        return RelaySession(self.notes)


class RelaySession:
    def __init__(self, notes: str) -> None:
        self._notes, self._said = notes, list[str]()

    async def step(self, text: str) -> Feedback:
        with open(self._notes, "a") as file:
            file.write(".")
        self._said.append(text)
        await asyncio.sleep(0.1)
        if len(self._said) == 3:
            return Feedback(reward=sum(map(ord, "".join(self._said))) % 7 / 7)
        return Feedback(observation=f"{len(self._said)}+{len(text)}=")

    def close(self) -> None: ...
