"""An engine whose tokens are a hash of seed and context, and an environment whose feedback is a hash of the turns.

The slightest change of the context changes the tokens, so a response that continues from the wrong place is noticed.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import xxhash

from windfall.engine.base import Engine
from windfall.types import Chunk, Feedback, Finish, Request, Task, Turn

STOP = 0


def said(seed: int, context: Sequence[int]) -> tuple[int, float]:
    """The next token and its log-prob. The slightest change of the context changes the token."""
    bits = xxhash.xxh3_64_intdigest(f"{seed}/{list(context)}".encode())
    return STOP if bits % 9 == 0 else 65 + bits // 9 % 26, -(bits % 1024) / 1024


class Hashing(Engine):
    """Implements Engine. Counts in `made` how often each (seed, position) was generated, over all engines."""

    def __init__(self, made: Counter[tuple[int, int]]) -> None:
        self.version, self.made = 0, made
        self._running: dict[str, tuple[Request, list[int]]] = {}

    def __len__(self) -> int:
        return len(self._running)

    def add(self, request: Request) -> None:
        assert request.id not in self._running, f"{request.id} was added twice"
        self._running[request.id] = (request, list(request.prompt))

    def cancel(self, id: str) -> None:
        self._running.pop(id, None)

    def step(self) -> list[Chunk]:
        return [self._next(request, context) for request, context in list(self._running.values())]

    def _next(self, request: Request, context: list[int]) -> Chunk:
        token, logprob = said(request.seed, context)
        context.append(token)
        new = len(context) - len(request.prompt)
        position = request.position + new - 1
        self.made[request.seed, position] += 1
        finish: Finish | None = "stop" if token in request.stop else "length" if new == request.max_tokens else None
        if finish:
            del self._running[request.id]
        return Chunk(
            id=request.id, position=position, tokens=(token,), logprobs=(logprob,), version=self.version, finish=finish
        )

    def swap(self, version: int, weights: Mapping[str, Any] | None = None, *, policy: str = "") -> None:
        self.version = version


class CharacterText:
    """A stand-in for models.text.Text: each character is one token; a stop token is not part of the text."""

    stop = frozenset({STOP})

    def prompt(self, text: str) -> tuple[int, ...]:
        return tuple(map(ord, text))

    def observation(self, text: str, *, last: int | None = None) -> tuple[int, ...]:
        return self.prompt(text)

    def decode(self, ids: Sequence[int], *, special: bool = False) -> str:
        return "".join(chr(i) for i in ids if i != STOP)


class MultiTurnEnv:
    """Odd tasks take up to three turns; some rewards are slow, some never arrive. It depends only on the turns."""

    def __init__(self) -> None:
        self.asked: Counter[tuple[str, tuple[str, ...]]] = Counter()

    def task(self, index: int) -> Task:
        return Task(id=f"n/{index}", prompt=f"{index}=", answer=index)

    async def feedback(self, task: Task, turns: Sequence[Turn]) -> Feedback:
        texts = tuple(t.text for t in turns)
        self.asked[task.id, texts] += 1
        bits = xxhash.xxh3_64_intdigest("/".join(texts).encode())
        await asyncio.sleep(0.11 * (bits % 3))
        if task.answer % 2 and len(turns) < 3:
            return Feedback(observation=f"+{len(turns)}")
        if bits % 5 == 0:
            raise ConnectionError("the grader is away")
        return Feedback(reward=float(len(texts[-1])))
