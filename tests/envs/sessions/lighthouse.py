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
        if text == "hoard":
            bytearray(3 << 30)
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
